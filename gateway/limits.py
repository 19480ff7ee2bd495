"""How much one request may ask for. The caps that keep a small request from costing a large answer.

Only numbers and names: ranges of sampling values are in ``openai.sampling``, sizes that an operator sets are in
``config``. The engine has caps of its own and trusts none of these.
"""

from __future__ import annotations

MAX_N = 128  # choices of one prompt
MAX_PROMPTS = 1024  # prompts in one /v1/completions request
MAX_EMBEDDING_INPUTS = 2048  # inputs in one /v1/embeddings request, as OpenAI's
MAX_DIMENSIONS = 65_536  # of a vector, more than any model's
MAX_CHOICES = 1024  # n times prompts
MAX_CONCURRENT_PROMPTS = 64  # prompts of one request that are generated at once
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1  # what any vocabulary is smaller than; the backend knows its own
MAX_CACHE_SALT_LENGTH = 256

# What one body may make of itself in memory. Text is not limited here: it costs one byte a byte.
MAX_FIELD_SIZE = 64 * 1024  # bytes of JSON in a field other than the bulky ones
MAX_QUOTES = 128 * 1024  # quotation marks in messages or prompts: about 16,000 messages
MAX_PROMPT_TOKENS = 1024 * 1024  # token ids in one body

# Variables that a request may hand to a chat template: switches only, never text that a template would paste.
CHAT_TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking"})

MAX_ERROR_MESSAGE = 1000  # characters of an error's text that are sent: at six bytes each, well under 16 KiB

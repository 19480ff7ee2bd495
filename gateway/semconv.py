"""The names of everything that is measured: one table, so that a change of convention is a change of one line.

``gen_ai.*`` and ``http.*`` follow the OpenTelemetry semantic conventions (GenAI v1.41, in development; HTTP, stable),
their bucket boundaries included, so that ready-made dashboards fit. ``suimon.*`` is ours. This module knows names and
units, not values.
"""

from __future__ import annotations

from typing import NamedTuple

# Attributes.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
CHOICE_COUNT = "gen_ai.request.choice.count"
DIMENSIONS = "gen_ai.embeddings.dimension.count"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STREAM = "gen_ai.request.stream"
TOKEN_TYPE = "gen_ai.token.type"
ERROR_TYPE = "error.type"
FALLBACK_FROM, FALLBACK_REASON = "suimon.fallback.from", "suimon.fallback.reason"
SERVER_ADDRESS, SERVER_PORT = "server.address", "server.port"
HTTP_METHOD, HTTP_ROUTE, HTTP_STATUS = "http.request.method", "http.route", "http.response.status_code"
URL_PATH, URL_SCHEME = "url.path", "url.scheme"

# SamplingParams field -> span attribute, set where it differs from the default.
SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
    "seed": REQUEST_SEED,
}


class Metric(NamedTuple):
    """One instrument; ``buckets`` are the upper bounds of a histogram in its unit."""

    name: str
    unit: str
    description: str
    buckets: tuple[float, ...] = ()


_DURATION = tuple(0.01 * 2**i for i in range(14))  # 0.01 .. 81.92
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_FINE = tuple(0.001 * factor for factor in (1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 200, 500, 1000, 2500))

REQUEST_DURATION = Metric("gen_ai.server.request.duration", "s", "Time from a request to its last token", _DURATION)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token", "s", "Time from a request to its first token", _FIRST_TOKEN
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token", "s", "Mean time per output token after the first", _PER_TOKEN
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage", "{token}", "Tokens of a request, by type", tuple(float(4**i) for i in range(14))
)
HTTP_DURATION = Metric("http.server.request.duration", "s", "Time to answer an HTTP request", _HTTP)
QUEUE_TIME = Metric("suimon.request.queue_time", "s", "Time in the gateway's own queue", _DURATION)
INTER_TOKEN_LATENCY = Metric("suimon.inter_token_latency", "s", "Time between two tokens of one choice", _FINE)
REQUESTS_FINISHED = Metric("suimon.requests.finished", "{request}", "Requests that ended, by reason")

# Load field -> instrument: levels are gauges by model ...
LEVELS = {
    "running": Metric("suimon.requests.running", "{request}", "Requests being computed"),
    "waiting": Metric("suimon.requests.waiting", "{request}", "Requests waiting to be computed"),
    "queued_tokens": Metric("suimon.queued_tokens", "{token}", "Prompt tokens waiting to be computed"),
    "blocks_total": Metric("suimon.kv_blocks.capacity", "{block}", "Blocks of the KV cache: free + used + cached"),
    "blocks_free": Metric("suimon.kv_blocks.free", "{block}", "Blocks that hold nothing"),
    "blocks_used": Metric("suimon.kv_blocks.used", "{block}", "Blocks that running sequences hold"),
    "blocks_cached": Metric("suimon.kv_blocks.cached", "{block}", "Blocks kept only for later prompts"),
}
# ... and totals are counters by model.
TOTALS = {
    "preemptions": Metric("suimon.preemptions", "{preemption}", "Sequences preempted to be recomputed"),
    "prefix_cache_queries": Metric("suimon.prefix_cache.queries", "{token}", "Prompt tokens looked up"),
    "prefix_cache_hits": Metric("suimon.prefix_cache.hits", "{token}", "Prompt tokens found in the prefix cache"),
    "restarts": Metric("suimon.engine.restarts", "{restart}", "Restarts of the engine process"),
}

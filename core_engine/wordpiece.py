"""WordPiece, the tokenizer of BERT and its kin, from the pieces of a GGUF file.

Such a file writes the beginning of a word as ``▁piece`` and what goes on within one as ``piece``; in the original these
are ``piece`` and ``##piece``. Knows pieces and the library's parts; refuses to know metadata keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

WORD_START = "▁"
MAX_WORD_CHARS = 100  # the original's: a longer word is unknown


def original_pieces(tokens: Sequence[str], special: Collection[int]) -> list[str]:
    """The pieces as the original writes them; those with an index in ``special`` are markers and stay as they are."""
    return [token if index in special else _original(token) for index, token in enumerate(tokens)]


def _original(token: str) -> str:
    return token.removeprefix(WORD_START) if token.startswith(WORD_START) else f"##{token}"


def build_wordpiece(tokens: Sequence[str], *, unk_token: str, lowercase: bool) -> Backend:
    """The tokenizer of ``tokens``, without special tokens (Devlin et al. 2019; Wu et al. 2016, section 4.1)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    ids = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.WordPiece(ids, unk_token=unk_token, max_input_chars_per_word=MAX_WORD_CHARS))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend

"""The tokenizer that a GGUF file's metadata describes. Knows the ``tokenizer.ggml.*`` keys; reads no tensors.

Token ids equal those of the model's Hugging Face tokenizer. The kinds are byte-level BPE (``gpt2``), SentencePiece BPE
(``llama``), SentencePiece BPE whose merges are in the file (``gemma4``) and WordPiece (``bert``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader.end_tokens import marked_end_tokens
from suimon.core_engine.pre_tokenizers import pre_tokenizer
from suimon.core_engine.spm_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    USER_DEFINED,
    Merges,
    SpmOptions,
    build_spm,
    ranked_merges,
)
from suimon.core_engine.tokenizer import Tokenizer, frame_with
from suimon.core_engine.wordpiece import build_wordpiece, original_pieces

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."

# Names that chat templates know, and the metadata key of each one's id. ("seperator" is how GGUF spells it.)
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked arrays of the metadata. ``tokens`` are unique; ``types`` are as long as ``tokens``."""

    source: object
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: np.ndarray[Any, np.dtype[np.int32]]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, default)

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.source}: {problem}. The file is damaged or was converted wrongly.")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        return bool(value) if isinstance(value, (bool, int)) else self.fail(f"{_PREFIX}{key} is no bool")

    def token_id(self, key: str) -> int | None:
        """The id under ``key``; None if the key is missing or, as some converters write, is out of range."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int):
            self.fail(f"{_PREFIX}{key} is no number")
        if 0 <= value < len(self.tokens):
            return value
        logger.warning("%s: %s%s is %d, outside the vocabulary; it is ignored", self.source, _PREFIX, key, value)
        return None

    def scores(self) -> Sequence[float]:
        """Scores of SentencePiece pieces; those that the user of the trainer defined are joined before all others."""
        scores = np.array(self.get("scores", ()), dtype=np.float32)
        if len(scores) != len(self.tokens):
            self.fail(f"{_PREFIX}scores has {len(scores)} entries for {len(self.tokens)} tokens")
        scores[self.types == USER_DEFINED] = 0.0
        result: Sequence[float] = scores.tolist()
        return result

    def merges(self) -> list[tuple[str, str]]:
        merges = self.get("merges")
        if not isinstance(merges, list):
            self.fail(f"{_PREFIX}merges is missing")
        if any(merge.count(" ") != 1 for merge in merges):
            self.fail(f"{_PREFIX}merges has an entry that is not two tokens with a space between them")
        flat = " ".join(merges).split(" ") if merges else []
        return list(zip(flat[::2], flat[1::2], strict=True))


def load_gguf_tokenizer(path: Path, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of the GGUF file at ``path``; raises ModelLoadError or UnsupportedModelError naming the file."""
    from suimon.core_engine.loader.gguf import read_header

    return tokenizer_from_metadata(read_header(path).metadata, source=path, cache_dir=cache_dir)


def tokenizer_from_metadata(metadata: Mapping[str, Any], *, source: object, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer that GGUF ``metadata`` describes; errors name ``source``."""
    model = str(metadata.get(_PREFIX + "model"))
    if model not in _KINDS:
        raise UnsupportedModelError(
            f"{source}: {_PREFIX}model is {model[:40]!r}; {', '.join(sorted(_KINDS))} are known here"
        )
    vocabulary = _vocabulary(metadata, source)
    try:
        backend, add_bos = _KINDS[model](vocabulary, cache_dir)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelLoadError(f"{source}: its vocabulary and merges do not fit together: {error}") from error
    _add_tokens(backend, vocabulary)
    special_tokens = _special_tokens(vocabulary)
    begins, ends = "bos_token", "eos_token"
    if model == "bert":
        begins, ends = ("cls_token" if "cls_token" in special_tokens else begins), "sep_token"
    frame_with(
        backend,
        bos=special_tokens.get(begins) if vocabulary.flag("add_bos_token", add_bos) else None,
        eos=special_tokens.get(ends) if vocabulary.flag("add_eos_token", model == "bert") else None,
    )
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=_end_token_ids(vocabulary),
        chat_template=_chat_template(vocabulary),
        content_hash=_content_hash(vocabulary),
        max_token_chars=max(map(len, vocabulary.tokens)),
    )


def _vocabulary(metadata: Mapping[str, Any], source: object) -> _Vocabulary:
    tokens = metadata.get(_PREFIX + "tokens")
    vocabulary = _Vocabulary(source, metadata, [], np.zeros(0, np.int32))
    if not isinstance(tokens, list) or not tokens:
        vocabulary.fail(f"{_PREFIX}tokens is missing or empty")
    types = np.asarray(metadata.get(_PREFIX + "token_type", np.full(len(tokens), NORMAL)), dtype=np.int32)
    if types.shape != (len(tokens),):
        vocabulary.fail(f"{_PREFIX}token_type has {types.size} entries for {len(tokens)} tokens")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if metadata.get(_PREFIX + "model") == "bert":
        tokens = original_pieces(tokens, set(np.flatnonzero(types != NORMAL).tolist()))
    elif metadata.get(_PREFIX + "model") != "gpt2":
        _restore_spaces(tokens, types)
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        vocabulary.fail(f"{_PREFIX}tokens has an entry that is not UTF-8")
    if len(set(tokens)) != len(tokens):
        vocabulary.fail(f"{_PREFIX}tokens names {len(tokens) - len(set(tokens))} of {len(tokens)} tokens twice")
    return _Vocabulary(source, metadata, tokens, types)


def _restore_spaces(tokens: list[str], types: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Give user-defined runs of spaces the sign that SentencePiece has for a space: converters write spaces out."""
    for index in (types == USER_DEFINED).nonzero()[0].tolist():
        if not tokens[index].strip(" "):
            tokens[index] = SPACE * len(tokens[index])


# --- the kinds; each gives a tokenizer without added tokens, and whether prompts begin with BOS by default


def _byte_level(vocabulary: _Vocabulary, cache_dir: Path | None) -> tuple[Backend, bool]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    name = vocabulary.get("pre") or "default"
    if name == "default":
        logger.warning("%s names no pre-tokenizer: token ids may differ from the original's", vocabulary.source)
    pre = pre_tokenizer(str(name), vocabulary.source)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    backend = Backend(models.BPE(ids, vocabulary.merges(), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(vocabulary: _Vocabulary, cache_dir: Path | None) -> tuple[Backend, bool]:
    merges = ranked_merges(vocabulary.tokens, vocabulary.scores(), cache_dir)
    return _from_pieces(vocabulary, merges, add_space_prefix=True), True


def _sentencepiece_with_merges(vocabulary: _Vocabulary, cache_dir: Path | None) -> tuple[Backend, bool]:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = np.array([(ids[left], ids[right]) for left, right in vocabulary.merges()], dtype=np.int32)
    return _from_pieces(vocabulary, merges.reshape(-1, 2), add_space_prefix=False), True


def _wordpiece(vocabulary: _Vocabulary, cache_dir: Path | None) -> tuple[Backend, bool]:
    unk = vocabulary.token_id("unknown_token_id")
    unk_token = vocabulary.tokens[0 if unk is None else unk]
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    return build_wordpiece(vocabulary.tokens, unk_token=unk_token, lowercase=lowercase), True


def _from_pieces(vocabulary: _Vocabulary, merges: Merges, *, add_space_prefix: bool) -> Backend:
    charsmap = vocabulary.get("precompiled_charsmap")
    options = SpmOptions(
        add_space_prefix=vocabulary.flag("add_space_prefix", add_space_prefix),
        remove_extra_whitespaces=vocabulary.flag("remove_extra_whitespaces", False),
        charsmap=b"" if charsmap is None else np.asarray(charsmap).astype(np.uint8).tobytes(),
    )
    unk = vocabulary.token_id("unknown_token_id")
    unk_token = vocabulary.tokens[0 if unk is None else unk]
    byte_fallback = bool((vocabulary.types == BYTE).any())
    return build_spm(vocabulary.tokens, merges, unk_token=unk_token, byte_fallback=byte_fallback, options=options)


_KINDS: Mapping[str, Callable[[_Vocabulary, Path | None], tuple[Backend, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece_with_merges,
    "bert": _wordpiece,
}

# --- special tokens


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Make every control and user-defined token one id wherever it is written in a text."""
    unk = vocabulary.token_id("unknown_token_id")
    chosen = np.isin(vocabulary.types, (CONTROL, USER_DEFINED)).nonzero()[0].tolist()
    if unk is not None and unk not in chosen:
        chosen.append(unk)
    backend.add_tokens([_added_token(vocabulary, index) for index in chosen if not _is_padding(vocabulary, index)])


def _is_padding(vocabulary: _Vocabulary, index: int) -> bool:
    """Whether the converter made the token up, to fill the vocabulary to the size of the embedding."""
    return vocabulary.tokens[index] == f"[PAD{index}]"


def _added_token(vocabulary: _Vocabulary, index: int) -> AddedToken:
    from tokenizers import AddedToken

    text = vocabulary.tokens[index]
    special = int(vocabulary.types[index]) != USER_DEFINED
    return AddedToken(text, special=special, normalized=False, rstrip=_takes_spaces_behind(vocabulary, text))


def _takes_spaces_behind(vocabulary: _Vocabulary, text: str) -> bool:
    """Phi-3's markers swallow the white space behind them; GGUF has no field that says so."""
    return vocabulary.metadata.get("general.architecture") == "phi3" and (
        vocabulary.get("model") == "llama" and text not in ("<unk>", "<s>", "<|endoftext|>")
    )


def _special_tokens(vocabulary: _Vocabulary) -> dict[str, str]:
    ids = {name: vocabulary.token_id(key) for name, key in _NAMED_TOKENS.items()}
    return {name: vocabulary.tokens[index] for name, index in ids.items() if index is not None}


def _end_token_ids(vocabulary: _Vocabulary) -> frozenset[int]:
    named = (vocabulary.token_id(key) for key in _END_KEYS)
    control = {vocabulary.tokens[index]: index for index in (vocabulary.types == CONTROL).nonzero()[0].tolist()}
    return frozenset(marked_end_tokens(control)).union(index for index in named if index is not None)


def _chat_template(vocabulary: _Vocabulary) -> str | None:
    template = vocabulary.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def _content_hash(vocabulary: _Vocabulary) -> str:
    digest = hashlib.sha256("\0".join(vocabulary.tokens).encode())
    for key in sorted(key for key in vocabulary.metadata if key.startswith(_PREFIX) and key != _PREFIX + "tokens"):
        value = vocabulary.metadata[key]
        content = "\0".join(value) if isinstance(value, list) else value
        raw = content.tobytes() if isinstance(content, np.ndarray) else str(content).encode(errors="surrogateescape")
        digest.update(f"\0\0{key}\0".encode() + raw)
    return digest.hexdigest()

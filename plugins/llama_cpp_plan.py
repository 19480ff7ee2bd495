"""What a GGUF file and a configuration make of llama.cpp's sizes; and the look at the file before the library's.

Knows metadata keys, memory and cores; refuses to know the library. Of files with a few changed bytes one in a hundred
makes the library abort its process, so that its parser sees none that ours has not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from suimon.core_engine import machine
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader.gguf import GGUFHeader, read_header
from suimon.plugins.llama_cpp_options import LlamaCppOptions

GIB = 1 << 30
# The library fills its KV memory with zeros when it starts, so that all of it is taken at once.
CPU_KV_CACHE_LIMIT = GIB
MAX_NUM_SEQS = {"cpu": 16, "gpu": 64}
BATCHED_TOKENS = 512  # a step of this many keeps other streams waiting for as long as one computation of the library's
EMBEDDING_TOKENS = 2048  # of one input, unless max_model_len says otherwise: an encoder takes all of it in one step
# In one pool, a CPU looks at every cell for every row, head and layer, and skips those of others: ended sequences slow
# down those that run (docs/llama-cpp.md has figures). The one that ended last is kept in any case.
KEPT_TOKENS = {"cpu": 512, "gpu": 1 << 30}

# Where each sequence has memory of its own, a copy moves all of it: per token of the context as much as computing this
# part of a token, on the machines where it was measured.
COPY_COST = 1 / 64
OWN_SEATS = 4  # then at least, if they fit: conversations that take turns find each their own again
MAX_SEQUENCES = 256  # of the library's, in one context
_KV_PADDING = 256  # the library rounds the context of a sequence up to a multiple of it

_CACHE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
_LIMITS = {"block_count": 4096, "context_length": 1 << 30, "embedding_length": 1 << 20}
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppPlan:
    """Sizes in tokens and sequences; ``kv_bytes`` is what one token takes.

    ``num_tokens`` are one pool for all sequences if ``kv_unified``, else equal parts of it belong to ``num_seats``.
    """

    device: str
    max_model_len: int
    num_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_ubatch_tokens: int
    num_threads: int
    num_threads_batch: int
    max_kept_tokens: int
    kv_bytes: int
    kv_unified: bool
    num_seats: int

    def _kv_words(self) -> str:
        if self.kv_unified:
            return f"{self.num_tokens:,} tokens in one pool, up to {self.max_kept_tokens:,} of them of ended sequences"
        return f"{self.num_tokens // self.num_seats:,} tokens for each of {self.num_seats} sequences"

    @property
    def min_shared_tokens(self) -> int:
        """A beginning that is shorter than this is faster computed again than copied."""
        return 1 if self.kv_unified else max(1, round(self.num_tokens / self.num_seats * COPY_COST))

    def describe(self) -> list[str]:
        """A few lines for people."""
        memory = self.num_tokens * self.kv_bytes / GIB
        threads = f"{self.num_threads} threads" + (
            f", {self.num_threads_batch} for prompts" if self.num_threads_batch != self.num_threads else ""
        )
        return [
            f"device {self.device}, {threads}",
            f"KV cache {memory:.2f} GiB: {self._kv_words()}",
            f"context {self.max_model_len:,} tokens",
            f"at most {self.max_num_seqs} sequences and {self.max_num_batched_tokens:,} tokens a step",
        ]


def find_file(path: Path) -> Path:
    """The GGUF file at ``path``: itself, or the only one (or the first part of one) in a folder. ModelLoadError."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    firsts = [file for file in files if not (part := _PART.search(file.name)) or int(part[1]) == 1]
    if len(firsts) == 1:
        return firsts[0]
    found = ", ".join(file.name for file in firsts) or "none"
    raise ModelLoadError(f"{path}: llama.cpp serves one .gguf file; the folder has {found}. Name the file.")


def checked_header(path: Path) -> GGUFHeader:
    """The file's header, and that of its other parts if it has any, read and checked by our parser.

    Raises ModelLoadError naming the file and the field at fault.
    """
    header = read_header(path)
    for part in _other_parts(path, header):
        read_header(part)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", architecture):
        raise ModelLoadError(f"{path}: general.architecture is {architecture!r:.80}, expected a name")
    for key, limit in _LIMITS.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelLoadError(f"{path}: {architecture}.{key} is {value!r:.40}, expected a number from 1 to {limit}")
    _check_vocabulary(header)
    return header


def _other_parts(path: Path, header: GGUFHeader) -> list[Path]:
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= _MAX_PARTS:
        raise ModelLoadError(f"{path}: split.count is {count!r:.40}, expected a number up to {_MAX_PARTS}")
    if count <= 1:
        return []
    name = _PART.search(path.name)
    if name is None or int(name[1]) != 1 or int(name[2]) != count:
        raise ModelLoadError(
            f"{path}: a file in {count} parts: name the first, which ends in -00001-of-{count:05}.gguf"
        )
    stem = path.name[: name.start()]
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]


def _check_vocabulary(header: GGUFHeader) -> None:
    """The library trusts that these lists are as long as each other, and that ids are numbers."""
    metadata, count = header.metadata, None
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        count = len(tokens)
    for key in ("scores", "token_type"):
        values = metadata.get(f"tokenizer.ggml.{key}")
        if values is not None and (not isinstance(values, np.ndarray) or len(values) != count):
            raise ModelLoadError(f"{header.path}: tokenizer.ggml.{key} has no entry for each of the {count} tokens")
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and type(value) is not int:
            raise ModelLoadError(f"{header.path}: {key} is {value!r:.40}, expected a number")


def is_embedding_model(header: GGUFHeader, options: LlamaCppOptions) -> bool:
    """Whether it is to serve vectors: as the options say, or because the file tells how its tokens are pooled."""
    if options.embedding is not None:
        return options.embedding
    architecture = header.metadata["general.architecture"]
    is_causal = header.metadata.get(f"{architecture}.attention.causal", True)
    return not is_causal or bool(header.metadata.get(f"{architecture}.pooling_type", 0))


def make_plan(
    config: EngineConfig,
    options: LlamaCppOptions,
    header: GGUFHeader,
    *,
    on_gpu: bool,
    embeds: bool,
    free_memory: int | None = None,
) -> LlamaCppPlan:
    """Every size. ``free_memory``: bytes where the KV goes; default: this machine's.

    Raises InvalidRequestError for a setting that cannot be met, ModelLoadError for no memory.
    """
    kind = "gpu" if on_gpu else "cpu"
    length = _model_length(config, header, embeds)
    seqs = 1 if embeds else config.max_num_seqs or MAX_NUM_SEQS[kind]
    if seqs > MAX_SEQUENCES:
        message = f"max_num_seqs is {seqs}; llama.cpp has room for {MAX_SEQUENCES}"
        raise InvalidRequestError(message, param="max_num_seqs")
    batched = length if embeds else max(config.max_num_batched_tokens or BATCHED_TOKENS, seqs)
    threads = options.n_threads or config.num_threads or machine.usable_cores()
    kv_bytes = _kv_bytes(header, options)
    allowed = length if embeds else _allowed_tokens(config, kv_bytes, kind, free_memory)
    memory = _Memory.pool(length, 1) if embeds else _memory(options, allowed, length, seqs)
    if memory.longest < length and config.max_model_len is not None:
        raising = "num_blocks" if config.num_blocks is not None else "kv_cache_memory"
        message = f"max_model_len {length} does not fit: {memory.describe()}; raise {raising}"
        raise InvalidRequestError(message, param="max_model_len")
    kept = KEPT_TOKENS[kind] if options.max_kept_tokens is None and memory.is_pool else options.max_kept_tokens
    return LlamaCppPlan(
        device=kind,
        max_model_len=min(length, memory.longest),
        num_tokens=memory.num_tokens,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        num_ubatch_tokens=batched if embeds else min(options.n_ubatch, batched),
        num_threads=threads,
        num_threads_batch=options.n_threads_batch or threads,
        max_kept_tokens=memory.num_tokens if kept is None else min(kept, memory.num_tokens),
        kv_bytes=kv_bytes,
        kv_unified=memory.is_pool,
        num_seats=memory.num_seats,
    )


def _model_length(config: EngineConfig, header: GGUFHeader, embeds: bool) -> int:
    own = int(header.metadata[f"{header.metadata['general.architecture']}.context_length"])
    if config.max_model_len is not None and config.max_model_len > own:
        message = f"max_model_len is {config.max_model_len}, but the model's positions end at {own}"
        raise InvalidRequestError(message, param="max_model_len")
    return config.max_model_len or (min(own, EMBEDDING_TOKENS) if embeds else own)


@dataclass(frozen=True, slots=True)
class _Memory:
    """``num_tokens`` of KV: one pool, or equal parts of it for each of ``num_seats`` sequences."""

    num_tokens: int
    num_seats: int
    is_pool: bool

    @classmethod
    def pool(cls, num_tokens: int, num_seqs: int) -> _Memory:
        return cls(num_tokens, min(2 * num_seqs, MAX_SEQUENCES), is_pool=True)

    @classmethod
    def own(cls, length: int, num_seats: int) -> _Memory:
        """Each sequence's part is what the library makes of ``length``."""
        return cls(-(-length // _KV_PADDING) * _KV_PADDING * num_seats, num_seats, is_pool=False)

    @property
    def longest(self) -> int:
        """Tokens that one sequence can have."""
        return self.num_tokens if self.is_pool else self.num_tokens // self.num_seats

    def describe(self) -> str:
        if self.is_pool:
            return f"the KV cache has {self.num_tokens:,} tokens"
        return f"the KV cache has {self.longest:,} tokens for each of {self.num_seats} sequences"


def _memory(options: LlamaCppOptions, allowed: int, length: int, num_seqs: int) -> _Memory:
    """Own memory for each sequence, which is faster, if ``num_seqs`` whole contexts fit; else one pool for all.

    Where each has its own, a few of them keep what has ended even if fewer may run at a time.
    """
    fits = allowed >= length * num_seqs
    if options.kv_unified or (options.kv_unified is None and not fits):
        return _Memory.pool(min(allowed, length * num_seqs), num_seqs)
    if fits:
        return _Memory.own(length, min(max(num_seqs, OWN_SEATS), allowed // length))
    share = allowed // num_seqs // _KV_PADDING * _KV_PADDING
    if not share:
        message = f"a KV cache of {allowed:,} tokens gives none of {num_seqs} sequences {_KV_PADDING} of its own"
        raise InvalidRequestError(f"{message}; set kv_unified = true or lower max_num_seqs", param="options.kv_unified")
    return _Memory.own(share, num_seqs)


def _allowed_tokens(config: EngineConfig, kv_bytes: int, kind: str, free_memory: int | None) -> int:
    if config.num_blocks is not None:
        return config.num_blocks * config.block_size
    budget = config.kv_cache_memory
    if budget is None:
        free = machine.available_memory() if free_memory is None else free_memory
        budget = int(config.memory_utilization * free)
        budget = min(budget, CPU_KV_CACHE_LIMIT) if kind == "cpu" else budget
    if budget < _KV_PADDING * kv_bytes:
        need = f"{_KV_PADDING} tokens take {_KV_PADDING * kv_bytes:,} bytes, and {budget:,} are allowed"
        raise ModelLoadError(f"no memory for a KV cache: {need}; kv_cache_memory says how many may be")
    return budget // kv_bytes


def _kv_bytes(header: GGUFHeader, options: LlamaCppOptions) -> int:
    """Bytes of one token's K and V in all layers; 1 for a model without heads. ModelLoadError for negative numbers."""
    get = _numbers(header.metadata)
    layers, heads = get("block_count")[0], get("attention.head_count", 1)[0]
    width = get("embedding_length")[0] // max(heads, 1)
    kv_heads = get("attention.head_count_kv", heads)
    total = sum(kv_heads) if len(kv_heads) > 1 else kv_heads[0] * layers
    key, value = get("attention.key_length", width)[0], get("attention.value_length", width)[0]
    if min(heads, key, value, *kv_heads) < 0:
        counts = f"{heads} heads, {kv_heads} for K and V, of {key} and {value} numbers"
        raise ModelLoadError(f"{header.path}: its attention has {counts}")
    return max(1, round(total * (key * _CACHE_BYTES[options.type_k] + value * _CACHE_BYTES[options.type_v])))


def _numbers(metadata: Mapping[str, Any]) -> Any:
    architecture = metadata["general.architecture"]

    def get(key: str, default: int = 0) -> list[int]:
        value = metadata.get(f"{architecture}.{key}", default)
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        return [int(v) for v in values if isinstance(v, int)] or [default]

    return get


def check_architecture(header: GGUFHeader, *, has_encoder: bool, has_decoder: bool, embeds: bool) -> None:
    """Raise UnsupportedModelError for a model that is served in no such way."""
    name = header.metadata["general.architecture"]
    if has_encoder and has_decoder:
        raise UnsupportedModelError(f"{header.path}: {name} has an encoder and a decoder; such models are not served")
    if not embeds and not has_decoder:
        raise UnsupportedModelError(f"{header.path}: {name} writes no text; set options.embedding = true")

"""What ``auto`` means: dtype, device, threads, KV cache and step sizes, from the model and this machine.

Knows budgets and the reasons for them. Refuses to know how a model is loaded or run: it is asked once before loading
(``plan_device``) and once after (``plan_engine``), when the weights' real size and the memory left are known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from suimon.core_engine import machine
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError
from suimon.core_engine.layers.kv_cache import KVShape, bytes_per_block
from suimon.kernels.cpu_features import has_bfloat16_instructions

GIB = 1 << 30
# Float32 weights are "comfortable" if they take at most this share of the memory we may use.
COMFORTABLE_SHARE = 0.5
# A CPU reads its whole KV cache slowly: more than this is taken only when asked for.
CPU_KV_CACHE_LIMIT = 4 * GIB
# On a CPU the cost of a row stops falling at about 32 rows a step; a GPU goes on for hundreds.
MAX_NUM_SEQS = {"cpu": 32, "cuda": 256}
# Tokens of a step: where products reach the processor's full speed. More would only make other streams wait longer.
BATCHED_TOKENS_PER_CORE = 128
BATCHED_TOKENS_BOUNDS = (256, 2048)
GPU_BATCHED_TOKENS = 8192

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SizedModel(Protocol):
    """What of a loaded model matters for sizing."""

    vocab_size: int
    max_position: int
    kv_shapes: tuple[KVShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Where the model runs and in what; ``reasons`` says why, by field name."""

    device: str
    dtype: torch.dtype
    num_threads: int
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan(DevicePlan):
    """Every size of an engine. Memory is in bytes; lengths and budgets count tokens."""

    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def describe(self) -> str:
        """A few lines for people: what was chosen and why."""
        tokens = f"{self.num_blocks * self.block_size:,} tokens in {self.num_blocks:,} blocks of {self.block_size}"
        rows = {
            "device": f"{self.device}, {self.num_threads} threads" if self.device == "cpu" else self.device,
            "dtype": str(self.dtype).removeprefix("torch."),
            "num_blocks": f"KV cache {self.kv_cache_bytes / GIB:.2f} GiB: {tokens}",
            "max_model_len": f"context {self.max_model_len:,} tokens",
            "max_num_seqs": f"at most {self.max_num_seqs} sequences a step",
            "max_num_batched_tokens": f"at most {self.max_num_batched_tokens:,} tokens a step",
        }
        return "\n".join(f"{text} ({self.reasons[name]})" for name, text in rows.items())


def plan_device(config: EngineConfig, model_config: Mapping[str, Any]) -> DevicePlan:
    """Resolve device, dtype and threads before loading. Raises ModelLoadError for a device that is not there."""
    reasons: dict[str, str] = {}
    device = _device(config, reasons)
    return DevicePlan(
        device=device,
        dtype=_dtype(config, model_config, device, reasons),
        num_threads=_threads(config, reasons),
        reasons=reasons,
    )


def plan_engine(config: EngineConfig, loaded: DevicePlan, model: SizedModel) -> EnginePlan:
    """Resolve the rest, for a model that is loaded. Raises ModelLoadError or InvalidRequestError with the numbers."""
    reasons = dict(loaded.reasons)
    size = bytes_per_block(model.kv_shapes, config.block_size, loaded.dtype)
    wanted_len = _wanted_length(config, model)
    seqs = _choose(config.max_num_seqs, MAX_NUM_SEQS.get(_kind(loaded), 256), "max_num_seqs", reasons)
    default_tokens = max(_batched_tokens(loaded), seqs)
    tokens = _choose(config.max_num_batched_tokens, default_tokens, "max_num_batched_tokens", reasons)
    blocks = _num_blocks(config, loaded, size, wanted_len * seqs, reasons)
    return EnginePlan(
        device=loaded.device,
        dtype=loaded.dtype,
        num_threads=loaded.num_threads,
        max_model_len=_max_model_len(config, wanted_len, blocks, size, reasons),
        block_size=config.block_size,
        num_blocks=blocks,
        bytes_per_block=size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        reasons=reasons,
    )


def estimate_parameters(config: Mapping[str, Any]) -> int:
    """About how many parameters a Hugging Face config describes, for decisions taken before loading; 0 if unknown."""
    text = config.get("text_config")
    sizes = {**config, **text} if isinstance(text, Mapping) else config

    def size(key: str, default: int = 0) -> int:
        value = sizes.get(key)
        return int(value) if isinstance(value, int) else default

    hidden, heads = size("hidden_size"), size("num_attention_heads", 1)
    head_dim = size("head_dim", hidden // max(heads, 1))
    attention = hidden * head_dim * 2 * (heads + size("num_key_value_heads", heads))
    experts = max(size("num_local_experts"), size("num_experts"), 1)
    mlp = 3 * hidden * size("intermediate_size", 4 * hidden) * experts
    embeddings = size("vocab_size") * hidden * (1 if sizes.get("tie_word_embeddings") else 2)
    return size("num_hidden_layers") * (attention + mlp) + embeddings


def _device(config: EngineConfig, reasons: dict[str, str]) -> str:
    if config.device == "auto":
        found = torch.cuda.is_available()
        reasons["device"] = "a GPU was found" if found else "no GPU was found"
        return "cuda" if found else "cpu"
    reasons["device"] = "as configured"
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(
            f"device is {config.device!r}, but PyTorch finds no GPU; install a CUDA build or use 'cpu'"
        )
    return config.device


def _dtype(config: EngineConfig, model_config: Mapping[str, Any], device: str, reasons: dict[str, str]) -> torch.dtype:
    if config.dtype != "auto":
        reasons["dtype"] = "as configured"
        return _DTYPES[config.dtype]
    if device != "cpu":
        return _gpu_dtype(model_config, reasons)
    if has_bfloat16_instructions():
        reasons["dtype"] = "the processor multiplies bfloat16 itself"
        return torch.bfloat16
    weights = 4 * estimate_parameters(model_config)
    usable = config.memory_utilization * machine.available_memory()
    if weights <= COMFORTABLE_SHARE * usable:
        reasons["dtype"] = "the processor has no bfloat16 instructions, and float32 weights fit comfortably"
        return torch.float32
    reasons["dtype"] = f"float32 weights would take {weights / GIB:.1f} of the {usable / GIB:.1f} GiB we may use"
    return torch.bfloat16


def _gpu_dtype(model_config: Mapping[str, Any], reasons: dict[str, str]) -> torch.dtype:
    text = model_config.get("text_config")
    sources = (model_config, text) if isinstance(text, Mapping) else (model_config,)
    stored = next((str(s[key]) for s in sources for key in ("dtype", "torch_dtype") if s.get(key)), "bfloat16")
    if stored.removeprefix("torch.") == "float16" or not torch.cuda.is_bf16_supported():
        reasons["dtype"] = "the checkpoint's, or all that the GPU has"
        return torch.float16
    reasons["dtype"] = "the GPU multiplies bfloat16 itself"
    return torch.bfloat16


def _threads(config: EngineConfig, reasons: dict[str, str]) -> int:
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if config.num_threads is not None or chosen.isdigit():
        return config.num_threads or int(chosen)
    return machine.usable_cores()


def _kind(plan: DevicePlan) -> str:
    return plan.device.partition(":")[0]


def _batched_tokens(plan: DevicePlan) -> int:
    low, high = BATCHED_TOKENS_BOUNDS
    return (
        min(max(BATCHED_TOKENS_PER_CORE * plan.num_threads, low), high) if plan.device == "cpu" else GPU_BATCHED_TOKENS
    )


def _choose(configured: int | None, default: int, name: str, reasons: dict[str, str]) -> int:
    reasons[name] = "as configured" if configured else "beyond that a step only gets longer"
    return configured or default


def _wanted_length(config: EngineConfig, model: SizedModel) -> int:
    length = config.max_model_len or model.max_position
    if length > model.max_position:
        message = f"max_model_len is {length}, but the model's positions end at {model.max_position}"
        raise InvalidRequestError(message, param="max_model_len")
    return length


def _num_blocks(
    config: EngineConfig, loaded: DevicePlan, block_bytes: int, useful_tokens: int, reasons: dict[str, str]
) -> int:
    if config.num_blocks is not None:
        reasons["num_blocks"] = "as configured"
        return config.num_blocks
    budget = config.kv_cache_memory
    reasons["num_blocks"] = "as configured"
    if budget is None:
        free = _free_memory(loaded)
        budget = int(config.memory_utilization * free)
        reasons["num_blocks"] = f"{config.memory_utilization:.0%} of the {free / GIB:.1f} GiB left after loading"
        if _kind(loaded) == "cpu" and budget > CPU_KV_CACHE_LIMIT:
            budget = CPU_KV_CACHE_LIMIT
            reasons["num_blocks"] = "a CPU's limit unless kv_cache_memory asks for more"
    blocks, useful = budget // block_bytes, -(-useful_tokens // config.block_size)
    if blocks < 1:
        need = f"one block of {config.block_size} tokens takes {block_bytes:,} bytes, and {budget:,} are left"
        raise ModelLoadError(f"no memory for a KV cache: {need}. Use a smaller model, dtype or block_size.")
    if blocks > useful:
        reasons["num_blocks"] = "every sequence can have the whole context"
    return min(blocks, useful)


def _free_memory(loaded: DevicePlan) -> int:
    if _kind(loaded) == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(loaded.device))[0])
    return machine.available_memory()


def _max_model_len(config: EngineConfig, wanted: int, blocks: int, block_bytes: int, reasons: dict[str, str]) -> int:
    fits = blocks * config.block_size
    if config.max_model_len is not None:
        reasons["max_model_len"] = "as configured"
        if wanted > fits and config.num_blocks is None:
            need = f"{-(-wanted // config.block_size) * block_bytes / GIB:.2f} GiB of KV cache"
            have = f"{blocks * block_bytes / GIB:.2f} GiB hold {fits} tokens"
            message = f"max_model_len {wanted} needs {need}, and {have}. Lower it, or raise kv_cache_memory."
            raise InvalidRequestError(message, param="max_model_len")
        return wanted
    reasons["max_model_len"] = "the model's own" if wanted <= fits else f"what the KV cache holds, of {wanted:,}"
    return min(wanted, fits)

"""EngineConfig: what an engine is asked to be. What ``auto`` means is for memory.py, once the model is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from suimon.core_engine.errors import InvalidRequestError
from suimon.core_engine.request_queue import POLICIES

NATIVE_EXECUTOR = "suimon.core_engine.model_runner:ModelRunner"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. ``None`` and ``"auto"`` are resolved from the model and this machine.

    Lengths and budgets count tokens; ``kv_cache_memory`` is bytes; intervals and timeouts are seconds.
    ``max_num_batched_tokens`` bounds the tokens of one step, so a longer prompt is computed in chunks.
    ``executor`` is the "package.module:Class" that computes the batches; ``executor_options`` are for it alone.
    """

    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    memory_utilization: float = 0.5
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_requests: int = 1024
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    seed: int = 0
    chat_template: str | None = None
    load_timeout: float = 600.0
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 10.0
    step_timeout: float = 300.0
    max_restarts: int = 5
    num_threads: int | None = None
    executor: str = NATIVE_EXECUTOR
    executor_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", "dtype")
        policies = ", ".join(POLICIES)
        message = f"scheduling_policy must be one of {policies}, got {self.scheduling_policy!r}"
        _require(self.scheduling_policy in POLICIES, message, "scheduling_policy")
        size = self.block_size
        _require(size >= 1 and size & (size - 1) == 0, f"block_size must be a power of two, got {size}", "block_size")
        share = self.memory_utilization
        _require(0.0 < share <= 1.0, f"memory_utilization must be in (0, 1], got {share}", "memory_utilization")
        for name in ("max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be at least 1, got {value}", name)


def _require(ok: bool, message: str, param: str) -> None:
    if not ok:
        raise InvalidRequestError(message, param=param)

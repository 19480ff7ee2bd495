"""What vLLM is started with: a configured model's settings and options as arguments of ``AsyncEngineArgs``.

Knows names and types; refuses to import vLLM. A repository's own code is never run: there is no ``trust_remote_code``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from suimon.gateway.hookspecs import InvalidRequest

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings

Count = Annotated[int, Meta(ge=1)]


class VLLMOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a model, named as vLLM names them."""

    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    max_concurrency: Count = 256  # requests that vLLM is given at once; the rest wait in the gateway


def read_options(model: ModelSettings, name: str) -> VLLMOptions:
    """The model's options. Raises InvalidRequest naming the model, the option and those that exist."""
    try:
        return msgspec.convert(model.options, VLLMOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(VLLMOptions.__struct_fields__)
        message = f"model {name!r}: options of the vllm backend: {error}; the options are {known}"
        raise InvalidRequest(message, param="options") from None


def engine_arguments(model: ModelSettings, options: VLLMOptions, source: str) -> dict[str, Any]:
    """The arguments of ``AsyncEngineArgs``; what nobody set is left to vLLM."""
    wanted = {
        "model": source,
        "dtype": model.dtype,
        "seed": model.seed,
        "gpu_memory_utilization": model.memory_utilization,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        "enable_prefix_caching": model.enable_prefix_caching,
        "scheduling_policy": model.scheduling_policy,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "enforce_eager": options.enforce_eager,
    }
    return {name: value for name, value in wanted.items() if value is not None}

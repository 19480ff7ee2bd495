"""What TensorRT-LLM is made with: a model's settings and its ``[models.options]`` table, in that library's terms.

Knows both vocabularies and checks what can be checked without the library; what depends on the installed version is
looked up in it, so that nothing is dropped silently. Refuses to know requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from suimon.core_engine.loader.json_file import read_object, read_object_if_there
from suimon.gateway.hookspecs import BackendUnavailable, InvalidRequest

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings

Count = Annotated[int, Meta(ge=1)]

DEFAULT_BLOCK_SIZE = 16  # ours; whoever left it gets TensorRT-LLM's own, for which its kernels are tuned
DEFAULT_CONCURRENCY = 256  # requests at once where max_num_seqs does not say
SEEDED_SAMPLER = "TRTLLMSampler"  # the one that gives each request a random state of its own

# Our name of a method -> QuantAlgo. To be replaced by the quantization registry's column when there is one.
QUANT_ALGOS = {
    "fp8": "FP8",
    "fp8_block": "FP8_BLOCK_SCALES",
    "nvfp4": "NVFP4",
    "mxfp4": "W4A16_MXFP4",
    "awq": "W4A16_AWQ",
    "gptq": "W4A16_GPTQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8": "W8A16",
    "int4": "W4A16",
    "smoothquant": "W8A8_SQ_PER_CHANNEL",
}
# Our name of a KV cache type -> KvCacheConfig.dtype.
KV_CACHE_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "nvfp4": "nvfp4"}
# speculative.method -> its class; the two that only TensorRT engines had (Medusa, Lookahead) are not there.
DECODING_CONFIGS = {
    "ngram": "NGramDecodingConfig",
    "draft_target": "DraftTargetDecodingConfig",
    "eagle": "EagleDecodingConfig",
    "eagle3": "Eagle3DecodingConfig",
    "mtp": "MTPDecodingConfig",
    "pard": "PARDDecodingConfig",
    "auto": "AutoDecodingConfig",
}


class TensorRTOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a model. None leaves the choice to TensorRT-LLM."""

    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    moe_expert_parallel_size: Count | None = None
    quantization: str = "auto"  # what the checkpoint must hold; auto: whatever it says
    kv_cache_dtype: Literal["auto", "bf16", "fp16", "fp8", "nvfp4"] = "auto"
    host_cache_size: Annotated[int, Meta(ge=0)] | None = None  # bytes of host memory for blocks that left the GPU
    enable_chunked_prefill: bool = True
    sampler_type: Literal["auto", "TRTLLMSampler", "TorchSampler"] = "auto"
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    speculative: dict[str, Any] = {}  # method = "ngram", … and that method's own fields
    trust_remote_code: bool = False  # let the checkpoint's own Python run: only for sources you would run anyway


def read_options(model: ModelSettings) -> TensorRTOptions:
    """The options of a configured model. Raises InvalidRequest naming the model, the option and the known ones."""
    known = [field.name for field in msgspec.structs.fields(TensorRTOptions)]
    for key in model.options:
        if key not in known:
            raise wrong(model, f"options.{key}", f"is not known; the options of tensorrt_llm are {', '.join(known)}")
    try:
        options = msgspec.convert(dict(model.options), TensorRTOptions)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        raise wrong(model, f"options.{path.rstrip('`') or '?'}", said.replace("`", "")) from None
    _check(model, options)
    return options


def _check(model: ModelSettings, options: TensorRTOptions) -> None:
    if model.device == "cpu":
        raise wrong(model, "device", "is cpu, and TensorRT-LLM computes on NVIDIA GPUs only: use backend native")
    if options.quantization not in ("auto", *QUANT_ALGOS):
        known = ", ".join(("auto", *QUANT_ALGOS))
        raise wrong(model, "options.quantization", f"is {options.quantization!r}; known are {known}")
    method = options.speculative.get("method")
    if options.speculative and not (isinstance(method, str) and method in DECODING_CONFIGS):
        known = ", ".join(DECODING_CONFIGS)
        raise wrong(model, "options.speculative", f"has method {method!r}; known are {known}")


def wrong(model: ModelSettings, key: str, problem: str) -> InvalidRequest:
    """The error for a setting that cannot be: which model, which key, what is wrong."""
    name = model.served_model_name or model.model or model.backend
    return InvalidRequest(f"model {name!r}: {key}: {problem}", param=key)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's own files say. ``quant_algo`` is in TensorRT-LLM's terms, None for full weights."""

    folder: Path
    vocab_size: int
    max_model_len: int
    quant_algo: str | None = None


def read_checkpoint(folder: Path, max_model_len: int | None) -> Checkpoint:
    """Read ``config.json``. ``max_model_len`` (tokens) replaces the context that it states.

    Raises ModelLoadError for a file that cannot be read, BackendUnavailable for one that leaves out what is needed.
    """
    if not folder.is_dir():
        raise BackendUnavailable(
            f"{folder.name}: TensorRT-LLM loads folders in Hugging Face's layout (config.json, *.safetensors)"
        )
    config = read_object(folder / "config.json")
    nested = config.get("text_config")
    text = config | nested if isinstance(nested, dict) else config
    limit = max_model_len or text.get("max_position_embeddings")
    vocab_size = text.get("vocab_size")
    for key, value in {"vocab_size": vocab_size, "max_position_embeddings": limit}.items():
        if not isinstance(value, int) or value < 1:
            remedy = ": set max_model_len" if key == "max_position_embeddings" else ""
            raise BackendUnavailable(f"{folder.name}/config.json states no usable {key}{remedy}")
    stated = _stated_quantization(read_object_if_there(folder / "hf_quant_config.json"), config)
    return Checkpoint(folder=folder, vocab_size=vocab_size, max_model_len=limit, quant_algo=stated)


# quant_method of a Hugging Face quantization_config -> QuantAlgo.
_HF_METHODS = {"fp8": "FP8", "awq": "W4A16_AWQ", "gptq": "W4A16_GPTQ", "mxfp4": "W4A16_MXFP4"}


def _stated_quantization(model_opt: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """ModelOpt's own file goes first, then config.json; a method without a QuantAlgo is given by its own name."""
    sections = model_opt.get("quantization"), config.get("quantization_config")
    for section in sections:
        if not isinstance(section, dict):
            continue
        if section.get("quant_algo"):
            return str(section["quant_algo"])
        if section.get("quant_method") == "fp8" and section.get("weight_block_size"):
            return "FP8_BLOCK_SCALES"
        if section.get("quant_method"):
            method = str(section["quant_method"])
            return _HF_METHODS.get(method, method)
    return None


def check_quantization(options: TensorRTOptions, checkpoint: Checkpoint, llmapi: ModuleType) -> None:
    """The PyTorch backend takes the method from the checkpoint: make sure that it is the one that was asked for."""
    if options.quantization == "auto":
        return
    wanted = QUANT_ALGOS[options.quantization]
    if not hasattr(llmapi.QuantAlgo, wanted):
        raise BackendUnavailable(f"options.quantization: the installed TensorRT-LLM knows no {wanted}")
    if checkpoint.quant_algo != wanted:
        raise BackendUnavailable(
            f"options.quantization asks for {options.quantization} (TensorRT-LLM's {wanted}), but the checkpoint "
            f"{checkpoint.folder.name} holds {checkpoint.quant_algo or 'full weights'}: name a checkpoint quantized "
            "that way (NVIDIA's ModelOpt makes them), or leave the option out"
        )


def llm_arguments(
    model: ModelSettings, options: TensorRTOptions, checkpoint: Checkpoint, llmapi: ModuleType
) -> dict[str, Any]:
    """Keyword arguments of ``tensorrt_llm.LLM``; only what was chosen, but for the traps among its defaults.

    Raises BackendUnavailable for a choice that the installed version does not know.
    """
    arguments: dict[str, Any] = {
        "model": str(checkpoint.folder),
        "dtype": model.dtype,
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "max_seq_len": checkpoint.max_model_len,
        "max_input_len": checkpoint.max_model_len,  # its default is 1,024 tokens
        "max_batch_size": model.max_num_seqs or DEFAULT_CONCURRENCY,
        "enable_chunked_prefill": options.enable_chunked_prefill,  # else a prompt over max_num_tokens is refused
        "kv_cache_config": _made(llmapi, "KvCacheConfig", _kv_cache(model, options)),
    }
    chosen = {
        "moe_expert_parallel_size": options.moe_expert_parallel_size,
        "max_num_tokens": model.max_num_batched_tokens,
        "guided_decoding_backend": options.guided_decoding_backend,
        "sampler_type": None if options.sampler_type == "auto" else options.sampler_type,
        "speculative_config": _speculative(options, llmapi),
    }
    return arguments | {name: value for name, value in chosen.items() if value is not None}


def _kv_cache(model: ModelSettings, options: TensorRTOptions) -> dict[str, Any]:
    block_size = None if model.block_size == DEFAULT_BLOCK_SIZE else model.block_size
    chosen = {
        "enable_block_reuse": model.enable_prefix_caching,
        "free_gpu_memory_fraction": model.memory_utilization,
        "max_gpu_total_bytes": model.kv_cache_memory,
        "max_tokens": None if model.num_blocks is None else model.num_blocks * model.block_size,
        "tokens_per_block": block_size,
        "host_cache_size": options.host_cache_size,
        "dtype": None if options.kv_cache_dtype == "auto" else KV_CACHE_DTYPES[options.kv_cache_dtype],
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _speculative(options: TensorRTOptions, llmapi: ModuleType) -> Any:
    if not options.speculative:
        return None
    fields = {key: value for key, value in options.speculative.items() if key != "method"}
    return _made(llmapi, DECODING_CONFIGS[options.speculative["method"]], fields)


def _made(llmapi: ModuleType, kind: str, fields: Mapping[str, Any]) -> Any:
    """One of the library's configuration models, from fields that its installed version has."""
    found = getattr(llmapi, kind, None)
    if found is None:
        raise BackendUnavailable(f"the installed TensorRT-LLM has no {kind}")
    missing = sorted(set(fields) - set(found.model_fields))
    if missing:
        known = ", ".join(sorted(found.model_fields))
        raise BackendUnavailable(f"the installed TensorRT-LLM's {kind} has no {', '.join(missing)}; it has {known}")
    try:
        return found(**fields)
    except ValueError as error:  # pydantic's ValidationError is one
        given = json.dumps(dict(fields), default=str)  # TOML has dates, too
        raise BackendUnavailable(f"{kind}({given}): {error}") from error

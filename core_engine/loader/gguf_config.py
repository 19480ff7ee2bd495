"""GGUF metadata to the keys of Hugging Face's config.json and generation_config.json.

Knows what converters write for each architecture, and the few facts that they leave to the reader: Gemma's attention
scale and window pattern, and the parameters behind Llama 3's table of rotary factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader.end_tokens import marked_end_tokens
from suimon.core_engine.loader.gguf import GGUFHeader
from suimon.core_engine.loader.gguf_names import (
    ARCHITECTURES,
    LONG_ROPE_FACTORS,
    ROPE_FACTORS,
    SHORT_ROPE_FACTORS,
    GGUFArchitecture,
)

FULL, SLIDING = "full_attention", "sliding_attention"

# Llama 3.1 to 3.3 share these; only the factor differs (8 or 32).
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Gemma 3 rotates its windowed layers with this base, whatever that of the others is.
_GEMMA3_LOCAL_BASE = 10_000.0
# The only models whose attention scale is not that of their head size: 27B, known by their number of layers.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_CONTROL = 3  # tokenizer.ggml.token_type
_FLOAT_DTYPES = {"F32": "float32", "F16": "float16"}


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """Raises UnsupportedModelError naming the architecture and those that are read."""
    name = header.metadata.get("general.architecture")
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{header.path}: one part of a split GGUF file; merge its parts into one file first"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{header.path}: GGUF architecture {name!r:.60} is not read; these are: {known}")
    return ARCHITECTURES[name]


def translate_config(header: GGUFHeader, rope_tables: Mapping[str, list[float]]) -> dict[str, Any]:
    """The keys of config.json. ``rope_tables`` are the file's tables of rotary factors, by tensor name.

    Raises ModelLoadError naming the metadata key that is missing or impossible, and UnsupportedModelError.
    """
    architecture, metadata = architecture_of(header), _Metadata(header)
    if metadata.number("expert_count", 0):
        raise UnsupportedModelError(f"{header.path}: mixture-of-experts GGUF files are not read yet")
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.architecture],
        "dtype": _dtype(header),
        **_shape(metadata, header),
        **_activation(architecture),
        **_biases(header),
        **_special_tokens(header),
    }
    config["rope_parameters"] = _rope_parameters(metadata, config["head_dim"], rope_tables)
    return _FAMILIES.get(metadata.architecture, _plain)(config, metadata, architecture)


def translate_generation_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys of generation_config.json: the ids that begin, end and pad; ``eos_token_id`` is always a list.

    Raises ModelLoadError for an id that is none.
    """
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ends = [*_token_ids(header, keys).values(), *_control_end_tokens(header.metadata)]
    return {**_special_tokens(header), "eos_token_id": list(dict.fromkeys(ends))}


def _special_tokens(header: GGUFHeader) -> dict[str, int]:
    ids = _token_ids(header, tuple(_SPECIAL_TOKENS.values()))
    return {name: ids[key] for name, key in _SPECIAL_TOKENS.items() if key in ids}


def _token_ids(header: GGUFHeader, keys: tuple[str, ...]) -> dict[str, int]:
    ids = {key: header.metadata[key] for key in keys if key in header.metadata}
    for key, value in ids.items():
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ModelLoadError(f"{header.path}: metadata {key} is {value!r:.40}, expected a token id")
    return ids


def _control_end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, np.ndarray):
        return []  # no vocabulary here: the tokenizer's loader says what is wrong with it
    controls = np.flatnonzero(types[: len(tokens)] == _CONTROL).tolist()
    return marked_end_tokens({tokens[index]: index for index in controls})


class _Metadata:
    """The metadata of one architecture, checked for type on the way out."""

    def __init__(self, header: GGUFHeader) -> None:
        self.path = header.path
        self._header = header
        self.architecture = str(header.metadata["general.architecture"])

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._header.metadata

    def raw(self, key: str) -> Any:
        return self._header.metadata.get(f"{self.architecture}.{key}")

    def text(self, key: str, default: str) -> str:
        value = self.raw(key) if self.has(key) else default
        if not isinstance(value, str):
            raise ModelLoadError(f"{self.path}: metadata {self.architecture}.{key} is {value!r:.40}, expected text")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key) if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = "missing" if value is None else repr(value)[:40]
            raise ModelLoadError(f"{self.path}: metadata {self.architecture}.{key} is {shown}, expected a number")
        # Metadata floats are float32: 1e-5 is stored as 9.99999974e-06, and is 1e-5 again after this.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value < 1 or value != int(value):
            raise ModelLoadError(f"{self.path}: metadata {self.architecture}.{key} is {value}, expected at least 1")
        return int(value)


def _shape(metadata: _Metadata, header: GGUFHeader) -> dict[str, Any]:
    heads, width = metadata.count("attention.head_count"), metadata.count("embedding_length")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{header.path}: tensor 'token_embd.weight' is missing")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": _layers(metadata, header),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, header, width // heads),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _layers(metadata: _Metadata, header: GGUFHeader) -> int:
    layers = metadata.count("block_count")
    if layers > len(header.tensors):
        raise ModelLoadError(f"{header.path}: block_count is {layers}, but the file has {len(header.tensors)} tensors")
    return layers


def _head_dim(metadata: _Metadata, header: GGUFHeader, default: int) -> int:
    key = metadata.count("attention.key_length", default)
    value = metadata.count("attention.value_length", key)
    if key != value:
        raise UnsupportedModelError(
            f"{header.path}: keys of {key} and values of {value} per head: only equal sizes are read"
        )
    return key


def _dtype(header: GGUFHeader) -> str:
    """What the weights were stored from, as far as the file shows it: quantized ones are served in bfloat16."""
    kinds = {info.ggml_type.name for info in header.tensors.values() if len(info.shape) > 1}
    return _FLOAT_DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _activation(architecture: GGUFArchitecture) -> dict[str, Any]:
    key = "hidden_activation" if architecture.model_type.startswith("gemma") else "hidden_act"
    return {key: architecture.activation}


def _biases(header: GGUFHeader) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _rope_parameters(metadata: _Metadata, head_dim: int, tables: Mapping[str, list[float]]) -> dict[str, Any]:
    parameters = {**_rope_scaling(metadata, tables), "rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    rotary_dim = metadata.count("rope.dimension_count", head_dim)
    return parameters if rotary_dim == head_dim else {**parameters, "partial_rotary_factor": rotary_dim / head_dim}


def _rope_scaling(metadata: _Metadata, tables: Mapping[str, list[float]]) -> dict[str, Any]:
    if ROPE_FACTORS in tables:
        return _rope_table(tables[ROPE_FACTORS], metadata)
    if LONG_ROPE_FACTORS in tables and SHORT_ROPE_FACTORS in tables:
        return {
            "rope_type": "longrope",
            "long_factor": tables[LONG_ROPE_FACTORS],
            "short_factor": tables[SHORT_ROPE_FACTORS],
            "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
        }
    kind = metadata.text("rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if kind == "none" and not metadata.has("rope.scale_linear"):
        return {"rope_type": "default"}
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and metadata.number("rope.scaling.attn_factor", 1.0) == 1.0:
        return _yarn(metadata, factor)
    raise UnsupportedModelError(f"{metadata.path}: rope scaling {kind!r} with these metadata is not read")


def _yarn(metadata: _Metadata, factor: float) -> dict[str, Any]:
    original = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
    betas = {key: f"rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow")}
    given = {name: metadata.number(key) for name, key in betas.items() if metadata.has(key)}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **given}


def _rope_table(factors: list[float], metadata: _Metadata) -> dict[str, Any]:
    """The Llama 3 scaling that gives these factors of wavelength; else the factors themselves.

    Llama 3.1 (Grattafiori et al. 2024) stretches waves longer than the old context by ``factor``, keeps those shorter
    than a quarter of it, and interpolates between; a converter stores only the outcome for each pair of dimensions.
    """
    factor, width = max(factors), len(factors)
    base = metadata.number("rope.freq_base", 10_000.0)
    turns = _LLAMA3_CONTEXT / (2 * math.pi * base ** (np.arange(width) / width))
    kept = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    if not np.allclose(factors, 1.0 / ((1.0 - kept) / factor + kept), rtol=1e-4):
        return {"rope_type": "gguf_factors", "factors": factors}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


_Family = Callable[[dict[str, Any], _Metadata, GGUFArchitecture], dict[str, Any]]


def _plain(config: dict[str, Any], metadata: _Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    return config


def _llama(config: dict[str, Any], metadata: _Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    if not metadata.number("attention.sliding_window", 0):
        return config
    window = metadata.count("attention.sliding_window")
    return {**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}


def _phi3(config: dict[str, Any], metadata: _Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    original = metadata.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = int(metadata.number("attention.sliding_window", 0)) or None
    return {**config, "sliding_window": window, "original_max_position_embeddings": original}


def _gemma2(config: dict[str, Any], metadata: _Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    return {
        **config,
        **_gemma_windows(config, metadata, architecture),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(config: dict[str, Any], metadata: _Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    local = metadata.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **config,
        **_gemma_windows(config, metadata, architecture),
        **{name: metadata.number(name) if metadata.has(name) else None for name in caps},
        "rope_parameters": {
            FULL: config["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _gemma_windows(config: dict[str, Any], metadata: _Metadata, architecture: GGUFArchitecture) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    by_width = (metadata.architecture, layers) in _SCALED_BY_WIDTH
    return {
        "query_pre_attn_scalar": config["hidden_size"] // heads if by_width else config["head_dim"],
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": _layer_types(metadata, layers, architecture.sliding_pattern or 1),
    }


def _layer_types(metadata: _Metadata, layers: int, default: int) -> list[str]:
    """Newer files say for each layer whether it is windowed, or every how many layers one is not."""
    pattern = metadata.raw("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise ModelLoadError(
                f"{metadata.path}: sliding_window_pattern has {len(pattern)} entries for {layers} layers"
            )
        return [SLIDING if windowed else FULL for windowed in pattern.tolist()]
    period = metadata.count("attention.sliding_window_pattern", default)
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]


_FAMILIES: Mapping[str, _Family] = {
    "llama": _llama,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}

"""ModelConfig: a decoder's shape, read from Hugging Face config keys. Knows key names old and new; no tensors.

transformers >= 5 writes ``rope_parameters`` (one dict, or one per layer type); before, the same facts were spread over
``rope_theta``, ``rope_scaling`` and, for Gemma 3, ``rope_local_base_freq``. Both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.layers.rotary import FREQUENCIES, RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"
# Rotary options that are written in a config as in RopeConfig.
_ROPE_OPTIONS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer. ``sliding_window`` counts visible positions, the query's own included."""

    rope: RopeConfig
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. ``attention_bias`` is of q, k and v; ``output_bias`` of the projection after attention.

    ``attention_scale`` multiplies scores; the soft caps bound scores and logits by tanh; None means no cap.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_scale: float
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_position"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"config: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            heads = f"num_attention_heads ({self.num_heads}) and num_key_value_heads ({self.num_kv_heads})"
            raise ModelLoadError(f"config: {heads} do not divide")

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))


class ConfigReader:
    """Typed access to config keys, with a family's ``defaults`` behind them; a key that is in neither is an error.

    ``null`` counts as absent, except where a family's default is itself None.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config = config
        self.defaults = defaults
        self.architecture = architecture_of(config)

    def get(self, key: str) -> Any:
        """The key's value, the family's default, or None."""
        value = self.config.get(key)
        return self.defaults.get(key) if value is None else value

    def explicit(self, key: str) -> Any:
        """The value as written, null included; the family's default only where the key is missing."""
        return self.config[key] if key in self.config else self.defaults.get(key)

    def integer(self, key: str) -> int:
        return int(self._number(key))

    def number(self, key: str) -> float:
        return float(self._number(key))

    def flag(self, key: str) -> bool:
        return bool(self.get(key))

    def _number(self, key: str) -> int | float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config of {self.architecture}: {key} must be a number, got {value!r}")
        return value

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        return self.integer("hidden_size") // self.integer("num_attention_heads")

    def common(self) -> dict[str, Any]:
        """The fields of ModelConfig that every family reads alike."""
        return {
            "architecture": self.architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": self.integer("hidden_size"),
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": self.integer("num_attention_heads"),
            "num_kv_heads": int(self.get("num_key_value_heads") or self.integer("num_attention_heads")),
            "head_dim": self.head_dim,
            "max_position": self.integer("max_position_embeddings"),
            "rms_norm_eps": self.number("rms_norm_eps"),
            "activation": str(self.get("hidden_activation") or self.get("hidden_act")),
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
            "attention_scale": self.head_dim**-0.5,
        }

    def rope(self, layer_type: str = FULL) -> RopeConfig:
        """The rotary embedding of layers of ``layer_type``, from new or old keys."""
        parameters = dict(self.get("rope_parameters") or {})
        if any(isinstance(parameters.get(kind), Mapping) for kind in (SLIDING, FULL)):
            parameters = dict(parameters.get(layer_type) or {})
        if layer_type == FULL or not self.get("rope_local_base_freq"):
            parameters = {**parameters, **(self.config.get("rope_scaling") or {})}
        local = self.get("rope_local_base_freq") if layer_type == SLIDING else None
        theta = parameters.get("rope_theta") or local or self.get("rope_theta") or 10000.0
        return self._rope_config(parameters, float(theta))

    def _rope_config(self, parameters: Mapping[str, Any], theta: float) -> RopeConfig:
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        if kind not in FREQUENCIES:
            known = ", ".join(FREQUENCIES)
            raise UnsupportedModelError(f"{self.architecture}: rope scaling {kind!r} is not supported; known: {known}")
        share = parameters.get("partial_rotary_factor") or self.get("partial_rotary_factor") or 1.0
        original = self.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        original = original or self.integer("max_position_embeddings")
        options = {key: parameters[key] for key in _ROPE_OPTIONS if parameters.get(key) is not None}
        if kind != "default" and "factor" not in options:
            options["factor"] = self.integer("max_position_embeddings") / original
        rotary_dim = int(self.head_dim * share)
        return RopeConfig(rotary_dim=rotary_dim, theta=theta, kind=kind, original_max_position=int(original), **options)

    def layers(self, layer_types: list[str], window: int | None) -> tuple[LayerConfig, ...]:
        """One LayerConfig per type: sliding layers see ``window`` positions, full ones everything."""
        ropes = {kind: self.rope(kind) for kind in dict.fromkeys(layer_types)}
        windows = {SLIDING: window, FULL: None}
        unknown = sorted(set(layer_types) - set(windows))
        if unknown:
            raise UnsupportedModelError(f"{self.architecture}: layer types {', '.join(unknown)} are not supported")
        return tuple(LayerConfig(rope=ropes[kind], sliding_window=windows[kind]) for kind in layer_types)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of ``architectures``. Raises ModelLoadError when the config names none."""
    names = config.get("architectures") or []
    if not names or not isinstance(names[0], str):
        raise ModelLoadError("config names no architecture: 'architectures' is missing or empty")
    return names[0]

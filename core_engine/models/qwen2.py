"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in the upper layers if switched on.

Yang et al. 2024 (Qwen2 Technical Report).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from suimon.core_engine.models.config import FULL, SLIDING, ConfigReader, ModelConfig
from suimon.core_engine.models.llama import LlamaModel

QWEN2_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen_layer_types(reader: ConfigReader) -> list[str]:
    """The config's ``layer_types``, or a window from layer ``max_window_layers`` on if ``use_sliding_window``."""
    if reader.get("layer_types") is not None:
        return list(reader.get("layer_types"))
    count = reader.integer("num_hidden_layers")
    first = reader.integer("max_window_layers") if reader.flag("use_sliding_window") else count
    return [FULL if index < first else SLIDING for index in range(count)]


def qwen_window(reader: ConfigReader) -> int | None:
    return reader.integer("sliding_window") if reader.flag("use_sliding_window") else None


class Qwen2Model(LlamaModel):
    """Qwen2ForCausalLM."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        reader = ConfigReader(config, QWEN2_DEFAULTS)
        layers = reader.layers(qwen_layer_types(reader), qwen_window(reader))
        return ModelConfig(**reader.common(), layers=layers, attention_bias=True)

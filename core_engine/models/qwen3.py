"""Qwen3 (dense): Llama with a norm on every query and key head.

Yang et al. 2025 (Qwen3 Technical Report); the norm is of Dehghani et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from suimon.core_engine.layers.norm import RMSNorm
from suimon.core_engine.models.config import ConfigReader, ModelConfig
from suimon.core_engine.models.llama import LlamaAttention, LlamaLayer, LlamaModel
from suimon.core_engine.models.qwen2 import QWEN2_DEFAULTS, qwen_layer_types, qwen_window

QWEN3_DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128}


class NormedAttention(LlamaAttention):
    """Attention whose queries and keys are normalised head by head before they are rotated."""

    norm_offset = 0.0

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, self.norm_offset)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, self.norm_offset)

    def normalise(self, qk: torch.Tensor) -> torch.Tensor:
        H = self.split[0]
        return torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)


class Qwen3Layer(LlamaLayer):
    attention_class = NormedAttention


class Qwen3Model(LlamaModel):
    """Qwen3ForCausalLM."""

    layer_class = Qwen3Layer

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        reader = ConfigReader(config, QWEN3_DEFAULTS)
        bias = reader.flag("attention_bias")
        layers = reader.layers(qwen_layer_types(reader), qwen_window(reader))
        return ModelConfig(**reader.common(), layers=layers, attention_bias=bias, output_bias=bias)

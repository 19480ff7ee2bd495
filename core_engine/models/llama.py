"""Llama 2 and 3.x, SmolLM2 and whatever else calls itself LlamaForCausalLM; Mistral, which adds a sliding window.

Touvron et al. 2023; Grattafiori et al. 2024; Jiang et al. 2023 (Mistral 7B).

Shapes: T tokens, H query heads, KVH key/value heads, D head size, I intermediate features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from suimon import kernels
from suimon.core_engine.batch import ForwardBatch
from suimon.core_engine.layers.activation import gated_activation
from suimon.core_engine.layers.attention import PagedAttention
from suimon.core_engine.layers.kv_cache import LayerCache
from suimon.core_engine.layers.linear import Linear, MergedLinear
from suimon.core_engine.layers.norm import RMSNorm
from suimon.core_engine.models.base import DecoderLayer, DecoderModel, Rotation
from suimon.core_engine.models.config import FULL, SLIDING, ConfigReader, ModelConfig

LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window": 4096}


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v come from one product."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        H, KVH, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.split = (H, KVH, D)
        parts = {"q_proj": H * D, "k_proj": KVH * D, "v_proj": KVH * D}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.attention_bias)
        self.o_proj = Linear(H * D, config.hidden_size, bias=config.output_bias)
        window = config.layers[index].sliding_window
        self.attention = PagedAttention(
            H, KVH, D, config.attention_scale, sliding_window=window, soft_cap=config.attention_soft_cap
        )

    def forward(self, x: torch.Tensor, rotation: Rotation, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """(T, hidden) -> (T, hidden)."""
        H, KVH, D = self.split
        qkv = self.qkv_proj(x).view(len(x), H + 2 * KVH, D)
        qk = kernels.rotary(self.normalise(qkv[:, : H + KVH]), *rotation)
        attended = self.attention(qk[:, :H], qk[:, H:], qkv[:, H + KVH :], cache, batch)
        output: torch.Tensor = self.o_proj(attended.view(len(x), H * D))
        return output

    def normalise(self, qk: torch.Tensor) -> torch.Tensor:
        """What a family does to queries and keys (T, H + KVH, D) before they are rotated; Llama nothing."""
        return qk


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``; gate and up come from one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = gated_activation(config.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, hidden)."""
        output: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return output


class LlamaLayer(DecoderLayer):
    """Attention and MLP, each on the norm of the residual stream."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.self_attn = self.attention_class(config, index)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(hidden, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, rotation, cache, batch), residual)
        return self.mlp(x), residual


class LlamaModel(DecoderModel):
    """LlamaForCausalLM."""

    layer_class: type[DecoderLayer] = LlamaLayer

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        reader = ConfigReader(config, LLAMA_DEFAULTS)
        bias = reader.flag("attention_bias")
        return ModelConfig(
            **reader.common(),
            layers=reader.layers([FULL] * reader.integer("num_hidden_layers"), None),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=reader.flag("mlp_bias"),
        )


class MistralModel(LlamaModel):
    """MistralForCausalLM: every layer sees a window, unless the config says null."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        reader = ConfigReader(config, MISTRAL_DEFAULTS)
        window = reader.explicit("sliding_window")
        kinds = [FULL if window is None else SLIDING] * reader.integer("num_hidden_layers")
        return ModelConfig(**reader.common(), layers=reader.layers(kinds, window))

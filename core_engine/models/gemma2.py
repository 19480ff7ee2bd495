"""Gemma 2: alternating windows, soft-capped scores and logits, and a norm before and after each half of a layer.

Gemma Team 2024 (Gemma 2: Improving Open Language Models at a Practical Size). Norm weights are stored less one, and
embeddings are multiplied by sqrt(hidden).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from suimon.core_engine.batch import ForwardBatch
from suimon.core_engine.errors import UnsupportedModelError
from suimon.core_engine.layers.kv_cache import LayerCache
from suimon.core_engine.layers.norm import RMSNorm
from suimon.core_engine.models.base import DecoderLayer, DecoderModel, Rotation
from suimon.core_engine.models.config import FULL, SLIDING, ConfigReader, ModelConfig
from suimon.core_engine.models.llama import GatedMLP, LlamaAttention

GEMMA2_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def read_gemma_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> ModelConfig:
    """Every ``sliding_window_pattern``-th layer sees everything, the others a window, unless ``layer_types`` says."""
    reader = ConfigReader(config, defaults)
    if reader.flag("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{reader.architecture}: use_bidirectional_attention is not a decoder's attention")
    pattern, count = reader.integer("sliding_window_pattern"), reader.integer("num_hidden_layers")
    kinds = reader.get("layer_types") or [SLIDING if (index + 1) % pattern else FULL for index in range(count)]
    common = reader.common() | {"attention_scale": reader.number("query_pre_attn_scalar") ** -0.5}
    bias = reader.flag("attention_bias")
    return ModelConfig(
        **common,
        layers=reader.layers(list(kinds), reader.integer("sliding_window")),
        attention_bias=bias,
        output_bias=bias,
        attention_soft_cap=reader.explicit("attn_logit_softcapping"),
        final_soft_cap=reader.explicit("final_logit_softcapping"),
    )


class Gemma2Layer(DecoderLayer):
    """Attention and MLP, each between two norms; the residual stream is added after the second."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.self_attn = self.attention_class(config, index)
        self.mlp = GatedMLP(config)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)

        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(hidden, residual)
        attended = self.post_attention_layernorm(self.self_attn(x, rotation, cache, batch))
        x, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2Model(DecoderModel):
    """Gemma2ForCausalLM."""

    norm_offset = 1.0
    layer_class: type[DecoderLayer] = Gemma2Layer

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        return read_gemma_config(config, GEMMA2_DEFAULTS)

    def finish_loading(self, dtype: torch.dtype, device: torch.device | str) -> None:
        super().finish_loading(dtype, device)
        # Trained with the factor rounded to the model's dtype, so it is rounded here too.
        self.embedding_scale = torch.tensor(self.config.hidden_size**0.5, dtype=dtype).item()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids).mul_(self.embedding_scale)

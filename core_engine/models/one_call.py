"""A native decoder's step as one call into the CPU kernels, for the models that fit their table.

Knows what layers are made of. Where the kernels are missing, or a layer's forward is not one that the table describes,
the model runs operation by operation as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from suimon.core_engine.batch import ForwardBatch
from suimon.core_engine.layers.kv_cache import KVCache
from suimon.core_engine.layers.linear import Linear
from suimon.core_engine.models.base import DecoderModel
from suimon.core_engine.models.gemma2 import Gemma2Layer
from suimon.core_engine.models.llama import GatedMLP, LlamaAttention, LlamaLayer
from suimon.core_engine.models.qwen3 import NormedAttention
from suimon.kernels import cpu
from suimon.kernels.cpu.decoder import ACTIVATIONS, DecoderShape, DecoderStep, LayerWeights
from suimon.kernels.cpu.library import DTYPES
from suimon.kernels.cpu.linear import PackedLinear

# The forwards that the table describes, and which of a layer's norms plays which part in each.
NORM_PARTS: dict[object, dict[str, str]] = {
    LlamaLayer.forward: {"mlp_norm": "post_attention_layernorm"},
    Gemma2Layer.forward: {
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
HEAD_NORM_PARTS: dict[object, dict[str, str]] = {
    LlamaAttention.normalise: {},
    NormedAttention.normalise: {"query_norm": "q_norm", "key_norm": "k_norm"},
}


class OneCallStep:
    """Embedding, layers, norm and head over packed weights. The model's own are given up while packing."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        config = model.config
        self._shape = DecoderShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.layers[0].rope.rotary_dim,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            activation=config.activation,
            dtype=model.dtype,
            soft_cap=config.attention_soft_cap,
        )
        self.head = PackedLinear(model.lm_head.weight, model.lm_head.bias)
        if config.tie_word_embeddings:
            _give_up(model.embed_tokens)
        _give_up(model.lm_head)
        layers = [_layer_weights(model, index) for index in range(len(model.layers))]
        self._decode = DecoderStep(self._shape, layers, model.norm.weight)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of a tied embedding: (T,) int64 -> (T, hidden)."""
        return self.head.rows(token_ids)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """As the model's own, the hidden states (T, hidden) in float32."""
        hidden = self._model.embed(batch.token_ids).float().contiguous()
        rotations = [rope.forward(batch.positions) for rope in self._model.ropes]
        self._decode(
            hidden,
            rotations,
            kv_cache.layers,
            batch.slots,
            batch.query_starts,
            batch.context_lengths,
            batch.block_tables,
        )
        return hidden


def one_call_step(model: DecoderModel) -> OneCallStep | None:
    """The model's step in one call, or None where it does not fit or the kernels cannot be had."""
    return OneCallStep(model) if _fits(model) and cpu.is_available() else None


def _fits(model: DecoderModel) -> bool:
    config = model.config
    return (
        model.norm.weight.device.type == "cpu"
        and model.dtype in DTYPES
        and type(model).forward is DecoderModel.forward
        and type(model).logits is DecoderModel.logits
        and config.activation in ACTIVATIONS
        and len({layer.rope.rotary_dim for layer in config.layers}) == 1
        and all(map(_layer_fits, model.layers))
    )


def _layer_fits(layer: nn.Module) -> bool:
    attention: Any = getattr(layer, "self_attn", None)
    return (
        type(layer).forward in NORM_PARTS
        and type(attention).forward is LlamaAttention.forward
        and type(attention).normalise in HEAD_NORM_PARTS
        and type(getattr(layer, "mlp", None)) is GatedMLP
    )


def _layer_weights(model: DecoderModel, index: int) -> LayerWeights:
    layer: Any = model.layers[index]
    attention = layer.self_attn
    norms = {part: getattr(layer, name).weight for part, name in NORM_PARTS[type(layer).forward].items()}
    head_parts = HEAD_NORM_PARTS[type(attention).normalise].items()
    head_norms = {part: getattr(attention, name).weight for part, name in head_parts}
    return LayerWeights(
        qkv=_pack(attention.qkv_proj),
        output=_pack(attention.o_proj),
        gate_up=_pack(layer.mlp.gate_up_proj),
        down=_pack(layer.mlp.down_proj),
        input_norm=layer.input_layernorm.weight,
        window=model.config.layers[index].sliding_window,
        rope=model.layer_ropes[index],
        **norms,
        **head_norms,
    )


def _pack(linear: Linear) -> PackedLinear:
    packed = PackedLinear(linear.weight, linear.bias)
    _give_up(linear)
    return packed


def _give_up(module: nn.Module) -> None:
    """Release a weight that is packed: kept twice, a model would take twice its memory."""
    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

"""A whole decoder's step in one call: the table of its layers' weights, made once, and the call.

A call for each operation would cost a third of a step of a small model. Knows weights and layouts; refuses to know
checkpoints, configs and where a step comes from.

Shapes: T tokens, S sequences, B blocks in the longest table, H query heads, KVH key/value heads, D head size, R rotated
features, I intermediate features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from suimon.kernels.cpu.library import (
    DTYPES,
    DecoderStruct,
    LayerStruct,
    LinearStruct,
    SequencesStruct,
    StepStruct,
    library,
    pointer,
    pool_of,
)
from suimon.kernels.cpu.linear import PackedLinear

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2}

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: each (T, R) float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Norm weights are float32, None where the family has none; ``rope`` is the rotation it uses."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What all layers have in common. ``activation`` is a key of ACTIVATIONS; ``soft_cap`` bounds scores by tanh."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    scale: float
    activation: str
    dtype: torch.dtype
    soft_cap: float | None = None


class DecoderStep:
    """Runs steps of one decoder. Keeps its weights alive."""

    def __init__(self, shape: DecoderShape, layers: Sequence[LayerWeights], final_norm: torch.Tensor) -> None:
        self._kept: list[torch.Tensor] = [final_norm]
        self._shape = shape
        self._layers = (LayerStruct * len(layers))(*(self._layer(layer) for layer in layers))
        self._decoder = DecoderStruct(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=shape.rotary_dim,
            num_layers=len(layers),
            dtype=DTYPES[shape.dtype],
            activation=ACTIVATIONS[shape.activation],
            eps=shape.eps,
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
            layers=self._layers,
            final_norm=final_norm.data_ptr(),
        )
        self._library = library()

    def __call__(
        self,
        hidden: torch.Tensor,
        rotations: Sequence[Rotation],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        query_starts: torch.Tensor,
        context_lengths: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> None:
        """Turn embeddings ``hidden`` (T, hidden) float32 into normed hidden states, in place, and fill the caches.

        ``caches`` are each layer's keys and values, (num_blocks, block_size, KVH, D) in the model's dtype; ``slots``
        (T,) int64; ``query_starts`` (S + 1,), ``context_lengths`` (S,) and ``block_tables`` (S, B) int32.
        """
        self._decoder.block_size = caches[0][0].shape[1]
        cos, sin = _pointers([each[0] for each in rotations]), _pointers([each[1] for each in rotations])
        keys, values = _pointers([each[0] for each in caches]), _pointers([each[1] for each in caches])
        step = StepStruct(
            num_tokens=len(hidden),
            sequences=SequencesStruct(
                len(context_lengths),
                block_tables.shape[1],
                query_starts.data_ptr(),
                context_lengths.data_ptr(),
                block_tables.data_ptr(),
            ),
            slots=slots.data_ptr(),
            cos=ctypes.addressof(cos),
            sin=ctypes.addressof(sin),
            key_caches=ctypes.addressof(keys),
            value_caches=ctypes.addressof(values),
            hidden=hidden.data_ptr(),
        )
        with pool_of(torch.get_num_threads()) as team:
            self._library.suimon_decode(team, ctypes.byref(self._decoder), ctypes.byref(step))

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        norms = {
            name: pointer(self._keep(getattr(layer, name)))
            for name in (
                "input_norm",
                "post_attention_norm",
                "mlp_norm",
                "post_mlp_norm",
                "query_norm",
                "key_norm",
            )
        }
        products = {name: self._linear(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")}
        return LayerStruct(**products, **norms, window=layer.window or 0, rope=layer.rope)

    def _linear(self, layer: PackedLinear) -> LinearStruct:
        self._kept += layer.tensors
        return layer.struct

    def _keep(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))

"""Attention over the paged cache: stores the step's keys and values, then lets its queries attend.

Knows head counts and windows. The cache and the batch are arguments; nothing is kept between steps.
"""

from __future__ import annotations

import torch
from torch import nn

from suimon import kernels
from suimon.core_engine.batch import ForwardBatch
from suimon.core_engine.layers.kv_cache import LayerCache


class PagedAttention(nn.Module):
    """Causal attention with grouped key/value heads.

    ``scale`` multiplies scores (default head_dim ** -0.5). ``sliding_window`` is how many positions a query sees, its
    own included; ``soft_cap`` bounds scores by tanh (Gemma 2).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_cache: LayerCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """q (T, H, D), k and v (T, KVH, D), positions already encoded -> (T, H, D)."""
        key_cache, value_cache = layer_cache
        kernels.write_kv_cache(k, v, key_cache, value_cache, batch.slots)
        return kernels.paged_attention(
            q,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            query_lengths=batch.query_lengths,
            context_lengths_list=batch.context_lengths_list,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            plan=batch.attention_plan,
        )

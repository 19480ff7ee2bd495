"""Attention over the paged cache as one call; specified by ``suimon.kernels.reference.paged_attention``."""

from __future__ import annotations

import ctypes

import torch

from suimon.kernels.cpu.library import DTYPES, AttentionStruct, SequencesStruct, library, pool_of


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """query (T, H, D) float32 over caches (num_blocks, block_size, KVH, D) of one of DTYPES -> (T, H, D) float32.

    ``block_tables`` (S, B), ``query_starts`` (S + 1,) and ``context_lengths`` (S,) are int32. All contiguous.
    """
    T, H, D = query.shape
    _, block_size, KVH, _ = key_cache.shape
    result = torch.empty(T, H, D)
    shape = AttentionStruct(H, KVH, D, block_size, sliding_window or 0, scale, soft_cap or 0.0)
    sequences = SequencesStruct(
        len(context_lengths),
        block_tables.shape[1],
        query_starts.data_ptr(),
        context_lengths.data_ptr(),
        block_tables.data_ptr(),
    )
    with pool_of(torch.get_num_threads()) as team:
        library().suimon_attend(
            team,
            ctypes.byref(shape),
            DTYPES[key_cache.dtype],
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            ctypes.byref(sequences),
            result.data_ptr(),
        )
    return result

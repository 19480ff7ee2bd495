"""The paged KV cache's memory: two tensors per layer. Knows shapes; refuses to know sequences and free blocks.

A layer's ``key`` and ``value`` are (num_blocks, block_size, KVH, D); which blocks belong to whom is the block
manager's business. Layers may differ in KVH and D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from suimon import kernels


class KVShape(NamedTuple):
    """What one layer keeps per token."""

    num_kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Numbers stored per token: a key and a value."""
        return 2 * self.num_kv_heads * self.head_dim


class LayerCache(NamedTuple):
    """One layer's keys and values, each (num_blocks, block_size, KVH, D)."""

    key: torch.Tensor
    value: torch.Tensor


class KVCache:
    """Every layer's cache: ``kv_cache[layer]`` is its LayerCache."""

    def __init__(self, layers: Sequence[LayerCache], block_size: int) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size

    @classmethod
    def allocate(
        cls,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Memory for ``num_blocks`` blocks in every layer.

        It is left as it is: no slot is read before it is written, and a system maps its pages only then.
        """

        def allocate(shape: KVShape) -> torch.Tensor:
            return torch.empty((num_blocks, block_size, *shape), dtype=dtype, device=device)

        return cls([LayerCache(allocate(shape), allocate(shape)) for shape in shapes], block_size)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target for each (source, target), in order, in every layer."""
        for layer in self.layers:
            kernels.copy_blocks(layer.key, layer.value, pairs)


def bytes_per_block(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Memory that one block takes over all layers."""
    return sum(shape.values_per_token for shape in shapes) * block_size * dtype.itemsize

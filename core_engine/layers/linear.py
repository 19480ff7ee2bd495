"""Linear layers with empty weights for a loader to fill. Knows shapes and parts; refuses to know files and dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from suimon import kernels


class Linear(nn.Module):
    """``x @ weight.T + bias``: weight (out, in), x (T, in) -> (T, out)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear layers of one input as one product; their outputs lie side by side in the order of ``parts``.

    ``parts`` maps each layer's checkpoint name ("q_proj") to its number of output features.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)


class Embedding(nn.Module):
    """Rows of ``weight`` (vocab, hidden) by token id: (T,) int64 -> (T, hidden)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(token_ids, self.weight)


def empty_parameter(*shape: int) -> nn.Parameter:
    """Uninitialised and without gradient: models are built on the meta device and filled by the loader."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)

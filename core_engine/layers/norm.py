"""Root-mean-square norm as a layer; its weights are kept in float32 whatever the model's dtype."""

from __future__ import annotations

import torch
from torch import nn

from suimon import kernels
from suimon.core_engine.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension.

    ``offset`` is what a loader adds to the stored weights: Gemma's are stored less one.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x + residual`` (of ``x`` without one), and that sum."""
        return kernels.rms_norm(x, self.weight, self.eps, residual=residual)

"""A weight as the library's products take it, and the product itself.

Shapes: T rows, x (T, in), weight (out, in), result (T, out).
"""

from __future__ import annotations

import ctypes

import torch

from suimon.kernels.cpu.library import DTYPES, LinearStruct, library, pointer, pool_of

PANEL = 16  # rows of a weight whose numbers of one column lie side by side


class PackedLinear:
    """``x @ weight.T + bias``. ``panels`` (ceil(out / 16), in, 16) holds the weight, zeros after its last row."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack a copy of ``weight`` (out, in), float32 or bfloat16; ``bias`` (out,) of any float dtype."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.panels = torch.empty(-(-self.out_features // PANEL), self.in_features, PANEL, dtype=self.dtype)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        source = weight.detach().contiguous()
        self._library = library()
        with pool_of(torch.get_num_threads()) as team:
            self._library.suimon_pack(
                team,
                DTYPES[self.dtype],
                source.data_ptr(),
                self.out_features,
                self.in_features,
                self.panels.data_ptr(),
            )
        self.struct = LinearStruct(pointer(self.panels), pointer(self.bias), self.in_features, self.out_features)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What must stay alive as long as ``struct`` is used."""
        return [self.panels] if self.bias is None else [self.panels, self.bias]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) of any float dtype -> (T, out) float32."""
        x = x.float().contiguous()
        result = torch.empty(len(x), self.out_features)
        with pool_of(torch.get_num_threads()) as team:
            self._library.suimon_linear(
                team, ctypes.byref(self.struct), DTYPES[self.dtype], x.data_ptr(), len(x), result.data_ptr()
            )
        return result

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by number, for a head that is also the embedding: (T,) int64 -> (T, in)."""
        return self.panels[indices // PANEL, :, indices % PANEL]

"""Which of PyTorch's ways to multiply by a weight is fastest on a CPU, by number of rows and dtype.

Measured on two AVX-512 cores without bfloat16 instructions (bench/native_step.py). Three facts decide:

* a half-precision matrix times a vector takes 4.7 ms where ``F.linear`` of one row takes 8.1 (49152 x 576), so a few
  rows are multiplied one by one;
* for a few rows ``weight @ x.T`` is up to three times as fast as ``x @ weight.T``, its transposed result included;
* without bfloat16 instructions a half-precision product costs, from a few rows on, more than widening the weight to
  float32 piece by piece and multiplying that; the result is rounded once, so nothing is lost.

Shapes: T rows, x (T, in), weight (out, in), result (T, out).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from suimon.kernels.cpu_features import has_bfloat16_instructions

# Rows for which the transposed product wins.
TRANSPOSED_ROWS = range(4, 65)
# Rows from which widening a half-precision weight pays.
WIDENING_ROWS = 5
# Numbers of a widened piece: for few rows it should still be in the second-level cache when it is multiplied, for many
# the product itself goes through it block by block.
SMALL_PIECE, LARGE_PIECE = 1 << 18, 1 << 21


def linear_on_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` in x's dtype, which is the weight's or float32, by the fastest way."""
    if weight.dtype == torch.float32:
        return _float32(x, weight, bias)
    if has_bfloat16_instructions():
        return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    if len(x) < WIDENING_ROWS:
        return _row_by_row(x.to(weight.dtype), weight, bias).to(x.dtype)
    return _widened(x.float(), weight, bias).to(x.dtype)


def _float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if len(x) not in TRANSPOSED_ROWS:
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


def _row_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = [torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row) for row in x.unbind()]
    return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)


def _widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (T, in) float32 and a half-precision weight -> (T, out) float32."""
    if len(x) in TRANSPOSED_ROWS:
        product = torch.empty(len(weight), len(x))
        for rows, piece in _pieces(weight, SMALL_PIECE):
            torch.mm(piece, x.t(), out=product[rows])
        result = product.t().contiguous()
    else:
        result = torch.empty(len(x), len(weight))
        for rows, piece in _pieces(weight, LARGE_PIECE):
            result[:, rows] = F.linear(x, piece)
    return result if bias is None else result.add_(bias)


def _pieces(weight: torch.Tensor, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Runs of rows and their float32 copy, of about ``size`` numbers; the next one overwrites it."""
    count = min(max(1, size // weight.shape[1]), len(weight))
    scratch = torch.empty(count, weight.shape[1])
    for start in range(0, len(weight), count):
        piece = weight[start : start + count]
        yield slice(start, start + len(piece)), scratch[: len(piece)].copy_(piece)

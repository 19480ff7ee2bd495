"""One token from each row of logits, in C++. What the sampler's steps 6 to 10 say, row by row.

Refuses to know requests: a row is what ``SampleStruct`` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from suimon.kernels.cpu.library import SampleStruct, library, pool_of


def sample(logits: torch.Tensor, rows: Sequence[SampleStruct]) -> tuple[list[int], list[bool]]:
    """Token ids, and whether each row is finite (else its token means nothing), of ``logits`` (N, V) float32.

    Rows of ``logits`` may lie apart, a row's entries side by side. Random numbers are those of ``uniform_numbers``.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    count, size = logits.shape
    tokens, is_finite = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    with pool_of(torch.get_num_threads()) as team:
        library().suimon_sample(
            team,
            logits.data_ptr(),
            count,
            size,
            logits.stride(0),
            (SampleStruct * count)(*rows),
            tokens.data_ptr(),
            is_finite.data_ptr(),
        )
    return tokens.tolist(), is_finite.tolist()

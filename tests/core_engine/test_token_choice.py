"""The compiled choice of tokens against the one by PyTorch's operations (both against float64: test_sampler.py)."""

from __future__ import annotations

import math

import pytest
import torch

from suimon.core_engine.logit_edits import SamplingRow
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.token_choice import choose_by_torch, choose_compiled
from suimon.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="no C++ compiler on this machine")

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 2.0, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 1e-9},
]


def make_row(kind: dict[str, float], *, seed: int = 0, position: int = 0) -> SamplingRow:
    params = SamplingParams(**kind)
    return SamplingRow(seq_id=0, params=params, prompt_token_ids=[], output_token_ids=[], seed=seed, position=position)


def make_logits(rows: int, vocab_size: int, *, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * spread


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 4097])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_both_ways_choose_the_same_tokens(vocab_size: int, spread: float) -> None:
    """The same steps with the same numbers; a draw between two shares may fall to either side of a rounding."""
    rows = [make_row(KINDS[i % len(KINDS)], seed=i - 50, position=i) for i in range(180)]
    logits = make_logits(len(rows), vocab_size, spread=spread)
    logits[::7] = logits[::7].round()  # many equals
    logits[3::11, vocab_size // 2 + 1 :] = -math.inf
    compiled, finite = choose_compiled(logits, rows)
    expected, expected_finite = choose_by_torch(logits, rows)
    assert finite == expected_finite == [True] * len(rows)
    assert sum(mine != other for mine, other in zip(compiled, expected, strict=True)) <= 1


def test_a_rows_token_is_its_own() -> None:
    rows = [make_row(KINDS[i % len(KINDS)], seed=i, position=9) for i in range(27)]
    logits = make_logits(len(rows), 3000, spread=1.0)[:, :1500]  # rows lie apart
    alone = [choose_compiled(logits[i : i + 1], rows[i : i + 1])[0][0] for i in range(len(rows))]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert choose_compiled(logits, rows)[0] == alone
            assert choose_compiled(logits.flip(0), rows[::-1])[0] == alone[::-1]
    finally:
        torch.set_num_threads(before)
    assert choose_compiled(logits.T.contiguous().T, rows)[0] == alone
    narrow = logits.bfloat16()
    assert choose_compiled(narrow, rows)[0] == choose_compiled(narrow.float(), rows)[0]


@pytest.mark.parametrize("where", [0, 63, 64, 99, 129])
def test_a_row_that_is_not_finite_says_so(where: int) -> None:
    rows = [make_row(kind) for kind in KINDS] * 3
    logits = make_logits(len(rows), 130)
    logits[0::3, where], logits[1::3, where] = math.nan, math.inf
    logits[2] = -math.inf
    _, finite = choose_compiled(logits, rows)
    assert finite == [i % 3 == 2 and i != 2 for i in range(len(rows))]

"""Every operation against a plain float64 computation written from its definition, one number at a time."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from suimon import kernels
from suimon.kernels import attention_plan, linear_on_cpu

BLOCK_SIZE = 4
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SCALE = 0.37


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def visible_positions(position: int, window: int | None) -> range:
    return range(0 if window is None else max(0, position - window + 1), position + 1)


class Sequences:
    """Random sequences over scattered blocks; every slot that holds none of their keys is NaN."""

    def __init__(self, shares: Sequence[tuple[int, int]], seed: int = 0) -> None:
        """``shares``: (query length, context length) of each sequence."""
        randomness = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.query_lengths, self.contexts = zip(*shares, strict=True)
        needed = [-(-context // BLOCK_SIZE) for context in self.contexts]
        blocks = randomness.sample(range(2 * sum(needed) + 3), sum(needed))
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        shape = (2 * sum(needed) + 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = torch.full(shape, math.nan), torch.full(shape, math.nan)
        for table, context in zip(self.tables, self.contexts, strict=True):
            for position in range(context):
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.keys[block, offset] = torch.randn(KV_HEADS, HEAD_DIM, generator=generator)
                self.values[block, offset] = torch.randn(KV_HEADS, HEAD_DIM, generator=generator)
        self.query = torch.randn(sum(self.query_lengths), HEADS, HEAD_DIM, generator=generator)

    def attention(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        starts = [0]
        for length in self.query_lengths:
            starts.append(starts[-1] + length)
        widest = max(len(table) for table in self.tables)
        return kernels.paged_attention(
            self.query,
            self.keys,
            self.values,
            torch.tensor([table + [0] * (widest - len(table)) for table in self.tables], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(self.contexts, dtype=torch.int32),
            query_lengths=self.query_lengths,
            context_lengths_list=self.contexts,
            scale=SCALE,
            sliding_window=window,
            soft_cap=cap,
        )

    def expected(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        rows = []
        for table, length, context in zip(self.tables, self.query_lengths, self.contexts, strict=True):
            for position in range(context - length, context):
                query = self.query[len(rows)].double()
                rows.append(torch.stack([self.head(table, query[h], h, position, window, cap) for h in range(HEADS)]))
        return torch.stack(rows).float()

    def head(
        self, table: list[int], query: torch.Tensor, head: int, position: int, window: int | None, cap: float | None
    ) -> torch.Tensor:
        seen = [
            (table[p // BLOCK_SIZE], p % BLOCK_SIZE, head // (HEADS // KV_HEADS))
            for p in visible_positions(position, window)
        ]
        scores = [SCALE * float(query @ self.keys[slot].double()) for slot in seen]
        scores = scores if cap is None else [cap * math.tanh(score / cap) for score in scores]
        weights = [math.exp(score - max(scores)) for score in scores]
        total = torch.zeros(HEAD_DIM, dtype=torch.float64)
        for weight, slot in zip(weights, seen, strict=True):
            total += weight / sum(weights) * self.values[slot].double()
        return total


BATCHES = {
    "one decode": [(1, 9)],
    "first token": [(1, 1)],
    "decodes of one length": [(1, 7), (1, 7), (1, 7)],
    "decodes of many lengths": [(1, 3), (1, 18), (1, 8), (1, 1)],
    "one prompt": [(11, 11)],
    "prompts": [(5, 5), (8, 8), (4, 4)],
    "chunk after a prefix": [(6, 15)],
    "drafts to verify": [(3, 13), (4, 20)],
    "mixed": [(1, 10), (7, 7), (1, 4), (5, 17), (1, 1)],
}


@pytest.mark.parametrize(
    ("window", "cap"), [(None, None), (1, None), (3, None), (4, None), (64, None), (None, 1.5), (6, 1.5)]
)
@pytest.mark.parametrize("shares", BATCHES.values(), ids=BATCHES.keys())
def test_paged_attention(shares: list[tuple[int, int]], window: int | None, cap: float | None) -> None:
    sequences = Sequences(shares)
    torch.testing.assert_close(sequences.attention(window, cap), sequences.expected(window, cap), atol=2e-6, rtol=1e-5)


def test_decodes_are_split_into_groups_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are not padded to the longest, and a group's scratch stays bounded; nothing changes in the result."""
    monkeypatch.setattr(attention_plan, "SHORT_ROW", 4)
    monkeypatch.setattr(attention_plan, "CPU_GROUP_SLOTS", 40)
    shares = [(1, 19), (1, 3), (1, 20), (1, 2), (1, 18), (1, 9), (3, 8)]
    sizes = {s: context for s, (length, context) in enumerate(shares) if length == 1}
    groups = attention_plan.group_by_length(sizes, limit=40)
    assert sorted(member for group in groups for member in group) == [0, 1, 2, 3, 4, 5]
    assert groups == [[0, 2], [4, 5], [1, 3]]
    sequences = Sequences(shares)
    torch.testing.assert_close(sequences.attention(5), sequences.expected(5), atol=2e-6, rtol=1e-5)


def test_a_plan_serves_several_windows() -> None:
    sequences = Sequences(BATCHES["mixed"])
    first, second = sequences.attention(3), sequences.attention(None)
    plan = kernels.plan_attention(torch.zeros(1, 1, dtype=torch.int32), [1], [1], BLOCK_SIZE)
    assert plan.visible(3) is plan.visible(3)
    torch.testing.assert_close(first, sequences.expected(3), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(second, sequences.expected(None), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_cache_writes_its_slots_only(dtype: torch.dtype) -> None:
    keys, values = torch.full((2, 3, 4, 2, 8), 7.0, dtype=dtype)
    new = torch.randn(3, 6, 2, 8).transpose(0, 1)[:, :2].transpose(0, 1)  # as a view of a fused product is: strided
    slots = torch.tensor([9, 0, 5, 2, 7, 11])
    kernels.write_kv_cache(new[0], new[1], keys, values, slots)
    for cache, written in ((keys, new[0]), (values, new[1])):
        for slot in range(12):
            row = cache[slot // 4, slot % 4]
            expected = written[slots.tolist().index(slot)] if slot in slots else torch.full((2, 8), 7.0)
            assert torch.equal(row, expected.to(dtype))


def test_copy_blocks_in_order() -> None:
    keys, values = torch.arange(2 * 4 * 2 * 1 * 3.0).view(2, 4, 2, 1, 3)
    before = keys.clone()
    kernels.copy_blocks(keys, values, [(0, 2), (2, 3)])
    assert torch.equal(keys, before[[0, 1, 0, 0]]) and torch.equal(values[3], values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 5, 16).to(dtype), torch.randn(3, 5, 16).to(dtype)
    weight = torch.randn(16)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    for other in (None, residual):
        normed, total = kernels.rms_norm(x, weight, 0.01, residual=other)
        assert torch.equal(total, x if other is None else x + other) and normed.dtype == dtype
        s = total.double()
        expected = s / torch.sqrt((s**2).mean(-1, keepdim=True) + 0.01) * weight.double()
        torch.testing.assert_close(normed.double(), expected, **tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 8])
def test_rotary_turns_each_pair_by_its_angle(interleaved: bool, rotated: int) -> None:
    x, angles = torch.randn(5, 3, 8), torch.randn(5, rotated // 2) * 3
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2) for i in range(rotated // 2)]
    cos, sin, expected = torch.zeros(5, rotated), torch.zeros(5, rotated), x.double().clone()
    for i, (a, b) in enumerate(pairs):
        cos[:, a] = cos[:, b] = angles[:, i].cos()
        sin[:, a], sin[:, b] = -angles[:, i].sin(), angles[:, i].sin()
        turn = torch.polar(torch.ones(5, dtype=torch.float64), angles[:, i].double())[:, None]
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        expected[..., a], expected[..., b] = turned.real, turned.imag
    actual = kernels.rotary(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)


def test_gated_activations() -> None:
    x = torch.randn(4, 12) * 3
    for function, gate in (
        (kernels.silu_and_mul, lambda g: g / (1 + math.exp(-g))),
        (lambda x: kernels.gelu_and_mul(x, "none"), lambda g: g * (1 + math.erf(g / math.sqrt(2))) / 2),
        (kernels.gelu_and_mul, lambda g: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))),
    ):
        expected = [[gate(row[i]) * row[i + 6] for i in range(6)] for row in x.double().tolist()]
        torch.testing.assert_close(function(x), torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 33, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
def test_linear(rows: int, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form that the number of rows and the processor choose, over weights that do not divide into pieces."""
    monkeypatch.setattr(linear_on_cpu, "SMALL_PIECE", 70)
    monkeypatch.setattr(linear_on_cpu, "LARGE_PIECE", 170)
    monkeypatch.setattr(linear_on_cpu, "has_bfloat16_instructions", lambda: native)
    x, weight, bias = torch.randn(rows, 24).to(dtype), torch.randn(41, 24).to(dtype), torch.randn(41).to(dtype)
    for offset in (None, bias):
        actual = kernels.linear(x, weight, offset)
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        assert actual.dtype == dtype and actual.is_contiguous()
        # A half-precision result is rounded once (native products may round partial sums too).
        atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.05 if native else 1e-3, 2**-8)
        torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=rtol)


def run_python(code: str, provider: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SUIMON_KERNELS": provider}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_provider_can_be_forced_and_a_wrong_name_is_refused() -> None:
    code = "from suimon import kernels; print(kernels.provider)"
    assert run_python(code, "reference").stdout == "reference\n"
    refused = run_python(code, "fastest")
    assert (
        refused.returncode and "SUIMON_KERNELS='fastest' is not a kernel provider; known: reference" in refused.stderr
    )


def test_every_operation_is_the_providers() -> None:
    from suimon.kernels import reference

    assert all(getattr(kernels, name) is getattr(reference, name) for name in kernels.OPERATIONS)
    assert set(kernels.OPERATIONS) == set(kernels.__all__) - {"provider"}

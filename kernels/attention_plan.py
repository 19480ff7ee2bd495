"""Which cache slots each query of a step may see: computed once a step, used by every layer.

Knows lengths and block tables. Refuses to know queries, keys, values and layers.

Sequences with one query are grouped, so that one product serves many of them; the others are attended one by one. The
rows of a group differ in length: short rows are padded with a slot that the same sequence does see, and masked. So no
slot outside a sequence's visible context is ever read, whatever lies there (0 x NaN would be NaN).

Shapes: S sequences, B blocks in the longest table, G sequences of a group, L slots of a group or chunk, t queries of a
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# Slots gathered for one group. On a CPU they should be still in its caches when they are multiplied: with all of 16
# sequences of 300 tokens gathered at once, a step of SmolLM2-135M took twice as long. Elsewhere this bounds memory.
CPU_GROUP_SLOTS = 1024
DEVICE_GROUP_SLOTS = 1 << 17
# A sequence joins a group only if at least half of its row is real, unless rows are shorter than this.
SHORT_ROW = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each. ``rows`` is None when they are all the rows of the step, in order."""

    rows: torch.Tensor | None  # (G,) int64
    slots: torch.Tensor  # (G * L,) int64
    mask: torch.Tensor | None  # (G, 1, 1, L) float32: 0 where visible, -inf in padding; None without padding
    size: int  # G


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's several queries. ``mask`` is None when query i sees exactly slots 0 .. i."""

    first_row: int
    num_rows: int
    slots: torch.Tensor  # (L,) int64
    mask: torch.Tensor | None  # (t, L) float32


@dataclass(frozen=True, slots=True)
class VisibleSlots:
    """The whole step, for one window size."""

    groups: list[DecodeGroup]
    chunks: list[PrefillChunk]


@dataclass(slots=True)
class AttentionPlan:
    """The step's lengths and, for each window size asked for so far, what its queries see."""

    block_tables: torch.Tensor  # (S, B)
    query_lengths: Sequence[int]
    context_lengths: Sequence[int]
    block_size: int
    _by_window: dict[int | None, VisibleSlots] = field(default_factory=dict)

    def visible(self, sliding_window: int | None) -> VisibleSlots:
        """What each query sees: its own position and those before it, the last ``sliding_window`` of them if given."""
        if sliding_window not in self._by_window:
            self._by_window[sliding_window] = self._build(sliding_window)
        return self._by_window[sliding_window]

    def _build(self, window: int | None) -> VisibleSlots:
        rows = [0]
        for length in self.query_lengths:
            rows.append(rows[-1] + length)
        single = [s for s, length in enumerate(self.query_lengths) if length == 1]
        several = [s for s, length in enumerate(self.query_lengths) if length > 1]
        sizes = {s: min(self.context_lengths[s], window or self.context_lengths[s]) for s in single}
        limit = CPU_GROUP_SLOTS if self.block_tables.device.type == "cpu" else DEVICE_GROUP_SLOTS
        groups = [self._group(members, rows, sizes) for members in group_by_length(sizes, limit)]
        return VisibleSlots(groups, [self._chunk(s, rows[s], window) for s in several])

    def _group(self, members: list[int], rows: list[int], sizes: dict[int, int]) -> DecodeGroup:
        device = self.block_tables.device
        widest = max(sizes[s] for s in members)
        whole_step = members == list(range(rows[-1]))
        index = torch.tensor([members, [rows[s] for s in members]], device=device)
        ends = torch.tensor([[self.context_lengths[s]] for s in members], device=device)
        counts = torch.tensor([[sizes[s]] for s in members], device=device)
        column = torch.arange(widest, device=device)
        positions = torch.minimum(ends - counts + column, ends - 1)
        slots = self._slots(self.block_tables if whole_step else self.block_tables[index[0]], positions)
        padded = any(sizes[s] != widest for s in members)
        mask = _additive(column < counts)[:, None, None, :] if padded else None
        return DecodeGroup(None if whole_step else index[1], slots.reshape(-1), mask, len(members))

    def _chunk(self, sequence: int, first_row: int, window: int | None) -> PrefillChunk:
        device = self.block_tables.device
        count, end = self.query_lengths[sequence], self.context_lengths[sequence]
        start = end - count
        oldest = max(0, start - window + 1) if window else 0
        keys = torch.arange(oldest, end, device=device)
        slots = self._slots(self.block_tables[sequence : sequence + 1], keys[None])[0]
        if start == 0 and (window is None or window >= end):
            return PrefillChunk(first_row, count, slots, None)
        queries = torch.arange(start, end, device=device)[:, None]
        seen = keys <= queries
        if window:
            seen &= keys > queries - window
        return PrefillChunk(first_row, count, slots, _additive(seen))

    def _slots(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cache slots (G, L) of ``positions`` (G, L) under ``tables`` (G, B)."""
        blocks = tables.gather(1, positions // self.block_size).long()
        return blocks * self.block_size + positions % self.block_size


def group_by_length(sizes: dict[int, int], limit: int) -> list[list[int]]:
    """Split the keys of ``sizes`` into groups of like size, each within ``limit`` slots once padded, or alone."""
    groups: list[list[int]] = []
    widest = 0
    for member in sorted(sizes, key=lambda s: -sizes[s]):
        alike = 2 * sizes[member] >= widest or widest <= SHORT_ROW
        if groups and alike and (len(groups[-1]) + 1) * widest <= limit:
            groups[-1].append(member)
        else:
            groups.append([member])
            widest = sizes[member]
    return [sorted(group) for group in groups]


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))

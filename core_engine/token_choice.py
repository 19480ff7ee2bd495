"""The sampler's steps 6 to 10: from edited logits to a token id for each row, compiled or by PyTorch's operations.

Both take the same steps with the same random numbers, and differ by rounding alone. Refuses to know how logits were
edited and what is reported of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from suimon.core_engine import sampling_ops
from suimon.core_engine.logit_edits import SamplingRow
from suimon.core_engine.uniform_numbers import uniform_numbers
from suimon.kernels import cpu
from suimon.kernels.cpu import sampling as cpu_sampling
from suimon.kernels.cpu.library import SampleStruct

# Entries that a top_p row lists first; a nucleus that does not fit is drawn from without listing it.
_NUCLEUS_CANDIDATES = 64
# Entries of fp32 scratch at a time: on a CPU what its caches hold, on a device what its memory has to spare.
_SCRATCH_ENTRIES = {"cpu": 1 << 20}
_DEVICE_SCRATCH_ENTRIES = 1 << 26


# Of logits (N, V) and a row for each: token ids, and whether each row is finite; else its token means nothing.
Chooser = Callable[[torch.Tensor, Sequence[SamplingRow]], tuple[list[int], list[bool]]]


def chooser(device: str) -> Chooser:
    """The fastest for logits on ``device``."""
    return choose_compiled if device == "cpu" and cpu.is_available() else choose_by_torch


def choose_compiled(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[bool]]:
    """By the CPU kernels, row by row."""
    return cpu_sampling.sample(logits.float(), [_struct(row) for row in rows])


def choose_by_torch(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[bool]]:
    """By PyTorch's operations, rows of a kind together."""
    group = Group.of(rows, logits)
    tokens, finite = torch.stack((_choose(group), group.best.isfinite().long())).tolist()
    return tokens, [bool(value) for value in finite]


def _struct(row: SamplingRow) -> SampleStruct:
    params = row.params
    temperature = 0.0 if params.is_greedy else params.temperature
    return SampleStruct(row.seed, row.position, params.top_p, params.top_k, temperature, params.min_p)


def select(tensor: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """The entries at ascending ``indices``; a view, without a copy, where they are neighbours."""
    first, last = indices[0], indices[-1]
    if last - first + 1 == len(indices):
        return tensor[first : last + 1]
    return tensor[torch.tensor(indices, device=tensor.device)]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are sampled together: ``logits`` (N, V padded), their ``maxima`` (N, B) and ``best`` (N,) in fp32."""

    vocab_size: int
    rows: Sequence[SamplingRow]
    logits: torch.Tensor
    maxima: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], logits: torch.Tensor) -> Group:
        """Of ``logits`` (N, V)."""
        padded = sampling_ops.pad(logits.float() if logits.dtype == torch.float64 else logits)
        maxima = sampling_ops.block_maxima(padded)
        return cls(logits.shape[-1], rows, padded, maxima, maxima.amax(-1).float())

    def select(self, indices: Sequence[int]) -> Group:
        """The rows at ascending ``indices``; views, without a copy, where they are neighbours."""
        if len(indices) == len(self.rows):
            return self
        rows = [self.rows[index] for index in indices]
        tensors = (select(tensor, indices) for tensor in (self.logits, self.maxima, self.best))
        return Group(self.vocab_size, rows, *tensors)

    def column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One number per row as a tensor beside the logits."""
        return torch.tensor(values, dtype=dtype, device=self.logits.device)

    def weights(self) -> torch.Tensor:
        """exp of the logits over temperature, (N, V) fp32, the best entry 1."""
        temperature = self.column([row.params.temperature for row in self.rows])
        return sampling_ops.weights(self.logits, self.best, temperature)

    def uniform(self, draw: int = 0) -> torch.Tensor:
        numbers = uniform_numbers([row.seed for row in self.rows], [row.position for row in self.rows], draw)
        return torch.from_numpy(numbers).to(self.logits.device)


def _is_greedy(row: SamplingRow) -> bool:
    return row.params.is_greedy or row.params.top_k == 1


def _choose(group: Group) -> torch.Tensor:
    """Token ids (N,), by PyTorch's operations."""
    tokens = sampling_ops.argmax(group.logits, group.maxima)
    everything: list[int] = []
    listed: list[int] = []
    for index, row in enumerate(group.rows):
        if not _is_greedy(row):
            (listed if row.params.top_p < 1.0 or _limit(row, group) else everything).append(index)
    for chunk in chunks(everything, group.logits.shape[-1], group.logits):
        tokens[chunk] = _sample_everything(group.select(chunk))
    longest = max((_list_size(group.rows[index], group) for index in listed), default=1)
    for chunk in chunks(listed, longest * sampling_ops.BLOCK, group.logits):
        tokens[chunk] = _sample_candidates(group.select(chunk))
    return tokens


def _limit(row: SamplingRow, group: Group) -> int:
    """top_k, 0 if it limits nothing."""
    return row.params.top_k if 0 < row.params.top_k < group.vocab_size else 0


def _list_size(row: SamplingRow, group: Group) -> int:
    return _limit(row, group) or min(_NUCLEUS_CANDIDATES, group.vocab_size)


def chunks(indices: Sequence[int], entries: int, beside: torch.Tensor) -> list[Sequence[int]]:
    """``indices`` in runs whose scratch, at ``entries`` a row, fits what ``beside``'s device has to spare."""
    size = max(1, _SCRATCH_ENTRIES.get(beside.device.type, _DEVICE_SCRATCH_ENTRIES) // entries)
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _drop_unlikely(weight: torch.Tensor, group: Group) -> torch.Tensor:
    """min_p, in place; the best entry weighs 1."""
    if any(row.params.min_p > 0.0 for row in group.rows):
        sampling_ops.drop_below(weight, group.column([row.params.min_p for row in group.rows], weight.dtype))
    return weight


def _sample_everything(group: Group) -> torch.Tensor:
    """Rows that neither top_k nor top_p limits: nothing is listed or ordered."""
    weight = _drop_unlikely(group.weights(), group)
    return sampling_ops.draw_everywhere(weight, sampling_ops.block_sums(weight), group.uniform())


def _sample_candidates(group: Group) -> torch.Tensor:
    """Rows whose top_k or, most often, whose nucleus is a short list of best entries."""
    limits = [_limit(row, group) for row in group.rows]
    sizes = [_list_size(row, group) for row in group.rows]
    values, ids = sampling_ops.largest(group.logits, group.maxima, max(sizes))
    temperature = group.column([row.params.temperature for row in group.rows])
    size = group.column(sizes).unsqueeze(-1)
    place = torch.arange(values.shape[-1], device=values.device)
    weight = sampling_ops.weights(values, group.best, temperature).double().mul_(place < size)
    mass = _nucleus_mass(group, limits, weight)
    better = weight.cumsum(-1) - weight
    nucleus = (better < mass.unsqueeze(-1)) & (place < size)
    nucleus[:, 0] = True
    tokens = sampling_ops.draw(_drop_unlikely(weight * nucleus, group), group.uniform())
    tokens = ids.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    open_ended = group.column([not limit for limit in limits], torch.bool)
    reaches_end = nucleus.gather(-1, size.long() - 1).squeeze(-1) & open_ended
    too_wide = reaches_end.nonzero().flatten().tolist() if not all(limits) else []
    for chunk in chunks(too_wide, group.logits.shape[-1], group.logits):
        tokens[chunk] = _sample_wide_nuclei(group.select(chunk), mass[chunk])
    return tokens


def _nucleus_mass(group: Group, limits: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    """The weight, (N,) fp64, that a row's nucleus has to reach; infinite where top_p is off."""
    total = weight.sum(-1)
    unlimited = [index for index, limit in enumerate(limits) if not limit]
    for chunk in chunks(unlimited, group.logits.shape[-1], group.logits):
        total[chunk] = sampling_ops.block_sums(group.select(chunk).weights()).sum(-1)
    top_p = [row.params.top_p if row.params.top_p < 1.0 else math.inf for row in group.rows]
    return total * group.column(top_p, torch.float64)


def _sample_wide_nuclei(group: Group, mass: torch.Tensor) -> torch.Tensor:
    draws = iter(range(1, 1 << 32))

    def next_uniform(rows: torch.Tensor) -> torch.Tensor:
        return group.uniform(next(draws))[rows]

    weight = _drop_unlikely(group.weights(), group)
    return sampling_ops.draw_from_nucleus(group.logits, weight, mass, next_uniform)

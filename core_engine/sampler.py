"""Logits to token ids, for every step-driven backend, in one order of operations (see Sampler).

Knows rows of logits and the tokens before them; refuses to know the model, the scheduler, text and time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from suimon.core_engine import logit_edits, sampling_ops
from suimon.core_engine.logit_edits import GrammarMask, SamplingRow, TokenCounts
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.uniform_numbers import uniform_numbers

__all__ = ["MIN_LOGPROB", "GrammarMask", "Sampler", "SamplerOutput", "SamplingRow", "TokenLogprobs"]

# The lowest log-probability reported: JSON has no infinity, and 0 in 10 000 digits is impossible enough.
MIN_LOGPROB = -9999.0
# Entries that a top_p row lists first; a nucleus that does not fit is drawn from without listing it.
_NUCLEUS_CANDIDATES = 64
# Entries of fp32 scratch at a time: on a CPU what its caches hold, on a device what its memory has to spare.
_SCRATCH_ENTRIES = {"cpu": 1 << 20}
_DEVICE_SCRATCH_ENTRIES = 1 << 26


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry per row. ``errors`` maps a row that could not be sampled to the reason; its token id means nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are sampled together: ``logits`` (N, V padded), their ``maxima`` (N, B) and ``best`` (N,) in fp32."""

    vocab_size: int
    rows: Sequence[SamplingRow]
    logits: torch.Tensor
    maxima: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, vocab_size: int, rows: Sequence[SamplingRow], logits: torch.Tensor) -> _Group:
        maxima = sampling_ops.block_maxima(logits)
        return cls(vocab_size, rows, logits, maxima, maxima.amax(-1).float())

    def select(self, indices: Sequence[int]) -> _Group:
        """The rows at ascending ``indices``; views, without a copy, where they are neighbours."""
        if len(indices) == len(self.rows):
            return self
        rows = [self.rows[index] for index in indices]
        first, last = indices[0], indices[-1]
        if last - first + 1 == len(indices):
            return _Group(
                self.vocab_size, rows, *(tensor[first : last + 1] for tensor in (self.logits, self.maxima, self.best))
            )
        where = torch.tensor(indices, device=self.logits.device)
        return _Group(self.vocab_size, rows, *(tensor[where] for tensor in (self.logits, self.maxima, self.best)))

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


class Sampler:
    """Samples one token per row of logits. The order of operations, of which each row takes what it asks for:

    1. log-probabilities are taken from the model's raw logits, so that nothing below changes them;
    2. logit_bias is added;
    3. repetition_penalty over prompt and output, then frequency_penalty and presence_penalty over the output alone;
       drafts before the row count as output;
    4. until min_tokens are generated, end tokens are banned: stop_token_ids and, unless ignore_eos, the EOS ids;
    5. the grammar's mask; a grammar that allows only an end overrules 4;
    6. temperature; below 1e-3, or with top_k 1, the best token is taken here, the lowest id among equals;
    7. top_k: the k best tokens;
    8. top_p: of those, renormalised, the smallest set of best tokens that reaches top_p (Holtzman et al. 2020);
    9. min_p: of those, the tokens at least min_p times as likely as the best (Nguyen et al. 2024);
    10. one draw, by inverting the cumulative distribution at a number that depends on (seed, position) alone.

    A row's token therefore depends on its own logits, parameters and tokens, and not on its batch. Rows that edit
    nothing are read in place; a batch that is all greedy costs one pass over its logits. Logits of any float dtype and
    device; arithmetic in fp32, sums in fp64.
    """

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """One token for each row of ``logits`` (R, V), which is left unchanged.

        A row whose logits are not finite, whose grammar fails, or to which no token is left, gets an entry in
        ``errors``; the others are sampled as if it were not there.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sampling rows")
        if not rows:
            return SamplerOutput([], [])
        vocab_size = logits.shape[-1]
        raw = _Group.of(vocab_size, rows, sampling_ops.pad(logits.float() if logits.dtype == torch.float64 else logits))
        errors: dict[int, str] = {}
        edited = [index for index, row in enumerate(rows) if row.is_edited]
        tokens, finite = torch.zeros(len(rows), dtype=torch.int64, device=logits.device), raw.best.isfinite()
        plain = [index for index, row in enumerate(rows) if not row.is_edited]
        if plain:
            tokens[plain] = _choose(raw.select(plain))
        if edited:
            group = self._edit(raw, edited, vocab_size, errors)
            tokens[edited] = _choose(group)
            finite[edited] &= group.best.isfinite()
        token_ids, all_finite = torch.stack((tokens, finite.long())).tolist()
        for index, row in enumerate(rows):
            if not all_finite[index]:
                token_ids[index] = 0
                errors.setdefault(index, _not_finite(row))
        return SamplerOutput(token_ids, _logprobs(raw, tokens, token_ids, errors), errors)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._counts.pop(seq_id, None)

    def _edit(self, raw: _Group, edited: Sequence[int], vocab_size: int, errors: dict[int, str]) -> _Group:
        """A copy, in fp32, of the rows at ``edited``, with steps 2 to 5 done."""
        rows = [raw.rows[index] for index in edited]
        words = [_await_mask(raw.rows[index], index, vocab_size, errors) for index in edited]
        logits = raw.logits[edited].float()
        logit_edits.add_bias(logits, rows, vocab_size)
        logit_edits.apply_penalties(logits, rows, [self._caught_up(row, vocab_size) for row in rows])
        logit_edits.ban_ends(logits, rows, words, vocab_size)
        logit_edits.apply_masks(logits, words)
        return _Group.of(vocab_size, rows, logits)

    def _caught_up(self, row: SamplingRow, vocab_size: int) -> TokenCounts | None:
        if not row.has_penalties:
            return None
        counts = self._counts.get(row.seq_id)
        if counts is None or counts.num_counted > len(row.output_token_ids):
            prompt = row.prompt_token_ids if row.params.repetition_penalty != 1.0 else ()
            counts = self._counts[row.seq_id] = TokenCounts(prompt, vocab_size)
        counts.catch_up(row.output_token_ids)
        return counts


def _await_mask(row: SamplingRow, index: int, vocab_size: int, errors: dict[int, str]) -> logit_edits.Words | None:
    if row.mask is None:
        return None
    try:
        return logit_edits.await_mask(row.mask, vocab_size)
    except Exception as error:  # a grammar is the request's own: whatever it raises fails that request alone
        errors[index] = f"the grammar of this request failed at position {row.position}: {error}"
        return None


def _not_finite(row: SamplingRow) -> str:
    if row.is_edited:
        return f"no token is left to sample at position {row.position}, or the model's logits there are not finite"
    return (
        f"the model's logits at position {row.position} are not finite (NaN or infinity): "
        "a weight is damaged or a computation overflowed; try --dtype float32"
    )


def _is_greedy(row: SamplingRow) -> bool:
    return row.params.is_greedy or row.params.top_k == 1


def _choose(group: _Group) -> torch.Tensor:
    """Steps 6 to 10: token ids (N,)."""
    tokens = sampling_ops.argmax(group.logits, group.maxima)
    everything: list[int] = []
    listed: list[int] = []
    for index, row in enumerate(group.rows):
        if not _is_greedy(row):
            (listed if row.params.top_p < 1.0 or _limit(row, group) else everything).append(index)
    for chunk in _chunks(everything, group.logits.shape[-1], group.logits):
        tokens[chunk] = _sample_everything(group.select(chunk))
    longest = max((_list_size(group.rows[index], group) for index in listed), default=1)
    for chunk in _chunks(listed, longest * sampling_ops.BLOCK, group.logits):
        tokens[chunk] = _sample_candidates(group.select(chunk))
    return tokens


def _limit(row: SamplingRow, group: _Group) -> int:
    """top_k, 0 if it limits nothing."""
    return row.params.top_k if 0 < row.params.top_k < group.vocab_size else 0


def _list_size(row: SamplingRow, group: _Group) -> int:
    return _limit(row, group) or min(_NUCLEUS_CANDIDATES, group.vocab_size)


def _chunks(indices: Sequence[int], entries: int, beside: torch.Tensor) -> list[Sequence[int]]:
    """``indices`` in runs whose scratch, at ``entries`` a row, fits what ``beside``'s device has to spare."""
    size = max(1, _SCRATCH_ENTRIES.get(beside.device.type, _DEVICE_SCRATCH_ENTRIES) // entries)
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _drop_unlikely(weight: torch.Tensor, group: _Group) -> torch.Tensor:
    """min_p, in place; the best entry weighs 1."""
    if any(row.params.min_p > 0.0 for row in group.rows):
        sampling_ops.drop_below(weight, group.column([row.params.min_p for row in group.rows], weight.dtype))
    return weight


def _sample_everything(group: _Group) -> torch.Tensor:
    """Rows that neither top_k nor top_p limits: nothing is listed or ordered."""
    weight = _drop_unlikely(group.weights(), group)
    return sampling_ops.draw_everywhere(weight, sampling_ops.block_sums(weight), group.uniform())


def _sample_candidates(group: _Group) -> torch.Tensor:
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
    for chunk in _chunks(too_wide, group.logits.shape[-1], group.logits):
        tokens[chunk] = _sample_wide_nuclei(group.select(chunk), mass[chunk])
    return tokens


def _nucleus_mass(group: _Group, limits: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    """The weight, (N,) fp64, that a row's nucleus has to reach; infinite where top_p is off."""
    total = weight.sum(-1)
    unlimited = [index for index, limit in enumerate(limits) if not limit]
    for chunk in _chunks(unlimited, group.logits.shape[-1], group.logits):
        total[chunk] = sampling_ops.block_sums(group.select(chunk).weights()).sum(-1)
    top_p = [row.params.top_p if row.params.top_p < 1.0 else math.inf for row in group.rows]
    return total * group.column(top_p, torch.float64)


def _sample_wide_nuclei(group: _Group, mass: torch.Tensor) -> torch.Tensor:
    draws = iter(range(1, 1 << 32))

    def next_uniform(rows: torch.Tensor) -> torch.Tensor:
        return group.uniform(next(draws))[rows]

    weight = _drop_unlikely(group.weights(), group)
    return sampling_ops.draw_from_nucleus(group.logits, weight, mass, next_uniform)


def _logprobs(
    raw: _Group, tokens: torch.Tensor, token_ids: Sequence[int], errors: dict[int, str]
) -> list[TokenLogprobs | None]:
    """Step 1, for the rows that ask, once their tokens are known."""
    found: list[TokenLogprobs | None] = [None] * len(raw.rows)
    wanted = [i for i, row in enumerate(raw.rows) if row.params.logprobs is not None and i not in errors]
    for chunk in _chunks(wanted, raw.logits.shape[-1], raw.logits):
        group = raw.select(chunk)
        entries = _chunk_logprobs(group, tokens[chunk])
        for index, (logprob, rank, ids, values) in zip(chunk, entries, strict=True):
            count = raw.rows[index].params.logprobs
            top = tuple(zip(ids[:count], values[:count], strict=True))
            found[index] = TokenLogprobs(token_ids[index], logprob, rank, top)
    return found


def _chunk_logprobs(group: _Group, tokens: torch.Tensor) -> list[tuple[float, int, list[int], list[float]]]:
    """(logprob, rank, top ids, their logprobs) of each row's token; log-softmax at the entries reported only."""
    ones = torch.ones_like(group.best)
    total = sampling_ops.block_sums(sampling_ops.weights(group.logits, group.best, ones)).sum(-1)
    normaliser = (group.best + total.log()).unsqueeze(-1)
    chosen = group.logits.gather(-1, tokens.unsqueeze(-1)).float()
    listed = max(row.params.logprobs or 1 for row in group.rows)
    values, ids = sampling_ops.largest(group.logits, group.maxima, min(listed, group.vocab_size))
    ranks = _ranks(group, chosen, values)
    logprobs = (torch.cat((chosen, values), -1) - normaliser).clamp_(MIN_LOGPROB, 0.0).tolist()
    return [
        (line[0], rank, row_ids, line[1:]) for line, rank, row_ids in zip(logprobs, ranks, ids.tolist(), strict=True)
    ]


def _ranks(group: _Group, chosen: torch.Tensor, values: torch.Tensor) -> list[int]:
    """1 + how many entries beat ``chosen`` (N, 1); whole rows are counted only where all listed ``values`` do."""
    ranks: list[int] = ((values > chosen).sum(-1) + 1).tolist()
    unlisted = [index for index, rank in enumerate(ranks) if rank > values.shape[-1]]
    if unlisted:
        counts = sampling_ops.count_better(group.select(unlisted).logits, chosen[unlisted, 0])
        for index, count in zip(unlisted, counts.tolist(), strict=True):
            ranks[index] = count + 1
    return ranks

"""Logits to token ids, for every step-driven backend, in one order of operations (see Sampler).

Knows rows of logits and the tokens before them; refuses to know the model, the scheduler, text and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from suimon.core_engine import logit_edits, sampling_ops, token_choice
from suimon.core_engine.logit_edits import GrammarMask, SamplingRow, TokenCounts
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.token_choice import Group, chunks

__all__ = ["MIN_LOGPROB", "GrammarMask", "Sampler", "SamplerOutput", "SamplingRow", "TokenLogprobs"]

# The lowest log-probability reported: JSON has no infinity, and 0 in 10 000 digits is impossible enough.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry per row. ``errors`` maps a row that could not be sampled to the reason; its token id means nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)


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

    def __init__(self, device: str = "cpu") -> None:
        """Of logits that lie on ``device``. On CPUs the compiled kernel is made ready, which may take a minute once."""
        self._choose = token_choice.chooser(device)
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
        errors: dict[int, str] = {}
        token_ids, all_finite = [0] * len(rows), [False] * len(rows)
        for indices, values, finite in self._parts(logits, rows, errors):
            tokens, is_finite = self._choose(values, [rows[index] for index in indices])
            for place, index in enumerate(indices):
                token_ids[index], all_finite[index] = tokens[place], is_finite[place] and finite[place]
        for index, row in enumerate(rows):
            if not all_finite[index]:
                token_ids[index] = 0
                errors.setdefault(index, _not_finite(row))
        return SamplerOutput(token_ids, _logprobs(logits, rows, token_ids, errors), errors)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended."""
        self._counts.pop(seq_id, None)

    def _parts(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], errors: dict[int, str]
    ) -> Iterator[tuple[list[int], torch.Tensor, Sequence[bool]]]:
        """The rows that edit nothing, read in place, and copies of the others, edited; each with what is known of the
        raw logits' being finite.
        """
        plain = [index for index, row in enumerate(rows) if not row.is_edited]
        if plain:
            yield plain, token_choice.select(logits, plain), [True] * len(plain)
        edited = [index for index, row in enumerate(rows) if row.is_edited]
        if edited:
            raw = logits[edited].float()
            finite = raw.amax(-1).isfinite().tolist()
            yield edited, self._edit(raw, rows, edited, errors), finite

    def _edit(
        self, logits: torch.Tensor, all_rows: Sequence[SamplingRow], edited: Sequence[int], errors: dict[int, str]
    ) -> torch.Tensor:
        """Steps 2 to 5, in place, on ``logits`` (E, V): those of the rows at ``edited``."""
        rows, vocab_size = [all_rows[index] for index in edited], logits.shape[-1]
        words = [_await_mask(row, index, vocab_size, errors) for index, row in zip(edited, rows, strict=True)]
        logit_edits.add_bias(logits, rows, vocab_size)
        logit_edits.apply_penalties(logits, rows, [self._caught_up(row, vocab_size) for row in rows])
        logit_edits.ban_ends(logits, rows, words, vocab_size)
        logit_edits.apply_masks(logits, words)
        return logits

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


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int], errors: dict[int, str]
) -> list[TokenLogprobs | None]:
    """Step 1, for the rows that ask, once their tokens are known."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None and index not in errors]
    if not wanted:
        return found
    raw = Group.of(rows, logits)
    for chunk in chunks(wanted, raw.logits.shape[-1], raw.logits):
        group = raw.select(chunk)
        entries = _chunk_logprobs(group, group.column([token_ids[index] for index in chunk], torch.int64))
        for index, (logprob, rank, ids, values) in zip(chunk, entries, strict=True):
            count = rows[index].params.logprobs
            top = tuple(zip(ids[:count], values[:count], strict=True))
            found[index] = TokenLogprobs(token_ids[index], logprob, rank, top)
    return found


def _chunk_logprobs(group: Group, tokens: torch.Tensor) -> list[tuple[float, int, list[int], list[float]]]:
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


def _ranks(group: Group, chosen: torch.Tensor, values: torch.Tensor) -> list[int]:
    """1 + how many entries beat ``chosen`` (N, 1); whole rows are counted only where all listed ``values`` do."""
    ranks: list[int] = ((values > chosen).sum(-1) + 1).tolist()
    unlisted = [index for index, rank in enumerate(ranks) if rank > values.shape[-1]]
    if unlisted:
        counts = sampling_ops.count_better(group.select(unlisted).logits, chosen[unlisted, 0])
        for index, count in zip(unlisted, counts.tolist(), strict=True):
            ranks[index] = count + 1
    return ranks

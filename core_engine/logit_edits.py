"""What a request's parameters change in its logits before temperature: bias, penalties, bans, grammar.

Knows rows of logits and the tokens before them; refuses to know how a token is then chosen. Each edit is one scatter
over all rows that want it, at the affected entries only. Ids that the vocabulary lacks are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from suimon.core_engine.sampling_params import SamplingParams


class GrammarMask(Protocol):
    """A future of the tokens that a grammar allows next; awaited just before sampling.

    ``result()`` is int32 (ceil(vocab / 32),) on the CPU: bit ``i % 32`` of word ``i // 32`` is set if token i is
    allowed; None allows every token. Whatever it raises fails its own row.
    """

    def result(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What one row of logits needs to be sampled.

    ``output_token_ids`` are the accepted tokens, which only grow; ``draft_token_ids`` are the drafts between them and
    this row. ``seed`` is the sequence's own; ``position`` is the index, in the whole sequence, of the token to sample.
    """

    seq_id: int
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    draft_token_ids: Sequence[int] = ()
    seed: int
    position: int
    eos_token_ids: frozenset[int] = frozenset()
    mask: GrammarMask | None = None

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def bans_end(self) -> bool:
        """Whether the sequence, drafts counted and prompt not, is still shorter than min_tokens."""
        return len(self.output_token_ids) + len(self.draft_token_ids) < self.params.min_tokens

    @property
    def is_edited(self) -> bool:
        return self.has_penalties or self.bans_end or self.mask is not None or bool(self.params.logit_bias)


class TokenCounts:
    """How often each token stands in one sequence's output; prompt tokens are listed with their own count of 0.

    Kept between steps, so that a step costs its new tokens and not the sequence's length.
    """

    def __init__(self, prompt_token_ids: Iterable[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_counted = 0
        unique = sorted({token_id for token_id in prompt_token_ids if 0 <= token_id < vocab_size})
        self._slots = {token_id: slot for slot, token_id in enumerate(unique)}
        self._ids = np.array(unique, dtype=np.int64)
        self._counts = np.zeros(len(unique), dtype=np.float32)

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that came since the last call."""
        for token_id in output_token_ids[self.num_counted :]:
            if 0 <= token_id < self._vocab_size:
                slot = self._slot(token_id)
                self._counts[slot] += 1.0
        self.num_counted = len(output_token_ids)

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = np.zeros(max(64, slot), dtype=np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room.astype(np.float32)))
        self._ids[slot] = token_id
        return slot

    def entries(self, draft_token_ids: Sequence[int] = ()) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """(E,) different token ids and (E,) their counts, ``draft_token_ids`` counted too but not kept."""
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        extra: dict[int, float] = {}
        for token_id in draft_token_ids:
            if 0 <= token_id < self._vocab_size:
                extra[token_id] = extra.get(token_id, 0.0) + 1.0
        if not extra:
            return ids, counts
        new = [token_id for token_id in extra if token_id not in self._slots]
        ids, counts = np.concatenate((ids, np.array(new, np.int64))), np.append(counts, np.zeros(len(new), np.float32))
        for slot, token_id in enumerate(new, start=size):
            counts[slot] = extra[token_id]
        for token_id in extra.keys() & self._slots.keys():
            counts[self._slots[token_id]] += extra[token_id]
        return ids, counts


def add_bias(logits: torch.Tensor, rows: Sequence[SamplingRow], vocab_size: int) -> None:
    """Add each row's logit_bias, in place."""
    entries = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.params.logit_bias.items()
        if 0 <= token_id < vocab_size
    ]
    if entries:
        index, ids, bias = zip(*entries, strict=True)
        where = torch.tensor((index, ids), device=logits.device)
        logits[where[0], where[1]] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)


def apply_penalties(logits: torch.Tensor, rows: Sequence[SamplingRow], counts: Sequence[TokenCounts | None]) -> None:
    """Penalise repetition, in place; ``counts`` are the rows' caught-up counts, None for rows without penalties.

    Repetition (Keskar et al. 2019, CTRL, section 4.1) divides the positive logits of seen tokens and multiplies the
    negative ones; then frequency_penalty * count and, once per token that was output, presence_penalty are subtracted.
    """
    entries = [
        (index, row.params, *count.entries(row.draft_token_ids))
        for index, (row, count) in enumerate(zip(rows, counts, strict=True))
        if count is not None
    ]
    if not entries:
        return
    sizes = [len(ids) for _, _, ids, _ in entries]
    factors = np.array(
        [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for _, p, _, _ in entries], np.float32
    )
    index = np.repeat([index for index, *_ in entries], sizes)
    where = torch.from_numpy(np.stack((index, np.concatenate([ids for _, _, ids, _ in entries])))).to(logits.device)
    table = np.vstack((np.repeat(factors, sizes, axis=0).T, np.concatenate([count for *_, count in entries])))
    repetition, presence, frequency, count = torch.from_numpy(table).to(logits.device)
    values = logits[where[0], where[1]]
    values = torch.where(values < 0, values * repetition, values / repetition)
    logits[where[0], where[1]] = values - frequency * count - presence * (count > 0)


def end_token_ids(row: SamplingRow) -> set[int]:
    """The ids that end this row's sequence. With ignore_eos, EOS is a token like any other."""
    return set(row.params.stop_token_ids) | (set() if row.params.ignore_eos else row.eos_token_ids)


def ban_ends(logits: torch.Tensor, rows: Sequence[SamplingRow], words: Sequence[Words | None], vocab_size: int) -> None:
    """Make end tokens impossible, in place, where min_tokens is not reached.

    A grammar (``words``) that allows nothing but an end is finished, and wins: its row is left alone.
    """
    entries = []
    for index, (row, mask) in enumerate(zip(rows, words, strict=True)):
        banned = [token_id for token_id in end_token_ids(row) if 0 <= token_id < vocab_size] if row.bans_end else []
        if banned and (mask is None or _allows_others(mask, banned)):
            entries += [(index, token_id) for token_id in banned]
    if entries:
        where = torch.tensor(entries, device=logits.device).T
        logits[where[0], where[1]] = -torch.inf


Words = npt.NDArray[np.uint32]


def await_mask(mask: GrammarMask, vocab_size: int) -> Words | None:
    """The mask's words, made as long as the vocabulary: ids that it does not know are not allowed."""
    bits = mask.result()
    if bits is None:
        return None
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    given = bits.numpy().view(np.uint32)[: len(words)]
    words[: len(given)] = given
    if vocab_size % 32:
        words[-1] &= np.uint32((1 << vocab_size % 32) - 1)
    return words


def _allows_others(words: Words, banned: Sequence[int]) -> bool:
    left = words.copy()
    for token_id in banned:
        left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return bool(left.any())


def apply_masks(logits: torch.Tensor, words: Sequence[Words | None]) -> None:
    """Make the tokens that a row's grammar does not allow impossible, in place. ``logits`` is (N, V padded)."""
    masked = [index for index, mask in enumerate(words) if mask is not None]
    if not masked:
        return
    stacked = np.stack([mask for mask in words if mask is not None]).view(np.int32)
    packed = torch.from_numpy(stacked).to(logits.device).unsqueeze(-1)
    allowed = ((packed >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1).bool().flatten(1)
    missing = logits.shape[-1] - allowed.shape[-1]
    allowed = torch.nn.functional.pad(allowed, (0, missing)) if missing > 0 else allowed[:, : logits.shape[-1]]
    rows = torch.tensor(masked, device=logits.device)
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)

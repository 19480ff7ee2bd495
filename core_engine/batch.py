"""One step's work: ScheduledBatch says *what* (plain integers), ForwardBatch the same as tensors.

A step computes, for each scheduled sequence, ``len(token_ids)`` new tokens starting at position ``start``. Whether they
are a prompt, a chunk of one, one decoded token or drafts to verify makes no difference here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from suimon import kernels
from suimon.kernels.attention_plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy all slots of block ``source`` to block ``target`` in every layer, before the forward."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class TrimSequence:
    """Forget the KV of positions >= ``length``. A paged executor need not act: those slots are overwritten."""

    seq_id: int
    length: int


@dataclass(frozen=True, slots=True)
class CopySequence:
    """Give ``target``, which holds nothing, the KV of the first ``length`` tokens of ``source``, which keeps it.

    For engines that keep KV per sequence; both are seq_ids, and ``source`` may have ended.
    """

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class MoveSequence:
    """``source``, which has ended, is ``target`` from now on, and only the KV of its first ``length`` tokens is kept.

    What CopySequence is for, where nobody needs the source any more: nothing has to be copied.
    """

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class FreeSequence:
    """The sequence is gone: drop everything kept for it."""

    seq_id: int


CacheOp = CopyBlock | CopySequence | MoveSequence | TrimSequence | FreeSequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    ``token_ids`` occupy positions ``start .. start + len(token_ids) - 1``; ``block_table`` covers them all.
    ``num_logits`` is how many of the last positions need logits: 0 for a chunk that does not end its prompt, 1 to
    sample a token, k + 1 to verify k drafts (the last k of ``token_ids``). ``adapter``
    names the weights to add to the model's, if any.
    """

    seq_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    num_logits: int = 1
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step computes. ``cache_ops`` are executed, in order, before the forward."""

    step_id: int
    sequences: list[ScheduledSequence]
    cache_ops: list[CacheOp] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_logits(self) -> int:
        return sum(sequence.num_logits for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ScheduledBatch as tensors on the model's device; built once a step, passed as an argument, never a global.

    Shapes: T tokens, S sequences, B the longest block table, R rows of logits. Integers are int32 unless noted.
    """

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    slots: torch.Tensor  # (T,) int64: block * block_size + offset, where each token's K and V are written
    query_starts: torch.Tensor  # (S + 1,) prefix sums of the sequences' token counts
    context_lengths: torch.Tensor  # (S,) tokens visible to the last query: start + len(token_ids)
    block_tables: torch.Tensor  # (S, B) padded with 0
    logits_indices: torch.Tensor  # (R,) int64: rows of the hidden states that need logits
    # The same lengths as plain integers, so that nothing has to be read back from the device.
    query_lengths: tuple[int, ...]
    context_lengths_list: tuple[int, ...]
    attention_plan: AttentionPlan  # what each query sees, computed once for all layers

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @classmethod
    def build(cls, batch: ScheduledBatch, block_size: int, device: torch.device | str = "cpu") -> ForwardBatch:
        """Turn lists into tensors: one pass over the sequences, one copy to the device per field."""
        token_ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        logits_indices: list[int] = []
        tables: list[list[int]] = []
        widest = max((len(sequence.block_table) for sequence in batch.sequences), default=0)
        for sequence in batch.sequences:
            token_ids += sequence.token_ids
            positions += range(sequence.start, sequence.start + len(sequence.token_ids))
            starts.append(len(token_ids))
            logits_indices += range(len(token_ids) - sequence.num_logits, len(token_ids))
            tables.append(sequence.block_table + [0] * (widest - len(sequence.block_table)))
        query_lengths = tuple(len(sequence.token_ids) for sequence in batch.sequences)
        contexts = tuple(sequence.start + len(sequence.token_ids) for sequence in batch.sequences)

        at, padded = np.array(positions, np.int64), np.array(tables, np.int32).reshape(len(tables), widest)
        owners = np.repeat(np.arange(len(tables)), query_lengths)
        slots = padded[owners, at // block_size].astype(np.int64) * block_size + at % block_size

        def tensor(values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, dtype)).to(device, non_blocking=True)

        block_tables = tensor(padded, np.int32)
        return cls(
            token_ids=tensor(token_ids, np.int64),
            positions=tensor(at, np.int64),
            slots=tensor(slots, np.int64),
            query_starts=tensor(starts, np.int32),
            context_lengths=tensor(contexts, np.int32),
            block_tables=block_tables,
            logits_indices=tensor(logits_indices, np.int64),
            query_lengths=query_lengths,
            context_lengths_list=contexts,
            attention_plan=kernels.plan_attention(block_tables, query_lengths, contexts, block_size),
        )

"""Running one batch: the protocol between the common engine loop and whatever computes the logits.

A backend that can compute logits subclasses ForwardExecutor and writes one method, ``forward``. Submission and result
are apart, so that GPU overlap, pipeline stages, remote ranks and on-device sampling are other implementations of the
same two calls and not other loops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from suimon.core_engine.batch import CacheOp, FreeSequence, MoveSequence, ScheduledBatch, ScheduledSequence
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.sampler import Sampler, SamplerOutput, SamplingRow

PAGED, PER_SEQUENCE = "paged", "per_sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCapabilities:
    """What the scheduler must respect.

    ``num_blocks`` blocks of ``block_size`` slots hold KV. ``partial_trim`` says whether a sequence's tail can be
    forgotten without recomputing all of it. ``adapters_per_batch`` bounds how many different adapters share a step.
    ``max_num_batched_tokens`` is the budget of a step unless the configuration sets one. ``generates`` and ``embeds``
    say what can be asked for: text, and the vectors of an EmbeddingExecutor.

    ``kv_kind`` says who keeps the accounts: PAGED, where a block table says where each token's KV lies (BlockManager),
    or PER_SEQUENCE, where the executor finds it by seq_id (SlotManager); ``block_size`` is then 1, ``num_blocks`` the
    tokens of all sequences together, ``max_residents`` the sequences, running or ended, that it can hold at a time
    (at least ``max_num_seqs``), ``max_kept_tokens`` the tokens it should hold of ended ones (None: any number), and
    without ``partial_trim`` no beginning of one is copied to another. ``min_shared_tokens`` are as many as a copy has
    to bring to be worth its while.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    partial_trim: bool = True
    adapters_per_batch: int = 1
    max_num_batched_tokens: int | None = None
    generates: bool = True
    embeds: bool = False
    kv_kind: str = PAGED
    max_residents: int = 0
    max_kept_tokens: int | None = None
    min_shared_tokens: int = 1


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What one step gave one sequence.

    ``token_ids`` are the accepted drafts and the token sampled after them: 0 (a chunk) to k + 1 of them. ``logprobs``
    runs parallel to ``token_ids`` when asked for. ``error`` fails this sequence alone. ``out_of_slots`` asks the
    scheduler to preempt it and try again.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    out_of_slots: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step, by seq_id; every scheduled sequence has an entry.

    ``lost`` names those, scheduled or not, running or ended, whose KV is gone: they have to be computed again, and
    nothing can be copied from them.
    """

    step_id: int
    sequences: Mapping[int, SequenceResult]
    lost: frozenset[int] = frozenset()


class Pending(Protocol):
    """A submitted step. ``result`` blocks until it is done; called exactly once, in submission order."""

    def result(self) -> StepResult: ...


class StepExecutor(Protocol):
    """What the engine loop calls. ``sampling`` holds one row per row of logits, in batch order.

    An exception from a step fails that step's sequences, an ExecutorDeadError ends the engine.
    """

    @property
    def capabilities(self) -> ExecutorCapabilities: ...

    def submit(self, batch: ScheduledBatch, sampling: Sequence[SamplingRow]) -> Pending: ...

    def close(self) -> None: ...


class EmbeddingExecutor(StepExecutor, Protocol):
    """A StepExecutor whose capabilities say that it ``embeds``."""

    def embed(self, token_ids: Sequence[int]) -> list[float]:
        """The vector of one input of 1 to ``max_model_len`` tokens; called between steps."""


class ExecutorDeadError(Exception):
    """Raised by an executor that cannot be used any more: the engine ends at once, and its process is replaced."""


class LostSequencesError(Exception):
    """Raised by ``forward``: the operations have cost these sequences, running or ended, all of their KV."""

    def __init__(self, seq_ids: Iterable[int]) -> None:
        super().__init__("some sequences have lost their KV")
        self.seq_ids = frozenset(seq_ids)


class OutOfSlotsError(Exception):
    """Raised by ``forward``: there is no KV memory for these sequences; compute the others."""

    def __init__(self, seq_ids: Iterable[int]) -> None:
        super().__init__("no room for some sequences")
        self.seq_ids = frozenset(seq_ids)


@dataclass(frozen=True, slots=True)
class Completed:
    """A step whose result is already known."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


class ForwardExecutor(ABC):
    """A StepExecutor from one method: ``forward(batch) -> logits`` (batch.num_logits, vocab), on ``device``."""

    def __init__(self, device: str = "cpu") -> None:
        self.sampler = Sampler(device)

    @property
    @abstractmethod
    def capabilities(self) -> ExecutorCapabilities: ...

    @abstractmethod
    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Execute ``batch.cache_ops``, then the tokens; logits (batch.num_logits, vocab), any float dtype.

        May raise LostSequencesError or OutOfSlotsError once the operations are executed; it is then called again, with
        neither those sequences nor operations.
        """

    def submit(self, batch: ScheduledBatch, sampling: Sequence[SamplingRow]) -> Pending:
        self._forget(batch.cache_ops)
        results: dict[int, SequenceResult] = {}
        lost: frozenset[int] = frozenset()
        while batch.sequences:
            try:
                logits = self.forward(batch)
            except LostSequencesError as error:
                if not batch.cache_ops:
                    raise  # nothing was executed that could lose anything: it would be called for ever
                lost, refused = error.seq_ids, _refused(batch, error.seq_ids, SequenceResult())
            except OutOfSlotsError as full:
                refused = _refused(batch, full.seq_ids, SequenceResult(out_of_slots=True))
                if not refused:
                    raise  # it names none of those it was given, and would be called for ever
            else:
                results |= self._sample(batch, logits, sampling)
                break
            batch, results = _without(batch, refused), results | refused
            sampling = [row for row in sampling if row.seq_id not in refused]
        return Completed(StepResult(batch.step_id, results, lost))

    def _forget(self, operations: Iterable[CacheOp]) -> None:
        """What the sampler keeps for those that are gone."""
        for op in operations:
            match op:
                case FreeSequence(seq_id) | MoveSequence(source=seq_id):
                    self.sampler.forget(seq_id)

    def _sample(
        self, batch: ScheduledBatch, logits: torch.Tensor, sampling: Sequence[SamplingRow]
    ) -> dict[int, SequenceResult]:
        if not sampling:
            return {sequence.seq_id: SequenceResult() for sequence in batch.sequences}
        sampled = self.sampler.sample(logits, sampling)
        results: dict[int, SequenceResult] = {}
        row = 0
        for sequence in batch.sequences:
            results[sequence.seq_id] = _sequence_result(sequence, sampled, row)
            row += sequence.num_logits
        return results

    def close(self) -> None:
        """Release what the executor holds. The default holds nothing."""


def _refused(batch: ScheduledBatch, seq_ids: Container[int], result: SequenceResult) -> dict[int, SequenceResult]:
    return {sequence.seq_id: result for sequence in batch.sequences if sequence.seq_id in seq_ids}


def _without(batch: ScheduledBatch, refused: Container[int]) -> ScheduledBatch:
    return ScheduledBatch(batch.step_id, [s for s in batch.sequences if s.seq_id not in refused])


def _sequence_result(sequence: ScheduledSequence, sampled: SamplerOutput, row: int) -> SequenceResult:
    """What the rows from ``row`` on, ``sequence.num_logits`` of them, give this sequence."""
    if not sequence.num_logits:
        return SequenceResult()
    drafts = sequence.token_ids[len(sequence.token_ids) - sequence.num_logits + 1 :]
    accepted = _accept(drafts, sampled.token_ids[row : row + sequence.num_logits])
    rows = range(row, row + len(accepted))
    failed = [sampled.errors[index] for index in rows if index in sampled.errors]
    if failed:
        return SequenceResult(error=failed[0])
    kept = [entry for entry in (sampled.logprobs[index] for index in rows) if entry is not None]
    return SequenceResult(accepted, kept if kept else None)


def _accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens up to and including the first that differs from its draft.

    Row i was sampled given drafts[:i], so tokens after a mismatch answer a question that was not asked. Exact for
    greedy and for a position-seeded sampler (Leviathan et al. 2023 with a one-hot draft distribution).
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return list(sampled[: accepted + 1])

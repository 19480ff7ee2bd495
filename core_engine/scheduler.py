"""Which sequences compute how many tokens in the next step, and what follows from what came back.

Knows tokens, budgets, order and blocks' counts; refuses to know tensors, text and where logits come from. There are no
phases: a sequence has tokens that are computed and tokens that are not, and every step hands out tokens, under a
budget, so that the first catch up with the second. Chunked prefill, prefix cache hits, preemption and resumption, and
drafts to verify are all that one case.

The rules that keep every sequence moving:
* Running sequences come before waiting ones; among the running, those with one token left (decodes) come first.
* A sequence that lacks blocks takes them only from running ones that come after it in policy order, the last first. So
  the first in policy order always gets what it needs, and it fits: what can never fit is refused on arrival.
* A sequence in a submitted batch is neither freed nor preempted before its result is in; an abort only marks it.
* A waiting sequence that does not fit now may be overtaken ``max_overtaken`` times; then nobody passes it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from suimon.core_engine.batch import (
    CacheOp,
    CopyBlock,
    CopySequence,
    FreeSequence,
    MoveSequence,
    ScheduledBatch,
    ScheduledSequence,
    TrimSequence,
)
from suimon.core_engine.ending import fault_of, make_output, why_ended
from suimon.core_engine.errors import InvalidRequestError
from suimon.core_engine.executor import SequenceResult, StepResult
from suimon.core_engine.kv_manager import KVManager
from suimon.core_engine.outputs import EngineOutput
from suimon.core_engine.request_queue import RequestQueue
from suimon.core_engine.sequence import Sequence, Status

_NO_RESULT = SequenceResult(error="the executor returned no result for this sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits. Budgets and lengths count tokens.

    ``max_overtaken`` is how often a waiting sequence that does not fit may see later ones start; ``lookahead`` how many
    such sequences one step looks past.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    partial_trim: bool = True
    adapters_per_batch: int = 1
    max_overtaken: int = 8
    lookahead: int = 4


@dataclass(slots=True)
class _Plan:
    """One step being put together."""

    budget: int
    max_adapters: int
    adapters: set[str | None]
    sequences: list[ScheduledSequence] = field(default_factory=list)

    def admits(self, adapter: str | None) -> bool:
        return adapter in self.adapters or len(self.adapters) < self.max_adapters

    def add(self, scheduled: ScheduledSequence, adapter: str | None) -> None:
        self.sequences.append(scheduled)
        self.adapters.add(adapter)
        self.budget -= len(scheduled.token_ids)


class Scheduler:
    """Owns every live sequence: it alone changes one, and asks the block manager for memory.

    ``clock`` gives seconds; it only stamps, and decides nothing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: KVManager,
        eos_token_ids: Iterable[int] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.blocks = block_manager
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: RequestQueue[Sequence] = RequestQueue(config.policy)
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}
        self.num_queued_tokens = 0
        self.num_preemptions = 0
        self.num_aborted = 0
        self.num_finished: Counter[str] = Counter()
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._clock = clock
        self._requests: dict[str, list[Sequence]] = {}
        self._cache_ops: list[CacheOp] = []
        self._last_step_id = 0
        self._seats = config.max_num_seqs  # fewer for a while after an executor ran out of slots
        self._turn = 0
        self._served_at: dict[str | None, int] = {}  # adapter -> its last turn

    @property
    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no memory, siblings that wait for their leader included."""
        return len(self.sequences) - len(self.running)

    # --- arrival and departure ---

    def add(self, leader: Sequence, siblings: Iterable[Sequence] = ()) -> None:
        """Take in a request: its first choice, and the others, which wait until the first has computed the prompt.

        Raises InvalidRequestError if the request id is in use.
        """
        if leader.request_id in self._requests:
            raise InvalidRequestError(f"request id {leader.request_id!r} is in use", param="request_id")
        leader.siblings = list(siblings)
        for sibling in leader.siblings:
            sibling.leader = leader
            sibling.status = Status.HELD
        group = [leader, *leader.siblings]
        self._requests[leader.request_id] = group
        self.sequences.update((sequence.seq_id, sequence) for sequence in group)
        self._wait(leader)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request without outputs, at once or when its batch in flight is back. False if it is not here.

        Ending only choice ``index`` means that its reader has found a stop string: that counts as a stop.
        """
        group = self._requests.get(request_id, [])
        ended = [sequence for sequence in group if not sequence.is_ended and index in (None, sequence.index)]
        for sequence in ended:
            self._end(sequence, "abort" if index is None else "stop")
        for sequence in ended:
            self._settle(sequence)
        self.num_aborted += bool(ended) and index is None
        return bool(ended)

    def _wait(self, sequence: Sequence, *, again: bool = False) -> None:
        sequence.status = Status.WAITING
        self.num_queued_tokens += sequence.num_tokens
        if again:
            self.waiting.requeue(sequence)
        else:
            self.waiting.push(sequence)

    # --- planning a step ---

    def schedule(self) -> ScheduledBatch | None:
        """The next batch; None if there is nothing to compute before a result in flight is back, or at all."""
        plan = _Plan(self.config.max_num_batched_tokens, self.config.adapters_per_batch, self._adapters_to_serve())
        self._make_room_for_urgent()
        self._schedule_running(plan)
        self._schedule_waiting(plan)
        if not plan.sequences:
            return None
        self._last_step_id += 1
        # What is to be forgotten goes first: its place may be what the manager has given to others since.
        operations, self._cache_ops = [*self._cache_ops, *self.blocks.take_cache_ops()], []
        return ScheduledBatch(self._last_step_id, plan.sequences, operations)

    def _adapters_to_serve(self) -> set[str | None]:
        """If the running sequences use more adapters than fit one batch: those that were not served for longest."""
        served_at = {sequence.adapter: self._served_at.get(sequence.adapter, 0) for sequence in self.running}
        adapters = sorted(served_at, key=served_at.__getitem__)[: self.config.adapters_per_batch]
        # They had their turn even if it brings no batch, because the blocks they lack are held for other adapters.
        self._turn += 1
        self._served_at = served_at | dict.fromkeys(adapters, self._turn)
        return set(adapters)

    def _make_room_for_urgent(self) -> None:
        """Preempt sequences of lower priority if that lets the first waiting one start, and not otherwise."""
        first = self.waiting.peek()
        if first is None:
            return
        urgency = self.waiting.policy.urgency
        victims = [s for s in self.running if s.num_in_flight == 0 and urgency(s) > urgency(first)]
        if not victims:
            return
        victims.sort(key=self._order, reverse=True)
        shortfall = self.blocks.shortfall(first, first.num_tokens, self._shareable(first))
        for count in range(len(victims) + 1):
            num_running = len(self.running) - count
            spare = num_running * self.blocks.headroom
            missing = shortfall + spare - self.blocks.num_reclaimable(victims[:count])
            if num_running < self._seats and missing <= 0:
                for victim in victims[:count]:
                    self._preempt(victim)
                return

    def _order(self, sequence: Sequence) -> tuple[tuple[float, ...], int]:
        return self.waiting.policy.key(sequence), sequence.seq_id

    def _schedule_running(self, plan: _Plan) -> None:
        for sequence in sorted(self.running, key=lambda s: (s.num_to_schedule > 1, self._order(s))):
            if plan.budget == 0:
                return
            # Those before it in this loop may have preempted it.
            is_ready = sequence.status is Status.RUNNING and sequence.wants_tokens
            if is_ready and plan.admits(sequence.adapter) and self._secure_blocks(sequence, plan.budget):
                self._take(sequence, plan)

    def _secure_blocks(self, sequence: Sequence, budget: int) -> bool:
        end = sequence.num_scheduled_tokens + min(sequence.num_to_schedule, budget)
        while not self.blocks.allocate(sequence, end):
            victim = self._victim(sequence)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The last in policy order, if it comes after ``sequence``. What this step has scheduled is in flight too."""
        after = [s for s in self.running if s.num_in_flight == 0 and self._order(s) > self._order(sequence)]
        return max(after, key=self._order, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take its blocks and let it compute its tokens again later. Nobody overtakes it a second time."""
        self.running.remove(sequence)
        self.blocks.free(sequence)
        self._cache_ops.append(TrimSequence(sequence.seq_id, 0))
        sequence.num_computed_tokens = 0
        sequence.out_of_slots = sequence.has_lost_kv = False
        sequence.num_overtaken = self.config.max_overtaken
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence, again=True)

    def _schedule_waiting(self, plan: _Plan) -> None:
        passed: list[Sequence] = []
        while plan.budget > 0 and len(self.running) < self._seats and len(passed) < self.config.lookahead:
            sequence = self.waiting.peek()
            if sequence is None or not self._may_overtake(sequence, passed):
                break
            self.waiting.pop()
            if plan.admits(sequence.adapter) and self._start(sequence):
                self._take(sequence, plan)
                for other in passed:
                    other.num_overtaken += 1
            else:
                passed.append(sequence)
        for sequence in reversed(passed):
            self.waiting.requeue(sequence)

    def _may_overtake(self, sequence: Sequence, passed: list[Sequence]) -> bool:
        urgency = self.waiting.policy.urgency
        limit = self.config.max_overtaken
        return all(s.num_overtaken < limit and urgency(s) == urgency(sequence) for s in passed)

    def _start(self, sequence: Sequence) -> bool:
        """Give it blocks for all the tokens it has, so that its chunks never stall half-way, or return False."""
        if not self._acquire_blocks(sequence):
            return False
        self.num_queued_tokens -= sequence.num_tokens
        sequence.status = Status.RUNNING
        if sequence.timing.first_scheduled is None:
            sequence.timing.first_scheduled = self._clock()
        self.running.append(sequence)
        return True

    def _acquire_blocks(self, sequence: Sequence) -> bool:
        # Something is left for each that runs: else the next decode would preempt what was just started.
        spare = len(self.running) * self.blocks.headroom
        leader = self._forkable_leader(sequence)
        if leader is not None:
            return self._fork(leader, sequence, spare)
        prefix = self.blocks.find_prefix(sequence)
        if not self.blocks.allocate(sequence, sequence.num_tokens, shared=prefix, keep_available=spare):
            return False
        sequence.num_computed_tokens = len(prefix) * self.blocks.block_size
        self._count_prefix(sequence)
        return True

    def _count_prefix(self, sequence: Sequence) -> None:
        if sequence.timing.first_scheduled is None:
            # What a sibling finds is its leader's work for this very request.
            leader = sequence.leader
            sequence.num_cached_tokens = leader.num_cached_tokens if leader else sequence.num_computed_tokens
        if self.blocks.enable_prefix_caching:
            self.prefix_queries += sequence.num_tokens
            self.prefix_hits += sequence.num_computed_tokens

    def _forkable_leader(self, sequence: Sequence) -> Sequence | None:
        leader = sequence.leader
        if leader is None or sequence.output_token_ids or leader.status is not Status.RUNNING:
            return None
        if not self.blocks.can_fork:
            return None
        return leader if leader.is_prompt_computed else None

    def _fork(self, leader: Sequence, sequence: Sequence, spare: int) -> bool:
        # The last prompt token is computed again: its logits are what the sibling's first token is sampled from.
        num_shared = sequence.num_prompt_tokens - 1
        copies = self.blocks.fork(leader, sequence, num_shared, sequence.num_tokens, keep_available=spare)
        if copies is None:
            return False
        self._cache_ops.extend(copies)
        sequence.num_computed_tokens = num_shared
        sequence.num_cached_tokens = leader.num_cached_tokens
        return True

    def _shareable(self, sequence: Sequence) -> list[int]:
        leader = self._forkable_leader(sequence)
        if leader is None:
            return self.blocks.find_prefix(sequence)
        return self.blocks.shareable(leader, sequence.num_prompt_tokens - 1)

    def _take(self, sequence: Sequence, plan: _Plan) -> None:
        """Put the sequence's next tokens into the plan; its blocks are there."""
        start = sequence.num_scheduled_tokens
        count = min(sequence.num_to_schedule, plan.budget)
        is_last = count == sequence.num_to_schedule
        drafts = self._affordable_drafts(sequence, plan.budget - count) if is_last else []
        token_ids = sequence.tokens(start, start + count) + drafts
        table = sequence.block_table[: self.blocks.blocks_for(start + len(token_ids))]
        num_logits = 1 + len(drafts) if is_last else 0
        scheduled = ScheduledSequence(sequence.seq_id, token_ids, start, table, num_logits, sequence.adapter)
        plan.add(scheduled, sequence.adapter)
        sequence.num_in_flight += len(token_ids)
        if is_last:
            sequence.draft_token_ids = []

    def _affordable_drafts(self, sequence: Sequence, budget: int) -> list[int]:
        """The drafts that fit budget, blocks and what may still be generated. Nobody is preempted for a guess."""
        useful = sequence.max_tokens - sequence.num_output_tokens - 1
        drafts = sequence.draft_token_ids[: max(min(budget, useful), 0)]
        if not drafts or not self.config.partial_trim:
            return []
        return drafts if self.blocks.allocate(sequence, sequence.num_tokens + len(drafts)) else []

    # --- taking in a result ---

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[EngineOutput]:
        """Append what was sampled, end and free what is done. Results come in submission order."""
        outputs: list[EngineOutput] = []
        self._mark_lost(result.lost)
        # What is only kept gives way before anybody is told that there is no room.
        is_full = any(outcome.out_of_slots for outcome in result.sequences.values())
        is_alone = not (is_full and self.blocks.release_kept()) and len(self.running) == 1
        for scheduled in batch.sequences:
            sequence = self.sequences[scheduled.seq_id]
            sequence.num_in_flight -= len(scheduled.token_ids)
            if not sequence.is_ended and not sequence.must_restart:
                outcome = result.sequences.get(scheduled.seq_id, _NO_RESULT)
                outputs += self._apply(sequence, scheduled, outcome, is_alone)
            self._settle(sequence)
        self._settle_lost(result.lost)
        return outputs

    def _mark_lost(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            sequence = self.sequences.get(seq_id)
            if sequence is None:
                self.blocks.forget(seq_id)
            else:
                sequence.has_lost_kv = sequence.status is Status.RUNNING

    def _settle_lost(self, seq_ids: Iterable[int]) -> None:
        """Those that had no part in the batch."""
        for sequence in [self.sequences[seq_id] for seq_id in seq_ids if seq_id in self.sequences]:
            if sequence.has_lost_kv:
                self._settle(sequence)

    def fail(self, batch: ScheduledBatch, message: str) -> list[EngineOutput]:
        """End every sequence of a batch that the executor could not run, each with that error."""
        # Copies were for sequences of this very batch; what was to be forgotten is still to be forgotten.
        kept = [FreeSequence(op.source) if isinstance(op, MoveSequence) else op for op in batch.cache_ops]
        self._cache_ops[:0] = [op for op in kept if not isinstance(op, CopyBlock | CopySequence)]
        failed = SequenceResult(error=message)
        return self.update(batch, StepResult(batch.step_id, {s.seq_id: failed for s in batch.sequences}))

    def _apply(
        self, sequence: Sequence, scheduled: ScheduledSequence, outcome: SequenceResult, is_alone: bool
    ) -> list[EngineOutput]:
        error = fault_of(scheduled, outcome, is_alone)
        if error is not None:
            self._end(sequence, "error", error=error)
            return [make_output(sequence, 0, SequenceResult())]
        if outcome.out_of_slots:
            sequence.out_of_slots = True
            return []
        count = self._append(sequence, scheduled, outcome.token_ids)
        self.blocks.register(sequence)
        if sequence.is_prompt_computed:
            self._release_siblings(sequence)
        return [make_output(sequence, count, outcome)] if count else []

    def _append(self, sequence: Sequence, scheduled: ScheduledSequence, token_ids: list[int]) -> int:
        """Count what was computed and append what was sampled, up to the end; how many tokens were appended."""
        num_rejected = max(scheduled.num_logits - len(token_ids), 0)
        sequence.num_computed_tokens = scheduled.start + len(scheduled.token_ids) - num_rejected
        if num_rejected:
            self._cache_ops.append(TrimSequence(sequence.seq_id, sequence.num_computed_tokens))
            self.blocks.trim(sequence, sequence.num_computed_tokens)
        if token_ids and sequence.timing.first_token is None:
            sequence.timing.first_token = self._clock()
        for count, token_id in enumerate(token_ids, start=1):
            sequence.output_token_ids.append(token_id)
            end = why_ended(sequence, self.eos_token_ids)
            if end is not None:
                self._end(sequence, end[0], stop_reason=end[1])
                return count
        return len(token_ids)

    def _end(
        self, sequence: Sequence, reason: str, *, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.error = error
        sequence.timing.finished = self._clock()

    def _release_siblings(self, leader: Sequence) -> None:
        """From now on the siblings wait for memory like everybody else, in the leader's place in the order."""
        for sibling in leader.siblings:
            if not sibling.is_ended:
                self._wait(sibling)
        leader.siblings = []

    def _settle(self, sequence: Sequence) -> None:
        """Carry out, once nothing of the sequence is in flight, what was only marked while something was."""
        if sequence.num_in_flight > 0:
            return
        if sequence.is_ended:
            self._finish(sequence)
        elif sequence.must_restart:
            lacked_slots = sequence.out_of_slots
            self._preempt(sequence)
            if lacked_slots:  # as many as the executor could hold, until one of them has left
                self._seats = max(len(self.running), 1)

    def _finish(self, sequence: Sequence) -> None:
        is_kept = False
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            is_kept = self.blocks.finish(sequence)
            self._seats = self.config.max_num_seqs
        elif self.waiting.remove(sequence):
            self.num_queued_tokens -= sequence.num_tokens
        if sequence.timing.first_scheduled is not None and not is_kept:
            self._cache_ops.append(FreeSequence(sequence.seq_id))
        sequence.status = Status.FINISHED
        self.num_finished[sequence.finish_reason or ""] += 1
        self._release_siblings(sequence)
        del self.sequences[sequence.seq_id]
        self._forget_request(sequence)

    def _forget_request(self, sequence: Sequence) -> None:
        group = self._requests[sequence.request_id]
        group.remove(sequence)
        if not group:
            del self._requests[sequence.request_id]

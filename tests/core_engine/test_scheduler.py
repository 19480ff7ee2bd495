"""The scheduler's rules one by one; the executor is the test itself, which says what was sampled."""

from __future__ import annotations

from types import ModuleType

import pytest

from suimon.core_engine.batch import CopyBlock, FreeSequence, ScheduledBatch, TrimSequence
from suimon.core_engine.errors import InvalidRequestError
from suimon.core_engine.executor import SequenceResult, StepResult
from suimon.core_engine.outputs import EngineOutput
from suimon.core_engine.scheduler import Scheduler
from suimon.core_engine.sequence import Sequence, Status


def shape(batch: ScheduledBatch | None) -> list[tuple[int, int, int, int]]:
    """(seq_id, start, tokens, logits) of every sequence in the batch."""
    assert batch is not None
    return [(s.seq_id, s.start, len(s.token_ids), s.num_logits) for s in batch.sequences]


def finish(scheduler: Scheduler, batch: ScheduledBatch | None, token_id: int = 5) -> list[EngineOutput]:
    """Every row of logits gives ``token_id``; drafts are accepted as far as they equal it."""
    assert batch is not None
    results = {}
    for s in batch.sequences:
        drafts = s.token_ids[len(s.token_ids) - s.num_logits + 1 :] if s.num_logits else []
        wrong = [i for i, draft in enumerate(drafts) if draft != token_id]
        results[s.seq_id] = SequenceResult([token_id] * (min([*wrong, len(drafts)]) + 1) if s.num_logits else [])
    return scheduler.update(batch, StepResult(batch.step_id, results))


def step(scheduler: Scheduler, token_id: int = 5) -> list[tuple[int, int, int, int]]:
    batch = scheduler.schedule()
    finish(scheduler, batch, token_id)
    return shape(batch)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def results(batch: ScheduledBatch, **changes: SequenceResult) -> StepResult:
    """One token for each that asked, but for the changes, named ``s<seq_id>``."""
    plain = {s.seq_id: SequenceResult([5] if s.num_logits else []) for s in batch.sequences}
    return StepResult(batch.step_id, {**plain, **{int(name[1:]): result for name, result in changes.items()}})


# --- what a step hands out ---


def test_a_prompt_is_computed_in_chunks_under_the_budget(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=16)
    add(scheduler, build.make_sequence(40))
    assert [step(scheduler) for _ in range(4)] == [
        [(1, 0, 16, 0)],
        [(1, 16, 16, 0)],
        [(1, 32, 8, 1)],
        [(1, 40, 1, 1)],
    ]


def test_decodes_come_before_chunks_and_running_before_waiting(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=16)
    add(scheduler, build.make_sequence(10, 1), build.make_sequence(30, 2), build.make_sequence(5, 3))
    assert step(scheduler) == [(1, 0, 10, 1), (2, 0, 6, 0)]
    assert step(scheduler) == [(1, 10, 1, 1), (2, 6, 15, 0)]
    assert step(scheduler) == [(1, 11, 1, 1), (2, 21, 9, 1), (3, 0, 5, 1)]
    assert step(scheduler) == [(1, 12, 1, 1), (2, 30, 1, 1), (3, 5, 1, 1)]


def test_a_budget_smaller_than_the_number_of_decodes(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=1)
    params = build.make_params(max_tokens=2)
    add(scheduler, build.make_sequence(1, 1, params=params), build.make_sequence(1, 2, params=params))
    assert [step(scheduler)[0][0] for _ in range(4)] == [1, 1, 2, 2]
    assert scheduler.schedule() is None and not scheduler.has_unfinished


def test_a_step_without_budget_left_passes_the_rest_over(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=4)
    first = build.make_sequence(2, 1)
    add(scheduler, first, build.make_sequence(9, 2))
    assert step(scheduler) == [(1, 0, 2, 1), (2, 0, 2, 0)]
    first.draft_token_ids = [5, 9, 9]
    assert step(scheduler) == [(1, 2, 4, 4)]
    assert step(scheduler) == [(1, 4, 1, 1), (2, 2, 3, 0)]


def test_seats_are_limited(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=2)
    add(scheduler, *(build.make_sequence(3, i) for i in (1, 2, 3)))
    assert len(step(scheduler)) == 2
    assert (len(scheduler.running), scheduler.num_waiting, scheduler.num_queued_tokens) == (2, 1, 3)


def test_the_block_table_covers_exactly_the_tokens(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=4, block_size=4)
    add(scheduler, build.make_sequence(9))
    lengths = []
    for _ in range(4):
        batch = scheduler.schedule()
        lengths.append(len(batch.sequences[0].block_table))
        finish(scheduler, batch)
    assert lengths == [1, 2, 3, 3]


def test_step_ids_count_batches(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    assert scheduler.schedule() is None
    add(scheduler, build.make_sequence(3))
    ids = []
    for _ in range(3):
        batch = scheduler.schedule()
        ids.append(batch.step_id)
        finish(scheduler, batch)
    assert ids == [1, 2, 3]


# --- arrival ---


def test_a_request_id_in_use_is_refused(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    add(scheduler, build.make_sequence(3, 1, request_id="same"))
    with pytest.raises(InvalidRequestError, match="'same' is in use"):
        scheduler.add(build.make_sequence(3, 2, request_id="same"))


# --- preemption ---


def test_the_last_in_policy_order_gives_way(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=6, block_size=4)
    sequences = [build.make_sequence(4, i, params=build.make_params(max_tokens=16)) for i in (1, 2, 3)]
    add(scheduler, *sequences)
    assert len(step(scheduler)) == 3
    for _ in range(4):
        step(scheduler)  # 8 tokens computed in 2 blocks each: the pool is full
    batch = scheduler.schedule()
    assert shape(batch) == [(1, 8, 1, 1), (2, 8, 1, 1)]
    assert sequences[2].status is Status.WAITING and sequences[2].num_computed_tokens == 0
    assert batch.cache_ops == [TrimSequence(3, 0)]
    assert scheduler.num_preemptions == sequences[2].num_preemptions == 1
    assert scheduler.num_queued_tokens == sequences[2].num_tokens
    scheduler.blocks.check_integrity()


def test_a_sequence_takes_no_blocks_from_those_before_it(build: ModuleType) -> None:
    # The decode (2) comes first in the step, but the longer-waiting prompt (1) keeps its blocks and gets more.
    scheduler = build.make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=9)
    first, second = build.make_sequence(12, 1), build.make_sequence(3, 2)
    add(scheduler, second)
    step(scheduler)
    first.timing.arrival = -1.0
    add(scheduler, first)
    assert step(scheduler) == [(2, 3, 1, 1)]  # three blocks for 1 and one to spare do not fit
    assert step(scheduler) == [(2, 4, 1, 1)]
    assert scheduler.num_preemptions == 0
    scheduler = build.make_scheduler(num_blocks=5, block_size=4, max_num_batched_tokens=9)
    first, second = build.make_sequence(12, 1, arrival=1), build.make_sequence(3, 2, arrival=2)
    add(scheduler, second)
    step(scheduler)
    add(scheduler, first)
    assert step(scheduler) == [(2, 3, 1, 1), (1, 0, 8, 0)]
    assert step(scheduler) == [(2, 4, 1, 1), (1, 8, 4, 1)]  # 2 took the last block
    assert step(scheduler) == [(1, 12, 1, 1)] or second.num_in_flight == 0
    assert first.num_preemptions == 0


def test_what_is_scheduled_in_this_step_is_not_preempted(build: ModuleType) -> None:
    # B44: 2 decodes first and is in the plan; 1 finds no victim and waits with what it holds.
    scheduler = build.make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=64)
    early, late = build.make_sequence(8, 1, arrival=2), build.make_sequence(4, 2, arrival=3)
    add(scheduler, early, late)
    step(scheduler)
    early.output_token_ids += [5]  # two tokens left: not a decode, so it comes after 2
    assert shape(scheduler.schedule()) == [(2, 4, 1, 1)]
    assert early.status is Status.RUNNING and late.num_in_flight == 1
    assert scheduler.num_preemptions == 0


def test_what_is_in_flight_is_not_preempted(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=9, block_size=1, max_num_batched_tokens=3)
    add(scheduler, build.make_sequence(2, 1))
    batches = [scheduler.schedule()]
    add(scheduler, build.make_sequence(6, 2))
    batches.append(scheduler.schedule())
    finish(scheduler, batches[0])
    batches.append(scheduler.schedule())
    finish(scheduler, batches[1])
    batches.append(scheduler.schedule())
    finish(scheduler, batches[2])
    assert [shape(b) for b in batches[1:]] == [[(2, 0, 3, 0)], [(1, 2, 1, 1), (2, 3, 2, 0)], [(2, 5, 1, 1)]]
    assert scheduler.schedule() is None and scheduler.num_preemptions == 0, "1 lacks a block; 2 is in flight"
    finish(scheduler, batches[3])
    assert shape(scheduler.schedule()) == [(1, 3, 1, 1)] and scheduler.num_preemptions == 1


def test_a_preempted_sequence_resumes_before_later_arrivals(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=6, block_size=4, max_num_seqs=3)
    params = build.make_params(max_tokens=8)
    add(scheduler, *(build.make_sequence(4, i, params=params) for i in (1, 2, 3, 4)))
    order = []
    while scheduler.has_unfinished:
        order += [seq_id for seq_id, start, _, _ in step(scheduler) if start == 0]
    assert order == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("arrivals", [(1, 2, 3, 4), (4, 3, 2, 1), (2, 4, 1, 3)])
def test_high_priority_does_not_wait_behind_a_full_batch(build: ModuleType, arrivals: tuple[int, ...]) -> None:
    # B44: priorities 0, 0, -1, 5 arriving in each order; two seats.
    scheduler = build.make_scheduler(num_blocks=8, block_size=16, max_num_seqs=2, policy="priority")
    priorities = {1: 0, 2: 0, 3: -1, 4: 5}
    for arrival, seq_id in enumerate(arrivals):
        add(scheduler, build.make_sequence(20, seq_id, arrival=arrival, priority=priorities[seq_id]))
        step(scheduler)
    assert {s.seq_id for s in scheduler.running} == {3, min((1, 2), key=arrivals.index)}
    started: list[int] = []
    for _ in range(200):
        if scheduler.has_unfinished:
            started += [seq_id for seq_id, start, _, _ in step(scheduler) if start == 0]
    assert started == [min((1, 2), key=lambda i: -arrivals.index(i)), 4]
    assert scheduler.num_finished == {"length": 4}


def test_nothing_is_preempted_for_an_urgent_one_that_would_not_fit_anyway(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=8, block_size=4, policy="priority")
    add(scheduler, build.make_sequence(16, 1, priority=0), build.make_sequence(4, 2, priority=9))
    step(scheduler)
    add(scheduler, build.make_sequence(24, 3, priority=5))
    assert [seq_id for seq_id, *_ in step(scheduler)] == [1, 2]
    assert scheduler.num_preemptions == 0


def test_only_as_many_are_preempted_as_the_urgent_one_needs(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=12, block_size=4, policy="priority")
    add(scheduler, *(build.make_sequence(8, i, priority=9) for i in (1, 2, 3)))
    step(scheduler)
    add(scheduler, build.make_sequence(16, 4, priority=0))
    assert [seq_id for seq_id, *_ in step(scheduler)] == [1, 2, 4]
    assert scheduler.num_preemptions == 1


def test_under_fcfs_nobody_is_urgent(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=1)
    add(scheduler, build.make_sequence(4, 1, priority=9))
    step(scheduler)
    add(scheduler, build.make_sequence(4, 2, priority=0))
    assert [seq_id for seq_id, *_ in step(scheduler)] == [1]


# --- the head of the line ---


def test_a_big_waiting_sequence_is_overtaken_but_not_for_ever(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=16, block_size=4, max_overtaken=3)
    params = build.make_params(max_tokens=6)
    add(scheduler, build.make_sequence(4, 1, params=params))
    step(scheduler)
    big = build.make_sequence(58, 2, params=params)
    add(scheduler, big)
    started: list[int] = []
    for seq_id in range(3, 60):  # an endless stream of small ones
        add(scheduler, build.make_sequence(4, seq_id, params=params))
        started += [s for s, start, _, _ in step(scheduler) if start == 0]
    assert started[:4] == [3, 4, 5, 2]
    assert big.is_ended


def test_a_full_house_of_waiting_giants_is_not_searched_to_the_end(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=16, block_size=4, lookahead=2)
    add(scheduler, build.make_sequence(4, 1))
    step(scheduler)
    add(scheduler, *(build.make_sequence(length, i, arrival=9.0) for length, i in ((60, 2), (60, 3), (4, 4))))
    assert [seq_id for seq_id, *_ in step(scheduler)] == [1]
    assert [s.seq_id for s in scheduler.waiting] == [2, 3, 4]


def test_nobody_overtakes_a_preempted_sequence(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=8, block_size=4, policy="priority")
    add(scheduler, build.make_sequence(20, 1, priority=9))
    step(scheduler)
    add(scheduler, build.make_sequence(16, 2, priority=0), build.make_sequence(4, 3, priority=9))
    assert step(scheduler) == [(2, 0, 16, 1)], "3 would fit, but it is 1 who lost its place"
    assert [s.seq_id for s in scheduler.waiting] == [1, 3]


def test_lower_priorities_do_not_overtake(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=16, block_size=4, policy="priority")
    add(scheduler, build.make_sequence(4, 1, priority=0))
    step(scheduler)
    add(scheduler, build.make_sequence(60, 2, priority=1), build.make_sequence(4, 3, priority=2))
    assert [seq_id for seq_id, *_ in step(scheduler)] == [1]


# --- prefix cache and forks ---


def test_cached_tokens_are_counted_once_and_below_the_prompt(build: ModuleType) -> None:
    # B46, seen from the scheduler.
    scheduler = build.make_scheduler(caching=True, block_size=16)
    params = build.make_params(max_tokens=1)
    for seq_id, (extra, cached) in enumerate([([], 0), ([], 16), ([9] * 20, 32), ([9] * 20, 48)], start=1):
        sequence = build.make_sequence(build.make_prompt(32) + extra, seq_id, params=params)
        add(scheduler, sequence)
        batch = scheduler.schedule()
        (output,) = finish(scheduler, batch)
        assert shape(batch) == [(seq_id, cached, 32 + len(extra) - cached, 1)]
        assert output.num_cached_tokens == sequence.num_cached_tokens == cached < output.num_prompt_tokens
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (32 + 32 + 52 + 52, 16 + 32 + 48)


def test_the_work_of_an_ended_leader_is_not_reported_as_cached(build: ModuleType) -> None:
    # The leader ends with its first token, so that its sibling finds the prompt in the cache instead of forking.
    scheduler = build.make_scheduler(caching=True)
    params = build.make_params(max_tokens=1, n=2)
    leader = build.make_sequence(20, 1, request_id="r", params=params)
    sibling = build.make_sequence(20, 2, request_id="r", index=1, params=params)
    scheduler.add(leader, [sibling])
    outputs = [output for _ in range(2) for output in finish(scheduler, scheduler.schedule())]
    assert [(output.index, output.num_cached_tokens) for output in outputs] == [(0, 0), (1, 0)]
    assert scheduler.prefix_hits == 16


def test_a_resumed_sequence_finds_its_own_blocks_but_reports_no_cached_tokens(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=32, block_size=4, caching=True, policy="priority", max_num_seqs=1)
    victim = build.make_sequence(10, 1, priority=9)
    add(scheduler, victim)
    step(scheduler)
    add(scheduler, build.make_sequence(3, 2, priority=0, params=build.make_params(max_tokens=1)))
    assert step(scheduler) == [(2, 0, 3, 1)]
    assert step(scheduler) == [(1, 8, 3, 1)]
    assert victim.num_cached_tokens == 0 and victim.num_preemptions == 1


@pytest.mark.parametrize(("length", "copies"), [(10, 1), (9, 0)])
def test_siblings_share_the_computed_prompt(build: ModuleType, length: int, copies: int) -> None:
    scheduler = build.make_scheduler(block_size=4, max_num_batched_tokens=6)
    leader = build.make_sequence(length, 1, request_id="r")
    sibling = build.make_sequence(length, 2, request_id="r", arrival=1.0)
    scheduler.add(leader, [sibling])
    assert sibling.status is Status.HELD and scheduler.num_waiting == 2
    assert step(scheduler) == [(1, 0, 6, 0)]
    assert scheduler.num_waiting == 1
    assert step(scheduler) == [(1, 6, length - 6, 1)]
    batch = scheduler.schedule()
    assert shape(batch) == [(1, length, 1, 1), (2, length - 1, 1, 1)]
    assert sibling.block_table[:2] == leader.block_table[:2]
    expected = [CopyBlock(leader.block_table[2], sibling.block_table[2])] * copies
    assert batch.cache_ops == expected
    finish(scheduler, batch)
    scheduler.blocks.check_integrity()


def test_a_sibling_that_does_not_fit_yet_waits(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=3, block_size=4)
    params = build.make_params(max_tokens=3)
    leader = build.make_sequence(6, 1, request_id="r", params=params)
    sibling = build.make_sequence(6, 2, request_id="r", params=params)
    scheduler.add(leader, [sibling])
    step(scheduler)
    assert step(scheduler) == [(1, 6, 1, 1)]  # one block is free, but 1 may need it
    assert step(scheduler) == [(1, 7, 1, 1)]
    assert step(scheduler) == [(2, 0, 6, 1)]  # the leader has left, so it computes the prompt itself


def test_siblings_of_a_leader_that_ends_first_are_on_their_own(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    leader = build.make_sequence(6, 1, request_id="r")
    scheduler.add(leader, [build.make_sequence(6, 2, request_id="r")])
    batch = scheduler.schedule()
    scheduler.update(batch, results(batch, s1=SequenceResult(error="no")))
    assert step(scheduler) == [(2, 0, 6, 1)]


def test_an_urgent_sibling_takes_the_seat_of_a_lower_priority(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=6, block_size=4, max_num_seqs=2, policy="priority")
    leader = build.make_sequence(10, 1, request_id="r", priority=0)
    scheduler.add(leader, [build.make_sequence(10, 3, request_id="r", priority=0)])
    add(scheduler, build.make_sequence(4, 2, priority=9))
    assert step(scheduler) == [(1, 0, 10, 1), (2, 0, 4, 1)]
    assert step(scheduler) == [(1, 10, 1, 1), (3, 9, 1, 1)], "three free blocks hold no second prompt, but a fork"


def test_a_preempted_leader_is_not_forked_from(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=1, policy="priority")
    leader = build.make_sequence(6, 1, request_id="r", priority=5)
    scheduler.add(leader, [build.make_sequence(6, 2, request_id="r", priority=5)])
    step(scheduler)
    add(scheduler, build.make_sequence(3, 3, priority=0, params=build.make_params(max_tokens=1)))
    assert step(scheduler) == [(3, 0, 3, 1)]
    assert step(scheduler) == [(1, 0, 7, 1)]


def test_a_resumed_leader_is_not_forked_from_before_its_prompt_is_there_again(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=2, max_num_batched_tokens=4, policy="priority")
    leader = build.make_sequence(6, 1, request_id="r", priority=5)
    add(scheduler, build.make_sequence(1, 3, priority=0, max_tokens=3))
    scheduler.add(leader, [build.make_sequence(6, 2, request_id="r", priority=5)])
    assert [step(scheduler), step(scheduler)] == [[(3, 0, 1, 1), (1, 0, 3, 0)], [(3, 1, 1, 1), (1, 3, 3, 1)]]
    add(scheduler, build.make_sequence(1, 4, priority=0, max_tokens=1))
    assert step(scheduler) == [(3, 2, 1, 1), (4, 0, 1, 1)]
    assert [step(scheduler), step(scheduler)] == [[(1, 0, 4, 0)], [(1, 4, 3, 1), (2, 0, 1, 0)]]


def test_a_resumed_sibling_goes_on_from_its_own_cached_blocks(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=2, block_size=4, policy="priority", caching=True)
    leader = build.make_sequence(6, 1, request_id="r", priority=5, max_tokens=20)
    scheduler.add(leader, [build.make_sequence(6, 2, request_id="r", priority=5, max_tokens=20)])
    for token_id in range(1, 7):
        step(scheduler, token_id)
    add(scheduler, build.make_sequence(1, 3, priority=0, max_tokens=1))
    assert step(scheduler) == [(1, 11, 1, 1), (3, 0, 1, 1)]
    assert step(scheduler) == [(1, 12, 1, 1), (2, 8, 3, 1)], "8 tokens in full blocks, more than the prompt's 6"


# --- more than one batch in flight ---


def test_what_is_in_flight_gives_way_to_an_urgent_one_only_when_it_is_back(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=1, policy="priority")
    add(scheduler, build.make_sequence(4, 1, priority=9))
    batch = scheduler.schedule()
    add(scheduler, build.make_sequence(4, 2, priority=0))
    assert scheduler.schedule() is None and scheduler.num_preemptions == 0
    finish(scheduler, batch)
    assert step(scheduler) == [(2, 0, 4, 1)] and scheduler.num_preemptions == 1


def test_chunks_of_one_prompt_may_be_in_flight_together(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=8)
    sequence = build.make_sequence(20)
    add(scheduler, sequence)
    batches = [scheduler.schedule() for _ in range(3)]
    assert [shape(batch) for batch in batches] == [[(1, 0, 8, 0)], [(1, 8, 8, 0)], [(1, 16, 4, 1)]]
    assert scheduler.schedule() is None, "the sampled token is awaited"
    for batch in batches:
        finish(scheduler, batch)
    assert (sequence.num_computed_tokens, sequence.num_in_flight, sequence.num_output_tokens) == (20, 0, 1)


def test_others_are_planned_while_one_waits_for_its_token(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    add(scheduler, build.make_sequence(4, 1))
    first = scheduler.schedule()
    add(scheduler, build.make_sequence(4, 2))
    second = scheduler.schedule()
    assert (shape(first), shape(second)) == ([(1, 0, 4, 1)], [(2, 0, 4, 1)])
    finish(scheduler, first)
    assert shape(scheduler.schedule()) == [(1, 4, 1, 1)]


@pytest.mark.parametrize("num_batches", [1, 2])
def test_an_abort_in_flight_only_marks(build: ModuleType, num_batches: int) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=8)
    sequence = build.make_sequence(20)
    add(scheduler, sequence)
    batches = [scheduler.schedule() for _ in range(num_batches)]
    assert scheduler.abort("r1")
    for batch in batches:
        assert sequence.block_table != [] and scheduler.blocks.num_used > 0
        assert scheduler.schedule() is None
        assert finish(scheduler, batch) == []
    assert scheduler.blocks.num_used == 0 and not scheduler.has_unfinished
    assert sequence.status is Status.FINISHED


def test_an_error_in_one_chunk_ends_the_sequence_when_the_next_is_back(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=8)
    add(scheduler, build.make_sequence(20))
    first, second = scheduler.schedule(), scheduler.schedule()
    (output,) = scheduler.update(first, results(first, s1=SequenceResult(error="broken")))
    assert (output.finish_reason, output.error) == ("error", "broken")
    assert scheduler.has_unfinished and scheduler.blocks.num_used > 0
    assert finish(scheduler, second) == []
    assert not scheduler.has_unfinished and scheduler.blocks.num_used == 0


def test_a_chunk_lost_for_lack_of_slots_spoils_the_next_one_too(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=8)
    add(scheduler, build.make_sequence(4, 2, arrival=0), build.make_sequence(20, 1, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (shape(first), shape(second)) == ([(2, 0, 4, 1), (1, 0, 4, 0)], [(1, 4, 8, 0)])
    scheduler.update(first, results(first, s1=SequenceResult(out_of_slots=True)))
    assert scheduler.num_preemptions == 0
    third = scheduler.schedule()
    assert shape(third) == [(2, 4, 1, 1)], "nothing more of 1 before what is in flight is back"
    assert finish(scheduler, second) == []
    assert scheduler.num_preemptions == 1
    finish(scheduler, third)
    assert shape(scheduler.schedule()) == [(2, 5, 1, 1)], "one seat, until somebody has left"


def test_a_token_sampled_after_a_lost_chunk_means_nothing(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=8)
    sequence = build.make_sequence(12, 1, arrival=1)
    add(scheduler, build.make_sequence(4, 2, arrival=0), sequence)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shape(second) == [(1, 4, 8, 1)]
    scheduler.update(first, results(first, s1=SequenceResult(out_of_slots=True)))
    assert finish(scheduler, second) == []
    assert sequence.output_token_ids == [] and sequence.num_computed_tokens == 0


# --- abort ---


def test_abort_waiting_running_siblings_and_twice(build: ModuleType) -> None:
    # B50
    scheduler = build.make_scheduler(max_num_seqs=1)
    leader = build.make_sequence(4, 1, request_id="group")
    scheduler.add(leader, [build.make_sequence(4, i, request_id="group") for i in (2, 3)])
    add(scheduler, build.make_sequence(7, 4))
    step(scheduler)
    assert scheduler.abort("group") and not scheduler.abort("group")
    assert scheduler.abort("r4") and not scheduler.abort("r4") and not scheduler.abort("never seen")
    assert not scheduler.has_unfinished and not scheduler.waiting and scheduler.schedule() is None
    assert (scheduler.num_aborted, scheduler.num_finished["abort"], scheduler.num_queued_tokens) == (2, 4, 0)
    scheduler.blocks.check_integrity()


def test_the_rest_of_a_group_is_aborted_when_one_choice_has_ended(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    params = build.make_params(max_tokens=2)
    leader = build.make_sequence(4, 1, request_id="group", params=params)
    scheduler.add(leader, [build.make_sequence(4, 2, request_id="group", params=params)])
    step(scheduler)
    step(scheduler)
    assert leader.finish_reason == "length" and scheduler.has_unfinished
    assert scheduler.abort("group") and not scheduler.has_unfinished
    assert scheduler.num_finished == {"length": 1, "abort": 1}


def test_a_choice_stopped_by_its_reader_counts_as_a_stop(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    leader = build.make_sequence(4, 1, request_id="group")
    scheduler.add(leader, [build.make_sequence(4, 2, request_id="group", index=1)])
    step(scheduler)
    assert scheduler.abort("group", 0) and not scheduler.abort("group", 0) and not scheduler.abort("group", 7)
    assert step(scheduler) == [(2, 0, 4, 1)]
    assert scheduler.abort("group")
    assert (scheduler.num_finished, scheduler.num_aborted) == ({"stop": 1, "abort": 1}, 1)


def test_a_choice_that_ends_before_its_leader_has_computed_the_prompt_never_starts(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=4)
    leader = build.make_sequence(6, 1, request_id="group")
    scheduler.add(leader, [build.make_sequence(6, 2, request_id="group", index=1)])
    step(scheduler)
    assert scheduler.abort("group", 1)
    assert [step(scheduler), step(scheduler)] == [[(1, 4, 2, 1)], [(1, 6, 1, 1)]]
    assert not scheduler.waiting and scheduler.num_queued_tokens == 0


def test_the_executor_learns_who_is_gone_with_the_next_batch(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=1)
    add(scheduler, build.make_sequence(4, 1), build.make_sequence(4, 2), build.make_sequence(4, 3))
    step(scheduler)
    scheduler.abort("r1")
    scheduler.abort("r2")  # never ran: the executor knows nothing of it
    assert scheduler.schedule().cache_ops == [FreeSequence(1)]


# --- how a sequence ends ---


def outputs_until_end(scheduler: Scheduler, token_ids: list[int]) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for token_id in token_ids:
        if scheduler.has_unfinished:
            outputs += finish(scheduler, scheduler.schedule(), token_id)
    return outputs


@pytest.mark.parametrize(
    ("changes", "count", "reason", "stop_reason"),
    [
        ({}, 3, "stop", None),
        ({"ignore_eos": True}, 4, "stop", 8),
        ({"ignore_eos": True, "stop_token_ids": ()}, 5, "length", None),
        ({"min_tokens": 3}, 4, "stop", 8),
        ({"min_tokens": 2}, 3, "stop", None),
        ({"stop_token_ids": (6,)}, 2, "stop", 6),
        ({"max_tokens": 2}, 2, "length", None),
        ({"max_tokens": 3}, 3, "stop", None),
    ],
)
def test_finish_reasons(
    build: ModuleType, changes: dict[str, object], count: int, reason: str, stop_reason: int | None
) -> None:
    # B32: the prompt of 50 does not count towards min_tokens. The end token itself is among the outputs.
    scheduler = build.make_scheduler(eos=[7], block_size=16)
    params = build.make_params(**{"max_tokens": 5, "ignore_eos": False, "stop_token_ids": (8,), **changes})
    add(scheduler, build.make_sequence(50, params=params, max_tokens=params.max_tokens))
    outputs = outputs_until_end(scheduler, [5, 6, 7, 8, 9, 9])
    assert [output.token_ids for output in outputs] == [(5,), (6,), (7,), (8,), (9,)][:count]
    assert [output.finish_reason for output in outputs] == [None] * (count - 1) + [reason]
    assert outputs[-1].stop_reason == stop_reason and outputs[-1].num_output_tokens == count
    assert scheduler.num_finished == {reason: 1}


def test_every_eos_of_several_ends(build: ModuleType) -> None:
    for token_id in (7, 8):
        scheduler = build.make_scheduler(eos=[7, 8])
        add(scheduler, build.make_sequence(3, params=build.make_params(ignore_eos=False)))
        assert outputs_until_end(scheduler, [5, token_id])[-1].finish_reason == "stop"


def test_timing_comes_with_the_first_and_the_last_output(build: ModuleType) -> None:
    ticks = iter(range(1, 100))
    scheduler = build.make_scheduler()
    scheduler._clock = lambda: float(next(ticks))
    add(scheduler, build.make_sequence(3, params=build.make_params(max_tokens=3), max_tokens=3, arrival=0.5))
    first, middle, last = outputs_until_end(scheduler, [5, 5, 5])
    assert middle.timing is None
    assert (first.timing.arrival, first.timing.first_scheduled, first.timing.first_token) == (0.5, 1.0, 2.0)
    assert first.timing.finished is None and last.timing.finished == 3.0


# --- drafts ---


@pytest.fixture
def decoding(build: ModuleType) -> tuple[Scheduler, Sequence]:
    """A sequence of 6 prompt tokens and one output, about to decode; up to 8 outputs; block size 4."""
    scheduler = build.make_scheduler(num_blocks=8, block_size=4)
    sequence = build.make_sequence(6)
    add(scheduler, sequence)
    step(scheduler)
    return scheduler, sequence


def test_accepted_drafts_are_computed_tokens(decoding: tuple[Scheduler, Sequence]) -> None:
    scheduler, sequence = decoding
    sequence.draft_token_ids = [5, 5, 5]
    batch = scheduler.schedule()
    assert shape(batch) == [(1, 6, 4, 4)]
    assert batch.sequences[0].token_ids == [5, 5, 5, 5] and len(batch.sequences[0].block_table) == 3
    (output,) = finish(scheduler, batch)
    assert output.token_ids == (5, 5, 5, 5)
    assert (sequence.num_computed_tokens, sequence.num_tokens, sequence.draft_token_ids) == (10, 11, [])
    assert scheduler.schedule().cache_ops == []


def test_rejected_drafts_are_trimmed(decoding: tuple[Scheduler, Sequence]) -> None:
    scheduler, sequence = decoding
    sequence.draft_token_ids = [5, 9, 9]
    (output,) = finish(scheduler, scheduler.schedule())
    assert output.token_ids == (5, 5)
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (8, 9)
    assert len(sequence.block_table) == 2, "the block for the rejected drafts is given back"
    batch = scheduler.schedule()
    assert batch.cache_ops == [TrimSequence(1, 8)] and shape(batch) == [(1, 8, 1, 1)]


def test_an_end_within_accepted_drafts_drops_the_rest(build: ModuleType) -> None:
    scheduler = build.make_scheduler(eos=[7], block_size=4, caching=True)
    sequence = build.make_sequence(6, params=build.make_params(ignore_eos=False))
    add(scheduler, sequence)
    step(scheduler)
    sequence.draft_token_ids = [7, 5]
    batch = scheduler.schedule()
    (output,) = scheduler.update(batch, results(batch, s1=SequenceResult([7, 5, 5])))
    assert output.token_ids == (7,) and output.finish_reason == "stop"
    scheduler.blocks.check_integrity()
    assert scheduler.blocks.num_used == 0 and scheduler.blocks.num_cached == 2


def test_no_more_drafts_than_may_still_be_generated(decoding: tuple[Scheduler, Sequence]) -> None:
    scheduler, sequence = decoding
    sequence.draft_token_ids = [5] * 20
    assert shape(scheduler.schedule()) == [(1, 6, 7, 7)], "7 of 8 outputs are left: 6 drafts and what follows them"


def test_drafts_obey_the_budget_and_take_no_blocks_from_others(build: ModuleType) -> None:
    scheduler = build.make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=9)
    first, second = build.make_sequence(3, 1), build.make_sequence(6, 2)
    add(scheduler, first, second)
    step(scheduler)
    first.draft_token_ids, second.draft_token_ids = [5, 5, 5], [5, 5, 5, 5, 5, 5]
    assert shape(scheduler.schedule()) == [(1, 3, 4, 4), (2, 6, 1, 1)], "the second's drafts need a fifth block"
    assert scheduler.num_preemptions == 0


def test_an_executor_that_cannot_trim_gets_no_drafts(build: ModuleType) -> None:
    scheduler = build.make_scheduler(partial_trim=False)
    sequence = build.make_sequence(6)
    add(scheduler, sequence)
    step(scheduler)
    sequence.draft_token_ids = [5, 5]
    assert step(scheduler) == [(1, 6, 1, 1)] and sequence.draft_token_ids == []


def test_drafts_wait_for_the_last_chunk(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=4)
    sequence = build.make_sequence(6)
    sequence.draft_token_ids = [5, 5]
    add(scheduler, sequence)
    assert [step(scheduler), step(scheduler)] == [[(1, 0, 4, 0)], [(1, 4, 4, 3)]]


# --- executors that fail or run out ---


def test_one_sequence_fails_alone(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    add(scheduler, build.make_sequence(4, 1), build.make_sequence(4, 2))
    batch = scheduler.schedule()
    bad, good = scheduler.update(batch, results(batch, s1=SequenceResult(error="bad row")))
    assert (bad.request_id, bad.finish_reason, bad.error, bad.token_ids) == ("r1", "error", "bad row", ())
    assert bad.timing is not None and (good.finish_reason, good.token_ids) == (None, (5,))
    assert [s.seq_id for s in scheduler.running] == [2]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (SequenceResult([]), "returned 0 tokens for 1 rows"),
        (SequenceResult([5, 5]), "returned 2 tokens for 1 rows"),
        (None, "returned no result for this sequence"),
    ],
)
def test_an_impossible_result_is_an_error_of_its_sequence(
    build: ModuleType, result: SequenceResult | None, message: str
) -> None:
    scheduler = build.make_scheduler()
    add(scheduler, build.make_sequence(4, 1))
    batch = scheduler.schedule()
    (output,) = scheduler.update(batch, StepResult(1, {} if result is None else {1: result}))
    assert message in output.error and not scheduler.has_unfinished


def test_a_chunk_that_returns_a_token_is_an_error(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_batched_tokens=4)
    add(scheduler, build.make_sequence(8, 1))
    batch = scheduler.schedule()
    (output,) = scheduler.update(batch, StepResult(1, {1: SequenceResult([5])}))
    assert "returned 1 tokens for 0 rows" in output.error


def test_out_of_slots_preempts_and_tries_again_with_fewer(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    params = build.make_params(max_tokens=2)
    add(scheduler, *(build.make_sequence(4, i, params=params, max_tokens=2) for i in (1, 2, 3)))
    batch = scheduler.schedule()
    full = SequenceResult(out_of_slots=True)
    assert len(scheduler.update(batch, results(batch, s2=full, s3=full))) == 1
    assert scheduler.num_preemptions == 2
    assert step(scheduler) == [(1, 4, 1, 1)], "one fits, so there is one seat until it has left"
    assert step(scheduler) == [(2, 0, 4, 1), (3, 0, 4, 1)]


def test_all_out_of_slots_at_once_still_get_through_one_by_one(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    add(scheduler, build.make_sequence(4, 1), build.make_sequence(4, 2))
    batch = scheduler.schedule()
    full = SequenceResult(out_of_slots=True)
    assert scheduler.update(batch, results(batch, s1=full, s2=full)) == []
    assert step(scheduler) == [(1, 0, 4, 1)]


def test_out_of_slots_alone_is_an_error(build: ModuleType) -> None:
    scheduler = build.make_scheduler()
    add(scheduler, build.make_sequence(4, 1))
    batch = scheduler.schedule()
    (output,) = scheduler.update(batch, results(batch, s1=SequenceResult(out_of_slots=True)))
    assert output.finish_reason == "error" and "even alone" in output.error


def test_a_failed_batch_ends_its_sequences_and_keeps_what_is_to_be_forgotten(build: ModuleType) -> None:
    scheduler = build.make_scheduler(max_num_seqs=3)
    leader = build.make_sequence(6, 1, request_id="r")
    scheduler.add(leader, [build.make_sequence(6, 2, request_id="r")])
    add(scheduler, build.make_sequence(4, 3), build.make_sequence(4, 4))
    step(scheduler)
    scheduler.abort("r3")
    batch = scheduler.schedule()
    assert [type(op) for op in batch.cache_ops] == [FreeSequence, CopyBlock]
    outputs = scheduler.fail(batch, "the device is gone")
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        (request_id, "error", "the device is gone") for request_id in ("r", "r4", "r")
    ]
    assert not scheduler.has_unfinished and scheduler.blocks.num_used == 0
    add(scheduler, build.make_sequence(4, 5))
    assert scheduler.schedule().cache_ops == [FreeSequence(seq_id) for seq_id in (3, 1, 4, 2)]


# --- adapters ---


def test_no_more_adapters_in_a_batch_than_the_executor_can_take(build: ModuleType) -> None:
    scheduler = build.make_scheduler(adapters_per_batch=1, max_overtaken=2)
    params = build.make_params(max_tokens=3)
    names = {1: None, 2: "a", 3: None, 4: None, 5: None, 6: None}
    add(scheduler, *(build.make_sequence(4, i, adapter=names[i], params=params, max_tokens=3) for i in names))
    first_step: dict[int, int] = {}
    for number in range(30):
        batch = scheduler.schedule()
        if batch is None:
            break
        assert len({s.adapter for s in batch.sequences}) == 1
        for s in batch.sequences:
            first_step.setdefault(s.seq_id, number)
        finish(scheduler, batch)
    assert not scheduler.has_unfinished
    assert first_step[2] < first_step[5], "overtaken twice, then nobody passes it"


def test_running_adapters_take_turns(build: ModuleType) -> None:
    scheduler = build.make_scheduler(adapters_per_batch=2)
    names = {1: None, 2: "a", 3: "b"}
    add(scheduler, *(build.make_sequence(4, i, adapter=names[i]) for i in (1, 2)))
    first = scheduler.schedule()
    scheduler.config = type(scheduler.config)(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, adapters_per_batch=1
    )
    finish(scheduler, first)
    assert [[s for s, *_ in step(scheduler)] for _ in range(4)] in ([[1], [2]] * 2, [[2], [1]] * 2)


def test_an_adapter_whose_turn_brings_no_batch_does_not_stop_the_rest(build: ModuleType) -> None:
    # "a" lacks a block that only an earlier sequence of another adapter could give: the turn passes on.
    scheduler = build.make_scheduler(num_blocks=2, block_size=4, adapters_per_batch=2)
    early, late = build.make_sequence(3, 1), build.make_sequence(4, 2, adapter="a")
    scheduler.blocks.allocate(early, 3)
    scheduler.blocks.allocate(late, 4)
    params = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "adapters_per_batch": 1}
    scheduler.config = type(scheduler.config)(**params)
    for sequence in (early, late):
        sequence.status = Status.RUNNING
        scheduler.sequences[sequence.seq_id] = sequence
        scheduler.running.append(sequence)
    late.num_computed_tokens, late.output_token_ids = 4, [5]
    scheduler._served_at = {None: 1}
    scheduler._turn = 1
    assert scheduler.schedule() is None
    assert shape(scheduler.schedule()) == [(1, 0, 3, 1)]

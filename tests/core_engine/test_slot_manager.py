"""KV accounting per sequence: single rules, a state machine against a model of cells, and whole engines on top."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from suimon.core_engine.batch import CopySequence, FreeSequence, MoveSequence, TrimSequence
from suimon.core_engine.executor import PAGED, PER_SEQUENCE
from suimon.core_engine.sequence import Sequence
from suimon.core_engine.slot_manager import SlotManager, common_prefix


def run(slots: SlotManager, sequence: Sequence) -> Sequence:
    """As if all its tokens had been computed."""
    assert slots.allocate(sequence, sequence.num_tokens, shared=slots.find_prefix(sequence))
    sequence.num_computed_tokens = sequence.num_tokens
    return sequence


def end(slots: SlotManager, sequence: Sequence, reason: str = "stop") -> bool:
    sequence.finish_reason = reason
    return slots.finish(sequence)


def counts(slots: SlotManager) -> tuple[int, int, int]:
    return slots.num_free, slots.num_used, slots.num_cached


def test_cells_are_free_then_used_then_cached(build: ModuleType) -> None:
    slots = SlotManager(12, 4)
    assert counts(slots) == (12, 0, 0)
    sequence = run(slots, build.make_sequence(5))
    assert counts(slots) == (7, 5, 0)
    assert end(slots, sequence)
    assert counts(slots) == (7, 0, 5)
    slots.check_integrity()
    assert slots.take_cache_ops() == [], "nothing to do: its KV stays where it is"


def test_allocation_is_all_or_nothing(build: ModuleType) -> None:
    slots = SlotManager(10, 4)
    sequence = build.make_sequence(20)
    assert slots.shortfall(sequence, 11) == 1
    assert not slots.allocate(sequence, 11)
    assert counts(slots) == (10, 0, 0)
    assert not slots.allocate(sequence, 8, keep_available=3)
    assert slots.allocate(sequence, 8, keep_available=2)
    assert slots.allocate(sequence, 3), "already covered"
    assert counts(slots) == (2, 8, 0)


@pytest.mark.parametrize("is_over", [False, True])
def test_the_longest_beginning_of_a_resident_sequence_is_copied(build: ModuleType, is_over: bool) -> None:
    slots = SlotManager(64, 4)
    run(slots, build.make_sequence([1, 9], 1))
    source = run(slots, build.make_sequence([1, 2, 3, 4, 5], 2))
    if is_over:
        end(slots, source)
    follower = build.make_sequence([1, 2, 3, 4, 8, 8], 3)
    prefix = slots.find_prefix(follower)
    assert len(prefix) == 4
    assert slots.shortfall(follower, 6, prefix) == 2 - (64 - 6) - is_over  # the one cell that is kept and not copied
    assert slots.allocate(follower, 6, shared=prefix)
    assert slots.take_cache_ops() == [CopySequence(1, 2, 1), CopySequence(2, 3, 4)]
    assert counts(slots) == ((64 - 8, 2 + 5, 1) if is_over else (64 - 8, 8, 0))
    slots.check_integrity()


def test_one_token_is_always_left_to_compute(build: ModuleType) -> None:
    slots = SlotManager(64, 4)
    run(slots, build.make_sequence([1, 2, 3], 1))
    assert len(slots.find_prefix(build.make_sequence([1, 2, 3], 2))) == 2
    assert slots.find_prefix(build.make_sequence([1], 3)) == []


def test_only_what_is_computed_is_copied(build: ModuleType) -> None:
    slots = SlotManager(64, 4)
    source = build.make_sequence([1, 2, 3, 4, 5], 1)
    slots.allocate(source, 5)
    follower = build.make_sequence([1, 2, 3, 4, 5, 6], 2)
    assert slots.find_prefix(follower) == []
    source.num_computed_tokens = 3
    assert len(slots.find_prefix(follower)) == 3


def test_salt_and_adapter_keep_sequences_apart(build: ModuleType) -> None:
    slots = SlotManager(64, 8)
    run(slots, build.make_sequence([1, 2, 3], 1, cache_salt="a", adapter_hash="x"))
    for salt, adapter in ((None, None), ("a", None), (None, "x"), ("x", "a")):
        assert slots.find_prefix(build.make_sequence([1, 2, 3, 4], 2, cache_salt=salt, adapter_hash=adapter)) == []
    assert len(slots.find_prefix(build.make_sequence([1, 2, 3, 4], 3, cache_salt="a", adapter_hash="x"))) == 3


def test_the_least_recently_used_of_the_kept_goes_first(build: ModuleType) -> None:
    slots = SlotManager(12, 8)
    for seq_id in (1, 2, 3):
        end(slots, run(slots, build.make_sequence([seq_id] * 4, seq_id)))
    assert counts(slots) == (0, 0, 12)
    user = build.make_sequence([1, 1, 1, 7], 4)  # makes use of the oldest
    assert slots.allocate(user, 4, shared=slots.find_prefix(user))
    assert slots.take_cache_ops() == [CopySequence(1, 4, 3), FreeSequence(2)]
    assert slots.allocate(build.make_sequence([9] * 6, 5), 6)
    assert slots.take_cache_ops() == [FreeSequence(3)]
    assert slots.allocate(build.make_sequence([8], 6), 1) and not slots.allocate(build.make_sequence([8], 7), 4)
    slots.check_integrity()


def test_there_are_never_more_residents_than_seats(build: ModuleType) -> None:
    slots = SlotManager(100, 2)
    end(slots, run(slots, build.make_sequence([1, 2, 3], 1)))
    run(slots, build.make_sequence([5], 2))
    run(slots, build.make_sequence([1, 2, 4], 3))
    assert slots.take_cache_ops() == [MoveSequence(1, 3, 2)], "the only seat to be had is the source's"
    assert counts(slots) == (100 - 4, 4, 0)
    slots.check_integrity()


def test_a_copy_drives_out_who_is_not_its_source(build: ModuleType) -> None:
    slots = SlotManager(100, 3)
    for seq_id in (1, 2):
        end(slots, run(slots, build.make_sequence([seq_id, 2, 3], seq_id)))
    run(slots, build.make_sequence([5], 3))
    run(slots, build.make_sequence([1, 2, 4], 4))
    assert slots.take_cache_ops() == [FreeSequence(2), CopySequence(1, 4, 2)]
    slots.check_integrity()


def test_whoever_goes_on_with_all_of_an_ended_sequence_takes_its_seat(build: ModuleType) -> None:
    slots = SlotManager(100, 8)
    end(slots, run(slots, build.make_sequence([1, 2, 3], 1)))
    run(slots, build.make_sequence([1, 2, 3, 4], 2))
    assert slots.take_cache_ops() == [MoveSequence(1, 2, 3)]
    assert counts(slots) == (96, 4, 0)
    run(slots, build.make_sequence([1, 2, 3, 5], 3))
    assert slots.take_cache_ops() == [CopySequence(2, 3, 3)], "the other runs"
    slots.check_integrity()


def test_beginnings_that_are_too_short_are_not_worth_a_copy(build: ModuleType) -> None:
    slots = SlotManager(100, 8, min_shared=3)
    run(slots, build.make_sequence([1, 2, 3, 4], 1))
    assert slots.find_prefix(build.make_sequence([1, 2, 9], 2)) == []
    assert len(slots.find_prefix(build.make_sequence([1, 2, 3, 9], 2))) == 3


def test_no_more_is_kept_than_allowed(build: ModuleType) -> None:
    slots = SlotManager(100, 8, max_kept_tokens=5)
    first, second = (run(slots, build.make_sequence([seq_id] * 3, seq_id)) for seq_id in (1, 2))
    assert end(slots, first) and end(slots, second)
    assert slots.take_cache_ops() == [FreeSequence(1)]
    assert end(slots, run(slots, build.make_sequence([3] * 6, 3))), "the last one may be longer"
    assert slots.take_cache_ops() == [FreeSequence(2)]
    slots.check_integrity()


def test_what_is_not_known_to_be_computed_is_not_kept(build: ModuleType) -> None:
    slots = SlotManager(100, 8)
    sequence = build.make_sequence([1, 2, 3, 4], 1)
    slots.allocate(sequence, 4)
    sequence.num_computed_tokens = 3
    assert end(slots, sequence, "abort")
    assert slots.take_cache_ops() == [TrimSequence(1, 3)]
    assert counts(slots) == (97, 0, 3)
    failed = run(slots, build.make_sequence([6, 6], 2))
    failed.error = "it broke"
    assert not end(slots, failed, "error")
    assert counts(slots) == (97, 0, 3)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"can_fork": False}, {"max_kept_tokens": 0}])
def test_nothing_is_kept_or_found_where_that_is_off(build: ModuleType, options: dict[str, Any]) -> None:
    slots = SlotManager(100, 8, **options)
    first = run(slots, build.make_sequence([1, 2, 3], 1))
    assert bool(slots.find_prefix(build.make_sequence([1, 2, 3, 4], 2))) == ("max_kept_tokens" in options)
    assert not end(slots, first)
    assert slots.find_prefix(build.make_sequence([1, 2, 3, 4], 2)) == []
    assert counts(slots) == (100, 0, 0)


def test_reclaimable_cells_are_those_nobody_else_runs_on(build: ModuleType) -> None:
    slots = SlotManager(100, 8)
    first = run(slots, build.make_sequence([1, 2, 3], 1))
    second = run(slots, build.make_sequence([1, 2, 3, 4], 2))
    assert slots.num_reclaimable([first]) == 0  # its last token was found by the second, as all others
    assert slots.num_reclaimable([second]) == 1
    assert slots.num_reclaimable([first, second]) == 4


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_common_prefix_is_the_first_difference(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(left, right) == expected


class SlotMachine(RuleBasedStateMachine):
    """``llama`` is what the engine would hold if it did what it is told: seq_id -> tokens. Beginnings that two hold are
    held once, and the pool must have room for all that is held, counted token by token."""

    POOL, SEATS, KEPT = 24, 4, 10

    def __init__(self, build: ModuleType) -> None:
        super().__init__()
        self.build = build
        self.slots = SlotManager(self.POOL, self.SEATS, max_kept_tokens=self.KEPT)
        self.running: dict[int, Sequence] = {}
        self.llama: dict[int, list[int]] = {}
        self.next_id = 0

    def execute(self) -> None:
        for operation in self.slots.take_cache_ops():
            match operation:
                case CopySequence(source, target, length):
                    assert target not in self.llama and len(self.llama[source]) >= length
                    self.llama[target] = self.llama[source][:length]
                case MoveSequence(source, target, length):
                    assert target not in self.llama and len(self.llama[source]) >= length
                    self.llama[target] = self.llama.pop(source)[:length]
                case TrimSequence(seq_id, length):
                    del self.llama[seq_id][length:]
                case FreeSequence(seq_id):
                    del self.llama[seq_id]
            assert len(self.llama) <= self.SEATS

    @precondition(lambda self: len(self.running) < self.SEATS)
    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=9), salt=st.sampled_from([None, None, "s"]))
    def start(self, tokens: list[int], salt: str | None) -> None:
        self.next_id += 1
        sequence = self.build.make_sequence(tokens, self.next_id, cache_salt=salt)
        prefix = self.slots.find_prefix(sequence)
        fits = self.slots.shortfall(sequence, len(tokens), prefix) <= 0
        assert self.slots.allocate(sequence, len(tokens), shared=prefix) is fits
        if not fits:
            return
        self.running[sequence.seq_id] = sequence
        self.execute()
        held = self.llama.setdefault(sequence.seq_id, [])
        assert held == tokens[: len(prefix)], "the copy is the sequence's own beginning"
        held.extend(tokens[len(prefix) :])
        sequence.num_computed_tokens = len(tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(1, 2))
    def decode(self, data: st.DataObject, token: int) -> None:
        sequence = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if self.slots.allocate(sequence, sequence.num_tokens + 1):
            self.execute()
            sequence.output_token_ids.append(token)
            self.llama[sequence.seq_id].append(token)
            sequence.num_computed_tokens += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "error", "preempted", "abort in flight"]))
    def leave(self, data: st.DataObject, reason: str) -> None:
        sequence = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        expected = self.slots.num_reclaimable([sequence])
        available = self.slots.num_free + self.slots.num_cached
        sequence.error = "broken" if reason == "error" else None
        if reason == "abort in flight":
            sequence.num_computed_tokens -= 1
        is_kept = False if reason == "preempted" else self.slots.finish(sequence)
        if reason == "preempted":
            self.slots.free(sequence)
        self.execute()
        if not is_kept:
            self.llama.pop(sequence.seq_id, None)
        assert self.slots.num_free + self.slots.num_cached == available + expected

    @invariant()
    def the_accounts_add_up(self) -> None:
        self.slots.check_integrity()
        assert set(self.running) <= set(self.llama)
        assert self.slots.num_residents == len(self.llama)
        assert len(self._beginnings(self.llama.values())) <= self.POOL - self.slots.num_free

    @staticmethod
    def _beginnings(held: Any) -> set[tuple[int, ...]]:
        return {tuple(tokens[: i + 1]) for tokens in held for i in range(len(tokens))}


def test_any_life_of_the_pool(build: ModuleType) -> None:
    limits = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: SlotMachine(build), settings=limits)


# --- under the scheduler: an engine that keeps KV per sequence gives what a sequence gives alone ----------------------


def make_engine(build: ModuleType, num_tokens: int, *, seats: int = 12, **config: Any) -> Any:
    capabilities = build.make_capabilities(
        num_blocks=num_tokens, block_size=1, kv_kind=PER_SEQUENCE, max_residents=seats, max_num_seqs=8
    )
    return build.make_engine(build.ContiguousExecutor(capabilities, num_tokens), **config)


def test_the_kind_of_kv_chooses_the_manager(build: ModuleType) -> None:
    assert isinstance(make_engine(build, 64).scheduler.blocks, SlotManager)
    assert not isinstance(build.make_engine(num_blocks=8, kv_kind=PAGED).scheduler.blocks, SlotManager)


@pytest.mark.parametrize("num_tokens", [64, 600])
@pytest.mark.parametrize("caching", [True, False])
def test_a_crowd_gives_what_each_gives_alone(build: ModuleType, num_tokens: int, caching: bool) -> None:
    engine = make_engine(build, num_tokens, enable_prefix_caching=caching, max_num_batched_tokens=16)
    prompts = [build.make_prompt(length) + [length % 7 + 1] * 3 for length in (9, 20, 3, 25, 14, 25, 1, 18)]
    params = build.make_params(max_tokens=30)
    answers = build.run_together(engine, prompts, params)
    alone = [build.run_solo(prompt, params, num_tokens).token_ids for prompt in prompts]
    assert answers == alone
    assert (engine.scheduler.num_preemptions > 0) == (num_tokens == 64)
    assert (engine.scheduler.prefix_hits > 0) == caching


def test_choices_are_copies_of_the_first(build: ModuleType) -> None:
    engine = make_engine(build, 200)
    prompt, params = build.make_prompt(30), build.make_params(n=3, temperature=1.0, max_tokens=12)
    engine.add_request("r", prompt, params)
    siblings = {s.index: s.seed for s in engine.scheduler.sequences.values()}
    results = build.run_to_end(engine)
    for index, seed in siblings.items():
        solo = build.run_solo(prompt, params, 200, seed=seed)
        assert results["r", index].token_ids == solo.token_ids
    computed = sum(batch.num_tokens for batch in engine.executor.batches)
    assert computed <= 30 + 2 + 3 * 12, "the prompt is computed once"


def test_an_executor_without_room_makes_the_scheduler_preempt(build: ModuleType) -> None:
    engine = make_engine(build, 200, enable_prefix_caching=False)
    engine.executor.num_cells = 50  # it has less than it said
    prompts = [build.make_prompt(length, first=length) for length in (20, 21, 22)]
    params = build.make_params(max_tokens=9)
    answers = build.run_together(engine, prompts, params)
    assert answers == [build.run_solo(prompt, params, 200).token_ids for prompt in prompts]
    assert engine.scheduler.num_preemptions > 0


def test_what_is_only_kept_gives_way_to_a_sequence_without_room(build: ModuleType) -> None:
    engine = make_engine(build, 200)
    engine.executor.num_cells = 50  # it has less than it said
    params = build.make_params(max_tokens=6)
    for first in (1, 2, 3):
        prompt = build.make_prompt(30, first=first)
        (answer,) = build.run_together(engine, [prompt], params)
        assert answer == build.run_solo(prompt, params, 200).token_ids


def test_a_sequence_whose_end_cannot_be_cut_off_is_computed_again(build: ModuleType) -> None:
    engine = make_engine(build, 200, propose=build.guess_drafts)
    engine.executor.loses_ends = True
    prompt, params = build.make_prompt(20), build.make_params(max_tokens=30)
    assert build.run_together(engine, [prompt], params) == [build.run_solo(prompt, params, 200).token_ids]
    assert engine.scheduler.num_preemptions > 0


def test_nobody_begins_with_a_kept_sequence_that_the_executor_has_lost(build: ModuleType) -> None:
    engine = make_engine(build, 200)
    prompt, params = build.make_prompt(20), build.make_params(max_tokens=6)
    build.run_together(engine, [prompt], params)
    engine.scheduler.blocks._cache_ops.append(TrimSequence(1, 24))
    engine.executor.loses_ends = True
    for last in (1, 2, 3):
        engine.add_request(f"n{last}", [*prompt, last], params)
    results = build.run_to_end(engine)
    for last in (1, 2, 3):
        assert results[f"n{last}", 0].token_ids == build.run_solo([*prompt, last], params, 200).token_ids


def test_a_failed_step_leaves_nothing_that_others_would_copy(build: ModuleType) -> None:
    engine = make_engine(build, 200)
    prompt, params = build.make_prompt(30), build.make_params(max_tokens=6)
    engine.add_request("good", prompt, params)
    build.run_to_end(engine)
    engine.add_request("bad", [*prompt, 5], params)
    engine.executor.fail_next = True
    results = build.run_to_end(engine)
    assert results["bad", 0].finish_reason == "error"
    answers = build.run_together(engine, [[*prompt, 5], [*prompt, 6]], params)
    assert answers == [build.run_solo([*prompt, last], params, 200).token_ids for last in (5, 6)]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_crowds(build: ModuleType, data: st.DataObject) -> None:
    num_tokens = data.draw(st.sampled_from([40, 56, 90, 300]))
    engine = make_engine(
        build,
        num_tokens,
        seats=data.draw(st.sampled_from([9, 12])),
        max_num_batched_tokens=data.draw(st.sampled_from([3, 16, 64])),
        scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])),
        propose=data.draw(st.sampled_from([None, build.guess_drafts])),
    )
    engine.executor.loses_ends = data.draw(st.booleans())
    expected, results = {}, {}
    for number in range(data.draw(st.integers(1, 12))):
        prompt = build.make_prompt(data.draw(st.integers(1, 24))) + [7] * data.draw(st.integers(0, 3))
        params = build.make_params(max_tokens=data.draw(st.integers(1, 10)), n=data.draw(st.sampled_from([1, 1, 2])))
        engine.add_request(f"r{number}", prompt, params, priority=data.draw(st.integers(0, 1)))
        expected[f"r{number}"] = build.run_solo(prompt, params, num_tokens).token_ids
        for _ in range(data.draw(st.integers(0, 4))):
            build.collect(results, engine.step())
        if data.draw(st.integers(0, 5)) == 0:
            engine.abort(f"r{number}")
            del expected[f"r{number}"]
    build.run_to_end(engine, results)
    for (name, _), got in results.items():
        assert name not in expected or got.token_ids == expected[name]
    assert set(expected) <= {name for name, _ in results}


def test_a_failed_step_forgets_whose_seat_it_was_to_hand_over(build: ModuleType) -> None:
    engine = make_engine(build, 64)
    prompt, params = build.make_prompt(8), build.make_params(max_tokens=2)
    engine.add_request("first", prompt, params)
    (first,) = build.run_to_end(engine).values()
    engine.add_request("second", [*prompt, *first.token_ids, 5], params)
    submit = engine.executor.submit

    def fail(batch: Any, sampling: Any) -> Any:
        assert [type(op) for op in batch.cache_ops] == [MoveSequence]
        engine.executor.submit = submit
        raise RuntimeError("the device is gone")

    engine.executor.submit = fail
    (second,) = build.run_to_end(engine).values()
    assert second.finish_reason == "error"
    engine.add_request("third", build.make_prompt(5), params)
    build.run_to_end(engine)
    assert set(engine.executor.cells) == {3} and not engine.executor.violations

"""A sequence's counts and slices."""

from __future__ import annotations

from types import ModuleType

from suimon.core_engine.sequence import Status


def test_tokens_are_the_slice_of_prompt_and_outputs(build: ModuleType) -> None:
    sequence = build.make_sequence([1, 2, 3, 4])
    sequence.output_token_ids += [5, 6, 7]
    joined = [1, 2, 3, 4, 5, 6, 7]
    for start in range(8):
        for end in range(start, 8):
            assert sequence.tokens(start, end) == joined[start:end]


def test_counts_follow_from_a_few_integers(build: ModuleType) -> None:
    sequence = build.make_sequence(10)
    assert (sequence.num_tokens, sequence.num_to_schedule, sequence.is_prompt_computed) == (10, 10, False)
    sequence.num_computed_tokens, sequence.num_in_flight = 6, 4
    assert (sequence.num_scheduled_tokens, sequence.num_to_schedule, sequence.is_prompt_computed) == (10, 0, False)
    sequence.num_computed_tokens, sequence.num_in_flight = 10, 0
    sequence.output_token_ids.append(3)
    assert (sequence.num_tokens, sequence.num_output_tokens, sequence.num_to_schedule) == (11, 1, 1)
    assert sequence.is_prompt_computed


def test_drafts_in_flight_leave_nothing_to_schedule(build: ModuleType) -> None:
    sequence = build.make_sequence(10)
    sequence.num_computed_tokens, sequence.num_in_flight = 9, 1 + 3
    assert sequence.num_to_schedule == -3
    sequence.draft_token_ids = [1, 2]
    assert sequence.num_tokens == 10


def test_a_new_sequence_waits_and_is_not_ended(build: ModuleType) -> None:
    sequence = build.make_sequence(3, params=build.make_params(stop_token_ids=(5, 7)), arrival=2.5, priority=-1)
    assert sequence.status is Status.WAITING and not sequence.is_ended
    assert sequence.stop_token_ids == {5, 7}
    assert (sequence.arrival, sequence.priority) == (2.5, -1)
    sequence.finish_reason = "abort"
    assert sequence.is_ended


def test_its_name_in_logs_does_not_spell_the_tokens(build: ModuleType) -> None:
    sequence = build.make_sequence([27, 28, 26], 4)
    assert repr(sequence) == "<sequence 4: r4/0, 0 of 3+0 tokens computed, waiting>"

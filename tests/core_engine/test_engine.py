"""The engine over executors whose tokens depend on the KV really written: whatever happens, as if alone."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from suimon.core_engine.batch import FreeSequence, MoveSequence, ScheduledBatch, ScheduledSequence, TrimSequence
from suimon.core_engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from suimon.core_engine.executor import ExecutorDeadError, LostSequencesError, OutOfSlotsError

BUDGETS = (1, 15, 16, 17, 64, None)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_and_logprobs_do_not_depend_on_budget_and_cache(build: ModuleType, budget: int, caching: bool) -> None:
    # B49: a 50-token prompt in chunks; the first tokens come only after all of it.
    prompts = [build.make_prompt(50), build.make_prompt(50, first=3), build.make_prompt(33), build.make_prompt(50)]
    engine = build.make_engine(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    params = build.make_params(max_tokens=20)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params)
    results = build.run_to_end(engine)
    for i, prompt in enumerate(prompts):
        solo = build.run_solo(prompt, params, 512)
        assert results[f"r{i}", 0].token_ids == solo.token_ids
        assert results[f"r{i}", 0].logprobs == solo.logprobs


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_tiny_pool_under_pressure_gives_the_tokens_of_solo_runs(build: ModuleType, depth: int, policy: str) -> None:
    # F4: 8 blocks of 16 tokens, two seats, a budget of 16: everything is preempted now and then.
    engine = build.make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=16, scheduling_policy=policy)
    params = build.make_params(max_tokens=50)
    prompts = [build.make_prompt(length, first=length) for length in (20, 33, 48, 5, 70)]
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params, priority=-i)
    results = build.run_to_end(engine, depth=depth)
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        assert results[f"r{i}", 0].token_ids == build.run_solo(prompt, params, 128).token_ids


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_nothing_but_the_number_of_steps(build: ModuleType, caching: bool, depth: int) -> None:
    params = build.make_params(max_tokens=30, ignore_eos=False)
    prompts = [build.make_prompt(length, first=length) for length in (3, 16, 31, 40)]
    steps = []
    for propose in (None, build.guess_drafts):
        engine = build.make_engine(propose=propose, block_size=4, enable_prefix_caching=caching)
        for i, prompt in enumerate(prompts):
            engine.add_request(f"r{i}", prompt, params)
        results = build.run_to_end(engine, depth=depth)
        for i, prompt in enumerate(prompts):
            solo = build.run_solo(prompt, params, 512)
            assert (results[f"r{i}", 0].token_ids, results[f"r{i}", 0].logprobs) == (solo.token_ids, solo.logprobs)
        steps.append(engine.stats().steps)
    assert steps[1] < steps[0] * 0.7


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize(("budget", "num_blocks"), [(None, 64), (16, 64), (16, 6)])
def test_choices_are_the_solo_runs_of_their_seeds(
    build: ModuleType, n: int, budget: int | None, num_blocks: int
) -> None:
    engine = build.make_engine(num_blocks=num_blocks, max_num_batched_tokens=budget)
    params = build.make_params(n=n, seed=11, temperature=1.0, max_tokens=20)
    prompt = build.make_prompt(37)
    engine.add_request("r", prompt, params)
    seeds = {s.index: s.seed for s in engine.scheduler.sequences.values()}
    results = build.run_to_end(engine)
    tokens = [results["r", index].token_ids for index in range(n)]
    assert tokens == [build.run_solo(prompt, params, 512, seed=seeds[index]).token_ids for index in range(n)]
    assert seeds[0] == 11 and len(set(map(tuple, tokens))) == n


def test_choices_compute_the_prompt_once(build: ModuleType) -> None:
    engine = build.make_engine(enable_prefix_caching=False)
    engine.add_request("r", build.make_prompt(40), build.make_params(n=4, max_tokens=4))
    build.run_to_end(engine)
    computed = sum(batch.num_tokens for batch in engine.executor.batches)
    assert computed == 40 + 3 * 4 + 3  # the leader's prompt, three more tokens each, and a prompt token per sibling


def test_seeds_do_not_depend_on_the_batch_and_unseeded_requests_differ(build: ModuleType) -> None:
    prompt = build.make_prompt(20)
    seeded = build.make_params(temperature=1.0, seed=5, max_tokens=12)
    unseeded = build.make_params(temperature=1.0, max_tokens=12)
    engine = build.make_engine()
    for name, params in [("a", unseeded), ("b", seeded), ("c", unseeded), ("d", seeded)]:
        engine.add_request(name, prompt, params)
    tokens = {name: entry.token_ids for (name, _), entry in build.run_to_end(engine).items()}
    assert tokens["b"] == tokens["d"] == build.run_solo(prompt, seeded, 512, seed=5).token_ids
    assert tokens["a"] != tokens["c"]


def test_sibling_seeds_do_not_overlap_with_neighbouring_seeds(build: ModuleType) -> None:
    engine = build.make_engine()
    for seed in range(8):
        engine.add_request(f"r{seed}", [1], build.make_params(n=8, seed=seed))
    seeds = [s.seed for s in engine.scheduler.sequences.values()]
    assert len(set(seeds)) == 64 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("drafts", [False, True])
def test_with_the_real_sampler_behind_the_base_executor(build: ModuleType, drafts: bool) -> None:
    executor = build.LogitsExecutor(build.make_capabilities(num_blocks=12, max_num_seqs=4))
    engine = build.make_engine(executor, build.guess_drafts if drafts else None, max_num_batched_tokens=17)
    params = build.make_params(max_tokens=25, logprobs=2, ignore_eos=False)
    prompts = [build.make_prompt(length, first=length) for length in (40, 33, 16, 7, 20)]
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params)
    results = build.run_to_end(engine)
    for i, prompt in enumerate(prompts):
        result = results[f"r{i}", 0]
        assert result.token_ids == build.run_solo(prompt, params, 512).token_ids
        assert len(result.logprobs) == len(result.token_ids) and max(result.logprobs) < 0
        assert all(len(entry.top) == 2 for output in result.outputs for entry in output.logprobs)


# --- rows of the list of known bugs ---


@pytest.mark.parametrize(("length", "max_tokens"), [(32, 1), (33, 1), (8, 25), (32, None)])
def test_what_cannot_fit_the_context_is_refused(build: ModuleType, length: int, max_tokens: int | None) -> None:
    # B40, B41, B42
    engine = build.make_engine(max_model_len=32)
    with pytest.raises(ContextLengthError, match=rf"\b32\b.*\b{length}\b.*\b{max_tokens or 1}\b"):
        engine.add_request("r", build.make_prompt(length), build.make_params(max_tokens=max_tokens))
    assert not engine.has_work
    engine.add_request("r", build.make_prompt(31), build.make_params(max_tokens=1))
    result = build.run_to_end(engine)["r", 0]
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


@pytest.mark.parametrize("num_blocks", [64, 2])
def test_without_max_tokens_it_ends_at_the_context_limit(build: ModuleType, num_blocks: int) -> None:
    # B42: ignore_eos and no limit; also when the KV cache is the smaller limit.
    engine = build.make_engine(max_model_len=48, num_blocks=num_blocks)
    engine.add_request("r", build.make_prompt(10), build.make_params(max_tokens=None))
    result = build.run_to_end(engine)["r", 0]
    assert (len(result.token_ids), result.finish_reason) == (min(48, num_blocks * 16) - 10, "length")


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 2, 3]))[::5])
@pytest.mark.parametrize("steps_between", [0, 1, 3])
def test_priorities_in_a_tiny_pool_arriving_in_any_order(
    build: ModuleType, order: tuple[int, ...], steps_between: int
) -> None:
    # B44
    engine = build.make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=16, scheduling_policy="priority")
    priorities = [0, 0, -1, 5]
    params = build.make_params(max_tokens=40)
    results: dict[tuple[str, int], object] = {}
    for i in order:
        engine.add_request(f"r{i}", build.make_prompt(30, first=i), params, priority=priorities[i])
        for _ in range(steps_between):
            build.collect(results, engine.step())
    build.run_to_end(engine, results)
    assert engine.stats().finished == {"length": 4}
    for i in range(4):
        assert results[f"r{i}", 0].token_ids == build.run_solo(build.make_prompt(30, first=i), params, 512).token_ids


def test_full_cache_hits_at_a_block_edge(build: ModuleType) -> None:
    # B46
    engine = build.make_engine()
    params = build.make_params(max_tokens=10)
    base = build.make_prompt(32)
    extended = [*base, *build.make_prompt(20, first=9)]
    cached = []
    for i, prompt in enumerate([base, base, extended, extended]):
        engine.add_request(f"r{i}", prompt, params)
        result = build.run_to_end(engine)[f"r{i}", 0]
        assert result.token_ids == build.run_solo(prompt, params, 512).token_ids
        cached.append(result.last.num_cached_tokens)
        assert result.last.num_cached_tokens < result.last.num_prompt_tokens == len(prompt)
    assert cached == [0, 16, 32, 48]
    assert engine.stats().prefix_cache_hits == sum(cached)


def test_adapters_and_salts_never_share_what_they_computed(build: ModuleType) -> None:
    # B48: each equals its own cold run; "A" is reloaded with other weights; a salt is spelled like an adapter.
    engine = build.make_engine(adapters_per_batch=4)
    params = build.make_params(max_tokens=6)
    prompt = build.make_prompt(40)
    cases = [
        ("A", "w1", None),
        ("B", "w2", None),
        (None, None, None),
        ("A", "w3", None),
        (None, None, "A"),
        (None, None, "w1"),
    ]
    for repetition in range(2):
        for i, (adapter, weights, salt) in enumerate(cases):
            name = f"r{repetition}-{i}"
            engine.add_request(name, prompt, params, adapter=adapter, adapter_hash=weights, cache_salt=salt)
            result = build.run_to_end(engine)[name, 0]
            assert result.token_ids == build.run_solo(prompt, params, 512, adapter=adapter).token_ids
            assert result.last.num_cached_tokens == (32 if repetition else 0)


def test_an_adapter_without_a_content_hash_is_refused(build: ModuleType) -> None:
    with pytest.raises(InvalidRequestError, match="adapter 'A' comes without the hash"):
        build.make_engine().add_request("r", [1], build.make_params(), adapter="A")


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_tokens_before_the_whole_prompt_is_computed(build: ModuleType, budget: int | None) -> None:
    # B49
    engine = build.make_engine(max_num_batched_tokens=budget)
    engine.add_request("r", build.make_prompt(50), build.make_params(max_tokens=3))
    empty = -(-50 // (budget or 2048)) - 1
    assert [engine.step() for _ in range(empty)] == [[]] * empty
    assert [len(output.token_ids) for output in engine.step()] == [1]


def test_leaving_at_any_moment_leaks_nothing(build: ModuleType) -> None:
    # B50, B65: abort before the first step, between chunks, at the first token, later, and twice.
    for steps in range(8):
        engine = build.make_engine(max_num_batched_tokens=16, enable_prefix_caching=False, max_num_seqs=1)
        engine.add_request("r", build.make_prompt(50), build.make_params(max_tokens=100, n=2))
        engine.add_request("waiting", build.make_prompt(20), build.make_params())
        for _ in range(steps):
            engine.step()
        assert engine.abort("r") and not engine.abort("r")
        assert engine.abort("waiting") and not engine.has_work
        build.assert_idle(engine)
        stats = engine.stats()
        assert (stats.free_blocks, stats.aborted) == (64, 2)


@pytest.mark.parametrize("prompt_length", [1, 16, 50])
def test_finishing_inside_the_first_prefill_leaks_nothing(build: ModuleType, prompt_length: int) -> None:
    # B50
    engine = build.make_engine(enable_prefix_caching=False)
    engine.add_request("r", build.make_prompt(prompt_length), build.make_params(max_tokens=1))
    assert build.run_to_end(engine)["r", 0].finish_reason == "length"
    assert engine.stats().free_blocks == 64


@pytest.mark.parametrize("prompt", [[], [-1], [29], [1, 2, 10**12]])
def test_prompts_without_meaning_are_refused(build: ModuleType, prompt: list[int]) -> None:
    # B52
    engine = build.make_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("r", prompt, build.make_params())
    assert caught.value.param == "prompt" and not engine.has_work


def test_token_ids_outside_the_vocabulary_are_refused(build: ModuleType) -> None:
    # B29, B30
    engine = build.make_engine()
    for params in (build.make_params(stop_token_ids=(29,)), build.make_params(logit_bias={29: 1.0})):
        with pytest.raises(InvalidRequestError, match="0 to 28"):
            engine.add_request("r", [1], params)


def test_min_tokens_counts_new_tokens_only(build: ModuleType) -> None:
    # B28, B32: two kinds of end token, banned until 10 new tokens are out, after a prompt of 50.
    params = build.make_params(min_tokens=10, max_tokens=60, ignore_eos=False, stop_token_ids=tuple(range(1, 12)))
    engine = build.make_engine()
    for i in range(6):
        engine.add_request(f"r{i}", build.make_prompt(50, first=i), params)
    for result in build.run_to_end(engine).values():
        assert result.finish_reason == "stop"
        ends = [i for i, token_id in enumerate(result.token_ids) if token_id < 12]
        assert ends == [len(result.token_ids) - 1] and ends[0] >= 10


# --- a failing executor ---


@pytest.mark.parametrize("switch", ["fail_next", "fail_result_next"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_batch_ends_its_requests_and_not_the_loop(build: ModuleType, switch: str, depth: int) -> None:
    engine = build.make_engine()
    engine.add_request("bad", build.make_prompt(20), build.make_params())
    setattr(engine.executor, switch, True)
    results = build.run_to_end(engine, depth=depth)
    assert results["bad", 0].finish_reason == "error" and "RuntimeError" in results["bad", 0].last.error
    engine.add_request("good", build.make_prompt(20), build.make_params())
    solo = build.run_solo(build.make_prompt(20), build.make_params(), 512)
    assert build.run_to_end(engine)["good", 0].token_ids == solo.token_ids
    assert engine.stats().finished == {"error": 1, "length": 1}


def test_failures_in_a_row_end_the_engine(build: ModuleType) -> None:
    engine = build.make_engine()
    for i in range(3):
        engine.add_request(f"r{i}", [1, 2], build.make_params())
        engine.executor.fail_next = True
        if i < 2:
            engine.step()
    with pytest.raises(EngineDeadError, match=r"RuntimeError: out of luck \(3 steps in a row\)"):
        engine.step()
    assert engine.stats().finished == {"error": 2}


def test_a_success_in_between_starts_the_count_again(build: ModuleType) -> None:
    engine = build.make_engine()
    for i in range(8):
        engine.add_request(f"r{i}", [1, 2], build.make_params(max_tokens=1))
        engine.executor.fail_next = i % 2 == 0
        engine.step()
    assert engine.stats().finished == {"error": 4, "length": 4}


def test_a_sequence_that_never_finds_slots_ends_and_the_others_do_not(build: ModuleType) -> None:
    executor = build.ContiguousExecutor(build.make_capabilities(), num_cells=60)
    engine = build.make_engine(executor, enable_prefix_caching=False)
    params = build.make_params(max_tokens=12)
    prompts = [build.make_prompt(length, first=length) for length in (30, 20, 25, 70, 5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params)
    results = build.run_to_end(engine)
    assert results["r3", 0].finish_reason == "error" and "even alone" in results["r3", 0].last.error
    for i in (0, 1, 2, 4):
        assert results[f"r{i}", 0].token_ids == build.run_solo(prompts[i], params, 512).token_ids


def test_an_executor_without_overwriting_is_told_what_to_trim(build: ModuleType) -> None:
    executor = build.ContiguousExecutor(build.make_capabilities(num_blocks=8, max_num_seqs=3))
    engine = build.make_engine(executor, propose=build.guess_drafts, enable_prefix_caching=False)
    params = build.make_params(max_tokens=40)
    prompts = [build.make_prompt(length, first=length) for length in (30, 20, 25, 40)]
    tokens = build.run_together(engine, prompts, params)
    assert tokens == [build.run_solo(prompt, params, 128).token_ids for prompt in prompts]
    assert engine.stats().preemptions > 0
    engine.add_request("last", [1], build.make_params(max_tokens=1))
    build.run_to_end(engine)
    assert len(executor.cells) == 1, "everybody before the last is forgotten"


# --- the door, the gauges, the checks ---


def test_a_full_queue_is_refused_with_a_time_to_come_back(build: ModuleType) -> None:
    engine = build.make_engine(max_num_queued_requests=2)
    for name in "ab":
        engine.add_request(name, [1], build.make_params(max_tokens=2))
    with pytest.raises(QueueFullError, match="2 sequences are waiting") as caught:
        engine.add_request("c", [1], build.make_params())
    assert caught.value.retry_after == 1.0
    with pytest.raises(ContextLengthError):  # coming back later would not help this one
        engine.add_request("d", [1], build.make_params(max_tokens=512))
    build.run_to_end(engine)
    for name in "cd":
        engine.add_request(name, [1], build.make_params())
    with pytest.raises(QueueFullError) as caught:
        engine.add_request("e", [1], build.make_params())
    assert 1.0 <= caught.value.retry_after <= 60.0


def test_request_fields_reach_every_choice(build: ModuleType) -> None:
    engine = build.make_engine()
    fields = {"tenant": "t", "priority": 3, "weight": 2.0, "deadline": 9.0, "cache_salt": "s"}
    fields["trace_context"] = {"traceparent": "00"}
    engine.add_request("r", [1], build.make_params(n=3), arrival=1.5, **fields)
    sequences = list(engine.scheduler.sequences.values())
    assert [s.index for s in sequences] == [0, 1, 2]
    for sequence in sequences:
        assert {name: getattr(sequence, name) for name in fields} == fields and sequence.arrival == 1.5


def test_stats_follow_a_request(build: ModuleType) -> None:
    engine = build.make_engine(max_num_seqs=1)
    for name in "ab":
        engine.add_request(name, build.make_prompt(20), build.make_params(max_tokens=3))
    before = engine.stats()
    assert (before.running, before.waiting, before.queued_tokens, before.prompt_tokens) == (0, 2, 40, 40)
    results: dict[tuple[str, int], object] = {}
    build.collect(results, engine.step())
    during = engine.stats()
    assert (during.running, during.waiting, during.queued_tokens, during.generation_tokens) == (1, 1, 20, 1)
    assert (during.used_blocks, during.free_blocks, during.leaked_blocks, during.steps) == (2, 62, 0, 1)
    build.run_to_end(engine, results)
    after = engine.stats()
    assert (after.cached_blocks, after.free_blocks, after.generation_tokens) == (1, 63, 6)


def test_a_leak_is_seen_by_the_gauge_and_by_the_check(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build.make_engine()
    engine.scheduler.blocks.allocate(build.make_sequence(20, seq_id=999), 20)
    assert engine.stats().leaked_blocks == 2
    engine.add_request("quiet", [1], build.make_params(max_tokens=1))
    engine.step()
    monkeypatch.setenv("SUIMON_CHECK_INVARIANTS", "1")
    engine.add_request("r", [1], build.make_params(max_tokens=1))
    with pytest.raises(AssertionError, match="2 KV blocks have leaked"):
        engine.step()


def test_the_executor_sets_the_limits(build: ModuleType) -> None:
    capabilities = build.make_capabilities(max_num_seqs=3, max_model_len=100, partial_trim=False, adapters_per_batch=2)
    engine = build.make_engine(build.HashExecutor(capabilities), max_num_seqs=50, max_model_len=4096)
    config = engine.scheduler.config
    assert (config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens) == (3, 100, 2048)
    assert (config.partial_trim, config.adapters_per_batch, config.policy) == (False, 2, "fcfs")
    engine = build.make_engine(build.HashExecutor(capabilities), max_num_seqs=2, max_model_len=64)
    assert (engine.scheduler.config.max_num_seqs, engine.scheduler.config.max_model_len) == (2, 64)


def test_an_idle_engine_steps_without_effect_and_closes_its_executor(build: ModuleType) -> None:
    engine = build.make_engine()
    assert engine.step() == [] and engine.step_overlapped() == [] and engine.stats().steps == 0
    engine.close()
    assert engine.executor.is_closed


def test_overlapping_keeps_two_batches_in_flight(build: ModuleType) -> None:
    engine = build.make_engine(max_num_batched_tokens=16)
    engine.add_request("r", build.make_prompt(50), build.make_params(max_tokens=2))
    engine.step_overlapped(2)
    assert len(engine.executor.batches) == 2
    engine.step_overlapped(2)
    assert len(engine.executor.batches) == 3
    build.run_to_end(engine, depth=2)


@pytest.mark.parametrize("named", [[7], [7, 99], [7, 8]])
def test_the_others_are_computed_when_some_have_no_slots(build: ModuleType, named: list[int]) -> None:
    executor = build.LogitsExecutor(build.make_capabilities())
    forward = executor.forward

    def crowded(batch: ScheduledBatch) -> torch.Tensor:
        if {s.seq_id for s in batch.sequences} & set(named):
            raise OutOfSlotsError(named)
        return forward(batch)

    executor.forward = crowded
    batch = ScheduledBatch(1, [ScheduledSequence(seq_id, [1], 0, [seq_id - 7], 0) for seq_id in (7, 8)])
    results = executor.submit(batch, []).result().sequences
    assert {seq_id for seq_id, result in results.items() if result.out_of_slots} == {7, 8} & set(named)
    assert set(results) == {7, 8}


def test_the_others_are_computed_when_some_have_lost_their_kv(build: ModuleType) -> None:
    executor = build.LogitsExecutor(build.make_capabilities())
    forward = executor.forward

    def forgetful(batch: ScheduledBatch) -> torch.Tensor:
        if batch.cache_ops:
            raise LostSequencesError([7, 99])
        return forward(batch)

    executor.forward = forgetful
    sequences = [ScheduledSequence(seq_id, [1], 0, [seq_id - 7], 0) for seq_id in (7, 8)]
    result = executor.submit(ScheduledBatch(1, sequences, [TrimSequence(7, 1)]), []).result()
    assert (set(result.sequences), result.lost) == ({7, 8}, {7, 99})
    executor.forward = lambda batch: forgetful(ScheduledBatch(1, [], [TrimSequence(7, 1)]))
    with pytest.raises(LostSequencesError):
        executor.submit(ScheduledBatch(2, sequences), [])


def test_the_sampler_forgets_whoever_is_gone(build: ModuleType) -> None:
    executor = build.LogitsExecutor(build.make_capabilities())
    engine = build.make_engine(executor)
    for name in ("first", "second"):
        engine.add_request(name, [1, 2], build.make_params(max_tokens=3, frequency_penalty=1.0, logprobs=None))
    build.run_to_end(engine)
    assert set(executor.sampler._counts) == {1, 2}
    sequences = [ScheduledSequence(9, [1], 2, [0], 0)]
    executor.submit(ScheduledBatch(99, sequences, [MoveSequence(1, 9, 2), FreeSequence(2)]), [])
    assert executor.sampler._counts == {}


def test_an_executor_that_cannot_go_on_ends_the_engine_at_once(build: ModuleType) -> None:
    engine = build.make_engine()

    def submit(*_: object) -> None:
        raise ExecutorDeadError("the device is gone")

    engine.executor.submit = submit
    engine.add_request("r", [1], build.make_params())
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.step()


def test_an_executor_that_refuses_nobody_in_particular_fails_and_is_not_asked_for_ever(build: ModuleType) -> None:
    executor = build.LogitsExecutor(build.make_capabilities())
    calls: list[int] = []

    def confused(batch: ScheduledBatch) -> torch.Tensor:
        calls.append(batch.step_id)
        raise OutOfSlotsError([99])

    executor.forward = confused
    with pytest.raises(OutOfSlotsError):
        executor.submit(ScheduledBatch(1, [ScheduledSequence(7, [1], 0, [0], 0)]), [])
    assert calls == [1]

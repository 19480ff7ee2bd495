"""A state machine over the engine: requests come, leave, fail and share; each that ends well ends as if alone.

The pool is tiny and the model reads what was really written, so a wrong block anywhere is a wrong token here.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

BUDGETS = st.sampled_from([1, 2, 15, 16, 17, 64, None])
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 17, 30, None]),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.none() | st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (3,), (4, 5)]),
        "min_tokens": st.sampled_from([0, 0, 1]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """``expected`` holds what each choice gives alone; what was aborted or hit by a fault needs only to be gone."""

    def __init__(self, build: ModuleType) -> None:
        super().__init__()
        self.build = build
        self.results: dict[tuple[str, int], Any] = {}
        self.expected: dict[tuple[str, int], Any] = {}
        self.aborted: set[str] = set()
        self.num_requests = 0
        self.num_faults = 0

    @initialize(
        budget=BUDGETS,
        pool=st.sampled_from([(8, 16), (8, 4), (16, 4), (24, 2), (64, 1), (64, 16)]),
        max_num_seqs=st.sampled_from([1, 2, 3, 8]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        drafts=st.booleans(),
        adapters=st.sampled_from([1, 2]),
    )
    def start(
        self,
        budget: int | None,
        pool: tuple[int, int],
        max_num_seqs: int,
        policy: str,
        caching: bool,
        drafts: bool,
        adapters: int,
    ) -> None:
        self.limit = min(pool[0] * pool[1], 90)
        self.engine = self.build.make_engine(
            propose=self.build.guess_drafts if drafts else None,
            num_blocks=pool[0],
            block_size=pool[1],
            adapters_per_batch=adapters,
            max_num_seqs=max_num_seqs,
            max_model_len=90,
            max_num_batched_tokens=budget,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
        )

    @rule(
        length=st.integers(1, 40),
        first=st.sampled_from([1, 1, 1, 2]),
        tail=st.integers(0, 6),
        priority=st.integers(-1, 2),
        params=PARAMS,
        adapter=st.sampled_from([None, None, "a", "b"]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(
        self,
        length: int,
        first: int,
        tail: int,
        priority: int,
        params: dict[str, Any],
        adapter: str | None,
        salt: str | None,
    ) -> None:
        # Prompts are mostly prefixes of each other, with tails that differ.
        prompt = [*self.build.make_prompt(length, first), *[7] * tail][: self.limit - 1]
        if params["max_tokens"] is not None:
            params["max_tokens"] = min(params["max_tokens"], self.limit - len(prompt))
        sampling = self.build.make_params(**params)
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.engine.add_request(
            name, prompt, sampling, priority=priority, adapter=adapter, adapter_hash=adapter, cache_salt=salt
        )
        for sequence in self.engine.scheduler.sequences.values():
            if sequence.request_id == name:
                solo = self.build.run_solo(prompt, sampling, self.limit, seed=sequence.seed, adapter=adapter)
                self.expected[name, sequence.index] = solo

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.build.collect(self.results, self.engine.step())

    @rule(depth=st.sampled_from([2, 3]), count=st.integers(1, 6))
    def step_overlapped(self, depth: int, count: int) -> None:
        for _ in range(count):
            self.build.collect(self.results, self.engine.step_overlapped(depth))

    @rule()
    def submit_only(self) -> None:
        if len(self.engine.executor.batches) % 3:
            self.build.collect(self.results, self.engine.submit())

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = f"r{data.draw(st.integers(0, self.num_requests - 1))}"
        if self.engine.abort(name):
            self.aborted.add(name)

    @precondition(lambda self: self.num_faults < 2)
    @rule(fault=st.sampled_from(["fail_next", "fail_result_next", "error_next", "full_next"]))
    def break_next(self, fault: str) -> None:
        self.num_faults += 1
        setattr(self.engine.executor, fault, True)

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.blocks.check_integrity()
        stats = self.engine.stats()
        assert stats.leaked_blocks == 0
        waiting = self.engine.scheduler.waiting
        assert stats.queued_tokens == sum(s.num_tokens for s in waiting)
        assert self.engine.executor.violations == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # No sequence waits for ever: every token, computed anew for each that may push it out, is a generous bound.
        bound = 100 + 20 * sum(40 + len(solo.token_ids) for solo in self.expected.values())
        self.build.run_to_end(self.engine, self.results, max_steps=bound)
        for (name, index), solo in self.expected.items():
            result = self.results.get((name, index))
            if name in self.aborted and (result is None or result.finish_reason is None):
                assert result is None or result.token_ids == solo.token_ids[: len(result.token_ids)]
                continue
            assert result is not None, f"{name}/{index} never answered"
            self.check(result, solo)

    def check(self, result: Any, solo: Any) -> None:
        if result.finish_reason == "error":
            assert self.num_faults, result.last.error
            assert result.token_ids == solo.token_ids[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.logprobs) == (solo.token_ids, solo.logprobs)
            assert (result.finish_reason, result.last.stop_reason) == (solo.finish_reason, solo.stop_reason)


def test_whatever_happens_the_tokens_are_those_of_solo_runs(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUIMON_CHECK_INVARIANTS", "1")
    options = settings(max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: EngineMachine(build), settings=options)

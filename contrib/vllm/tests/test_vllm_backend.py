"""The contract and the translation, against a stand-in that refuses what is not in contracts/vllm.yaml."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suimon_vllm.backend import VLLMBackend

from suimon.gateway.config import ModelSettings
from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    BackendUnavailable,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
)
from suimon.gateway.loopback import LoopbackServer
from suimon.gateway.testing import BackendContract


class TestVLLM(BackendContract):
    @pytest.fixture(scope="class")
    @staticmethod
    def make_backend(vllm: Any, checkpoint: Path) -> Callable[[], Backend]:
        return lambda: VLLMBackend(ModelSettings(model=str(checkpoint), served_model_name="v", backend="vllm"))

    def test_what_vllm_is_asked(self, loopback: LoopbackServer, backend: Any) -> None:
        """Ids, our defaults instead of vLLM's, DELTA outputs, the trace; nothing that it does not know."""
        sampling = SamplingParams(temperature=0.5, top_k=4, stop_token_ids=(5,), logit_bias={7: 1.0}, seed=3)
        request = GenerateRequest(
            request_id="asked", model="v", prompt=(1, 2), sampling=sampling, cache_salt="s", trace_context={"a": "b"}
        )
        answer = self.ask(loopback, request)
        prompt, params, how = backend._engine.asked[-1]
        assert prompt == {"prompt_token_ids": [1, 2], "cache_salt": "s"}
        assert how == {"priority": 0, "trace_headers": {"a": "b"}}
        assert (params.temperature, params.top_k, params.stop_token_ids, params.seed) == (0.5, 4, [5], 3)
        assert (params.logit_bias, params.max_tokens, params.output_kind.name) == ({7: 1.0}, 254, "DELTA")
        assert answer.usage is not None and answer.usage.prompt_tokens == 2

    def test_logprobs_are_vllms(self, loopback: LoopbackServer, backend: Backend) -> None:
        answer = self.ask(loopback, self.request(backend, logprobs=2))
        entries = [entry for delta in answer.deltas for entry in delta.logprobs or ()]
        assert [entry.chosen.logprob for entry in entries] == [
            -0.125 * (token_id % 7 + 1) for delta in answer.deltas for token_id in delta.token_ids
        ]
        assert all(len(entry.top) == 2 and entry.chosen.bytes is not None for entry in entries)

    def test_leaving_aborts(self, loopback: LoopbackServer, backend: Any) -> None:
        request = self.request(backend, max_tokens=64)

        async def leave() -> None:
            deltas = backend.generate(request)
            await anext(deltas)
            await deltas.aclose()

        loopback.call(leave())
        assert request.request_id in backend._engine.aborted and backend._engine.running == set()

    def test_a_value_error_is_the_requests_fault(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.refused(loopback, self.request(backend, temperature=1.0, top_p=0.123), InvalidRequest)

    @pytest.mark.parametrize("told", [None, [{}]])
    def test_missing_logprobs_are_not_the_requests_fault(
        self, loopback: LoopbackServer, backend: Any, monkeypatch: Any, told: Any
    ) -> None:
        output = backend._engine._output

        def without(*what: Any) -> Any:
            found = output(*what)
            found.logprobs = told
            return found

        monkeypatch.setattr(backend._engine, "_output", without)
        self.refused(loopback, self.request(backend, logprobs=2), BackendCrashed)

    def test_a_stop_while_the_prompt_is_read(self, loopback: LoopbackServer, make_backend: Callable[[], Any]) -> None:
        other = make_backend()

        async def stopped() -> None:
            await other.start()
            reading = asyncio.ensure_future(anext(other.generate(self.request(other, "completion", prompt=(1, 2)))))
            await asyncio.sleep(0)
            await other.stop()
            await reading

        with pytest.raises(BackendUnavailable):
            loopback.call(stopped())

    def test_an_aborted_request_is_an_error(self, loopback: LoopbackServer, backend: Any) -> None:
        backend._engine.ending = "abort"
        self.refused(loopback, self.request(backend), BackendCrashed)
        backend._engine.ending = ""
        assert self.ask(loopback, self.request(backend)).text


def test_a_dead_engine(vllm: Any, checkpoint: Path) -> None:
    backend = VLLMBackend(ModelSettings(model=str(checkpoint), served_model_name="v", backend="vllm"))
    request = GenerateRequest(request_id="r", model="v", prompt="x")

    async def live() -> None:
        await backend.start()
        backend._engine.ending = "dead"
        with pytest.raises(BackendCrashed):
            await anext(backend.generate(request))
        assert (await backend.health()).state == "failed"
        with pytest.raises(BackendUnavailable):
            await anext(backend.generate(request))
        await backend.stop()

    asyncio.run(live())
    assert vllm.lives[-1].is_shut_down


def test_an_engine_that_cannot_be_used_is_not_left_behind(vllm: Any, checkpoint: Path, monkeypatch: Any) -> None:
    def broken(*what: Any) -> Any:
        raise ZeroDivisionError("no vocabulary")

    monkeypatch.setattr("suimon_vllm.backend.PromptBuilder", broken)
    backend = VLLMBackend(ModelSettings(model=str(checkpoint), backend="vllm"))
    with pytest.raises(BackendUnavailable, match="no vocabulary"):
        asyncio.run(backend.start())
    assert vllm.lives[-1].is_shut_down


def test_without_vllm_the_model_says_how_to_install_it(checkpoint: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    backend = VLLMBackend(ModelSettings(model=str(checkpoint), backend="vllm"))
    with pytest.raises(BackendUnavailable, match=r"suimon-vllm\[vllm\]"):
        asyncio.run(backend.start())


@pytest.mark.parametrize(
    "options",
    [{"tensor_paralel_size": 2}, {"tensor_parallel_size": "2"}, {"trust_remote_code": 1}, {"max_concurrency": 0}],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"model 'v'.*tensor_parallel_size"):
        VLLMBackend(ModelSettings(model="m", served_model_name="v", backend="vllm", options=options))

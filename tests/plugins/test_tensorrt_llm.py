"""The TensorRT-LLM backend over real HTTP and the openai package, against a stand-in made from the contract file.

The stand-in refuses what the contract does not name; test_tensorrt_llm_real.py holds the contract against the package.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from suimon.core_engine import tracing
from suimon.core_engine.prompts import load_text_side
from suimon.core_engine.sampling_params import SamplingParams as EngineSampling
from suimon.gateway import hookspecs
from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import Delta, GenerateRequest, Message, SamplingParams, Usage
from suimon.gateway.testing import BackendContract
from suimon.plugins import tensorrt_llm as plugin
from suimon.plugins import tensorrt_llm_options
from suimon.plugins.tensorrt_llm import TensorRTBackend
from suimon.plugins.tensorrt_llm_answer import Choice, relative_priority

ROOT = Path(__file__).resolve().parent.parent.parent
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = "user: Hello\nassistant: "


@pytest.fixture(scope="module")
def checkpoint(trtllm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUIMON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield trtllm.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def package(trtllm: ModuleType) -> Iterator[ModuleType]:
    """The stand-in, installed."""
    with pytest.MonkeyPatch.context() as patch:
        yield install(trtllm, patch)


def install(trtllm: ModuleType, patch: pytest.MonkeyPatch, version: str | None = None) -> ModuleType:
    for name, module in trtllm.build(version).items():
        patch.setitem(sys.modules, name, module)
    return sys.modules["tensorrt_llm"]


def settings(checkpoint: Path, **fields: Any) -> ModelSettings:
    known = {"model": str(checkpoint), "served_model_name": "tiny", "backend": "tensorrt_llm"}
    return ModelSettings(**known | fields)


class Service:
    """A server with one TensorRT-LLM backend, and a client of it."""

    def __init__(self, running: Any, package: ModuleType) -> None:
        self.running = running
        self.backend: TensorRTBackend = running.backend
        self.llm = package.LLM.made[-1]
        self.client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30)

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**CHAT | {"temperature": 0, "max_tokens": 20} | fields)

    def complete(self, **fields: Any) -> Any:
        known = {"model": "tiny", "prompt": "Hi", "temperature": 0, "max_tokens": 20}
        return self.client.completions.create(**known | fields)

    def asked(self) -> Any:
        """The sampling parameters of the latest request."""
        return self.llm.asked[-1]["sampling_params"]

    def is_idle(self) -> bool:
        return not self.llm.requests and not self.backend._choices and self.backend.load().running == 0


@pytest.fixture(scope="module")
def shared(package: ModuleType, checkpoint: Path, gateway_tests: ModuleType) -> Iterator[Service]:
    with gateway_tests.running_server(TensorRTBackend(settings(checkpoint))) as running:
        yield Service(running, package)


@pytest.fixture
def service(shared: Service, package: ModuleType) -> Service:
    """The server that tests share, with nothing left of the last one."""
    package.LLM.delay, package.LLM.interval = 0.0, 1
    shared.llm.entries, shared.llm.faults, shared.llm.num_aborts = "dict", [], 0
    shared.llm.asked.clear()
    assert shared.is_idle()
    return shared


@pytest.fixture
def start(package: ModuleType, checkpoint: Path, gateway_tests: ModuleType) -> Iterator[Callable[..., Service]]:
    """Starts a server of the test's own, with these settings."""
    with ExitStack() as stack:

        def go(**fields: Any) -> Service:
            backend = TensorRTBackend(settings(checkpoint, **fields))
            return Service(stack.enter_context(gateway_tests.running_server(backend)), package)

        yield go


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_a_chat_whole_and_streamed(service: Service, trtllm: ModuleType) -> None:
    whole = service.chat()
    assert whole.choices[0].message.content == trtllm.TEXT[:20]
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 20)
    chunks = list(service.chat(stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == trtllm.TEXT[:20] and len([text for text in texts if text]) == 20
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 20


def test_the_second_time_a_prompt_is_cached_and_only_for_the_same_salt(service: Service) -> None:
    cached = [
        service.chat(extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens
        for salt in ("a", "a", "b")
    ]
    assert cached == [0, len(PROMPT) // 4 * 4, 0]


def test_an_answer_goes_on_until_its_end_or_the_context_is_full(service: Service, trtllm: ModuleType) -> None:
    """max_tokens left out: theirs would be 32."""
    whole = service.client.chat.completions.create(**CHAT, temperature=0)
    num_tokens = len(trtllm.TEXT.encode()) + 1
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (trtllm.TEXT, "stop")
    assert whole.usage.completion_tokens == num_tokens
    long = service.chat(messages=[{"role": "user", "content": "x" * 200}], max_tokens=None)
    assert (long.choices[0].finish_reason, long.usage.total_tokens) == ("length", 256)


def test_characters_of_several_tokens_are_whole(service: Service, trtllm: ModuleType) -> None:
    chunks = [chunk.choices[0].text for chunk in service.complete(stream=True, max_tokens=200) if chunk.choices]
    assert "".join(chunks) == trtllm.TEXT
    assert "水" in chunks and not any("\ufffd" in chunk for chunk in chunks)


def test_joined_responses_are_read_whole(service: Service, trtllm: ModuleType, package: ModuleType) -> None:
    """B12: an engine that gives several tokens at once gives the same text."""
    package.LLM.interval = 7
    chunks = [chunk.choices[0].text for chunk in service.complete(stream=True, max_tokens=20) if chunk.choices]
    assert "".join(chunks) == trtllm.TEXT[:20] and len(chunks) <= 4


# --- Choices ----------------------------------------------------------------------------------------------------------


def test_n_choices_are_n_requests_with_a_seed_each(service: Service) -> None:
    whole = service.chat(n=3, temperature=0.9, max_tokens=12)
    texts = [choice.message.content for choice in sorted(whole.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) == 3 and all(len(text.encode()) >= 10 for text in texts)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 36)
    seeds = [call["sampling_params"].seed for call in service.llm.asked]
    assert [seed - seeds[0] for seed in seeds] == [0, 1, 2]


def test_greedy_choices_are_equal_and_no_error(service: Service, trtllm: ModuleType) -> None:
    """n > 1 raises there when nothing is drawn."""
    whole = service.chat(n=2)
    assert [choice.message.content for choice in whole.choices] == [trtllm.TEXT[:20]] * 2
    assert whole.usage.completion_tokens == 40


class Zero:
    """Draws seed 0, so that the choices begin at the tokens 0, 7 and 14 of the text."""

    def getrandbits(self, _: int) -> int:
        return 0


def test_a_choice_that_ends_first_does_not_end_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, trtllm: ModuleType
) -> None:
    """There, a stop string in one of n choices ends the request for all."""
    monkeypatch.setattr(service.backend, "_random", Zero())
    chunks = list(service.chat(n=3, temperature=0.9, max_tokens=30, stop=["river"], stream=True))
    texts, reasons = ["", "", ""], [None, None, None]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    before = trtllm.TEXT.partition("river")[0]
    assert texts == [trtllm.TEXT[:30], before[7:], before[14:]]
    assert reasons == ["length", "stop", "stop"]


def test_without_a_seed_two_requests_differ(service: Service) -> None:
    """Theirs would both have seed 0."""
    seeds = []
    for _ in range(2):
        service.chat(temperature=1)
        seeds.append(service.asked().seed)
    assert seeds[0] != seeds[1]


def test_seeds_are_taken_where_the_sampler_honours_them(service: Service, start: Callable[..., Service]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        service.chat(seed=5)
    assert caught.value.param == "seed"
    service = start(options={"sampler_type": "TRTLLMSampler"})
    texts = [service.chat(seed=seed, temperature=1).choices[0].message.content for seed in (5, 5, 6, -1)]
    assert texts[0] == texts[1] != texts[2]
    assert service.llm.given["sampler_type"] == "TRTLLMSampler"


# --- Stops ------------------------------------------------------------------------------------------------------------


def test_stop_strings_cut_at_the_character_and_never_show_their_beginning(service: Service) -> None:
    """Their own check lets the beginning of a stop string out before the rest has come."""
    chunks = [chunk.choices[0] for chunk in service.complete(stream=True, stop=["gate st"]) if chunk.choices]
    assert "".join(chunk.text for chunk in chunks) == "The water "
    assert chunks[-1].finish_reason == "stop"
    whole = service.complete(stop=["gate st"], extra_body={"include_stop_str_in_output": True})
    assert (whole.choices[0].text, whole.choices[0].stop_reason) == ("The water gate st", "gate st")
    assert service.llm.num_aborts == 2 and "stop" not in vars(service.asked())


def test_a_stop_token_counts_and_is_not_shown(service: Service) -> None:
    space = service.llm.text_ids[3]
    whole = service.complete(logprobs=0, extra_body={"stop_token_ids": [space]})
    choice = whole.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("The", "stop", space)
    assert (whole.usage.completion_tokens, len(choice.logprobs.token_logprobs)) == (4, 4)


def test_further_end_tokens_end_answers_too(
    package: ModuleType, trtllm: ModuleType, gateway_tests: ModuleType, tmp_path: Path
) -> None:
    """It takes one end token, and many models have several."""
    folder = trtllm.write_checkpoint(tmp_path, eos_token_id=[257, 4])
    with gateway_tests.running_server(TensorRTBackend(settings(folder))) as running:
        service = Service(running, package)
        service.complete(max_tokens=2)
        assert (service.asked().end_id, service.asked().stop_token_ids) == (257, [4])
        service.complete(max_tokens=2, extra_body={"ignore_eos": True})
        assert (service.asked().ignore_eos, service.asked().stop_token_ids) == (True, None)


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_everything_that_has_a_surprising_default_is_said(service: Service) -> None:
    service.client.chat.completions.create(**CHAT)
    asked = service.asked()
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (1.0, 1.0, 0, 256 - len(PROMPT))
    assert not asked.is_greedy
    service.complete()
    assert service.asked().is_greedy
    off = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logprobs")
    assert [getattr(service.asked(), name) for name in off] == [None] * len(off)


def test_every_sampling_parameter_arrives(service: Service) -> None:
    extra = {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True}
    given = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "top_p": 0.5, "temperature": 0.5}
    service.complete(**given, logit_bias={"65": -100, "66": 2.5}, extra_body=extra)
    asked = service.asked()
    wanted = extra | given
    assert {name: getattr(asked, name) for name in wanted} == wanted
    bias = asked.embedding_bias
    assert tuple(bias.shape) == (258,)
    assert {i: float(bias[i]) for i in bias.nonzero().flatten().tolist()} == {65: -100.0, 66: 2.5}


def test_a_banned_token_does_not_come(service: Service, trtllm: ModuleType) -> None:
    space = service.llm.text_ids[3]
    assert service.complete(logit_bias={str(space): -100}).choices[0].text == trtllm.TEXT.replace(" ", "")[:20]
    with pytest.raises(openai.BadRequestError) as caught:
        service.complete(logit_bias={"258": 1})
    assert caught.value.param == "logit_bias"


# --- Log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_engine(service: Service, trtllm: ModuleType) -> None:
    """B80: passed through token by token, for any number of alternatives."""
    expected = [trtllm.logprob(i) for i in range(20)]
    for wanted in (0, 1, 5, 20):
        content = service.chat(logprobs=True, top_logprobs=wanted).choices[0].logprobs.content
        assert [entry.logprob for entry in content] == expected
        assert "".join(entry.token for entry in content) == trtllm.TEXT[:20]
        assert [len(entry.top_logprobs) for entry in content] == [wanted] * 20
        for entry in content:
            numbers = [other.logprob for other in entry.top_logprobs]
            assert numbers == sorted(numbers, reverse=True)
            assert wanted == 0 or numbers[0] == entry.logprob + 0.03125
    streamed = [c for chunk in service.chat(logprobs=True, stream=True) for c in chunk.choices if c.logprobs]
    assert [entry.logprob for choice in streamed for entry in choice.logprobs.content] == expected


@pytest.mark.parametrize(("shape", "wanted"), [("missing", 0), ("missing", 2), ("float", 2)])
def test_logprobs_that_are_missing_are_an_error_and_never_zeros(service: Service, shape: str, wanted: int) -> None:
    """B80."""
    service.llm.entries = shape
    with pytest.raises(openai.InternalServerError, match="log-probabilities"):
        service.chat(logprobs=True, top_logprobs=wanted)
    assert service.chat().choices[0].message.content


def test_plain_numbers_do_for_the_chosen_tokens(service: Service, trtllm: ModuleType) -> None:
    service.llm.entries = "float"
    content = service.chat(logprobs=True, max_tokens=3).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [trtllm.logprob(i) for i in range(3)]


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_numbers(service: Service) -> None:
    for fields in ({"prompt": "x" * 300}, {"prompt": "x" * 250, "max_tokens": 20}):
        with pytest.raises(openai.BadRequestError, match="256") as caught:
            service.complete(**fields)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert service.llm.asked == []


def test_a_prompt_over_the_batch_size_is_its_fault_where_it_is_not_cut(package: ModuleType, checkpoint: Path) -> None:
    async def too_long(backend: TensorRTBackend) -> None:
        with pytest.raises(hookspecs.ContextTooLong, match=r"max_num_tokens \(16\)"):
            await generate(backend, prompt="x" * 30, sampling=SamplingParams(n=2))
        assert await generate(backend, prompt="Hi") and backend.load().running == 0

    run(checkpoint, too_long, max_num_batched_tokens=16, options={"enable_chunked_prefill": False})
    assert run(checkpoint, lambda backend: generate(backend, prompt="x" * 30), max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        (([], "timeout", None), openai.InternalServerError, "deadline_exceeded"),
        (([], "cancelled", None), openai.InternalServerError, "backend_unavailable"),
        (([], "not_finished", None), openai.InternalServerError, None),
    ],
)
def test_endings_that_are_none(service: Service, gateway_tests: ModuleType, fault, kind, code) -> None:
    service.llm.faults = [fault]
    with pytest.raises(kind) as caught:
        service.chat()
    assert caught.value.code == code
    service.llm.faults = [fault]
    with pytest.raises(openai.APIError):
        list(service.chat(stream=True))
    assert service.chat().choices[0].finish_reason == "length"
    gateway_tests.wait_until(service.is_idle)


def test_one_request_that_fails_does_not_end_the_others(service: Service, package: ModuleType) -> None:
    service.llm.faults = [package.llmapi.RequestError("the KV cache has no room for it")]
    with pytest.raises(openai.InternalServerError, match="no room for it"):
        service.chat()
    assert service.chat().choices[0].message.content
    assert service.running.request("GET", "/health/ready")[0] == 200


def test_an_engine_that_dies_fails_its_requests_and_is_not_ready(start: Callable[..., Service]) -> None:
    service = start()
    service.llm.faults = [ValueError("CUDA error: an illegal memory access")]
    with pytest.raises(openai.InternalServerError, match="illegal memory access") as caught:
        service.chat()
    assert caught.value.code == "backend_crashed"
    assert service.running.request("GET", "/health/ready")[0] == 503
    with pytest.raises(openai.InternalServerError, match="must be restarted") as refused:
        service.chat()
    assert (refused.value.status_code, refused.value.code) == (503, "backend_unavailable")


@pytest.mark.parametrize(
    "refusal",
    [
        NotImplementedError("no such sampler"),
        RecursionError("maximum recursion depth exceeded"),
        TypeError("generate_async() got an unexpected keyword argument 'priority'"),
        RuntimeError("CUDA out of memory in /usr/lib/python3/torch/cuda.py"),
        "RequestError",
    ],
)
def test_what_one_request_is_refused_with_is_its_own_failure(
    service: Service, package: ModuleType, refusal: Exception | str
) -> None:
    error = package.llmapi.RequestError("no room for it") if refusal == "RequestError" else refusal
    service.llm.refusals = [error]
    with pytest.raises(openai.InternalServerError, match=str(error).split()[0]) as caught:
        service.chat()
    assert "/usr/lib" not in str(caught.value)
    assert service.running.request("GET", "/health/ready")[0] == 200
    assert service.chat().choices[0].message.content


class Ended:
    """A result that has ended without a reason."""

    outputs = (SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None, stop_reason=None),)
    finished = True
    error = f"assert at 0x7f0011223344 in /usr/lib/secret/worker.py: {'x' * 5000}"

    def __aiter__(self) -> Ended:
        return self

    async def __anext__(self) -> Ended:
        return self


def test_what_the_library_says_of_a_failure_tells_nothing_private(checkpoint: Path) -> None:
    tokenizer, renderer = load_text_side(str(checkpoint), None)
    renderer.close()
    choice = Choice(0, Ended(), EngineSampling(), [1], tokenizer, (), hookspecs.BackendError)

    async def read() -> list[Delta]:
        return [delta async for delta in choice.deltas()]

    with pytest.raises(hookspecs.BackendError, match=r"assert at 0x… in worker.py") as caught:
        asyncio.run(read())
    assert len(caught.value.message) < 1100


def test_an_engine_found_shut_down_is_unavailable(start: Callable[..., Service]) -> None:
    service = start()
    service.llm.shutdown()
    with pytest.raises(openai.InternalServerError, match="LLM is shutting down") as caught:
        service.chat(n=2)
    assert caught.value.status_code == 503
    assert service.running.request("GET", "/health/ready")[0] == 503


# --- Traces -----------------------------------------------------------------------------------------------------------


def test_one_trace_from_the_client_to_the_tokens(
    service: Service, gateway_tests: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(service.running.gateway.telemetry, "tracer", provider.get_tracer("test"))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    service.chat(extra_headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    gateway_tests.wait_until(lambda: len(exporter.get_finished_spans()) == 5, "the end of all spans")
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    names = {span.context.span_id: span.name for span in spans}
    parents = {span.name: names.get(span.parent.span_id) for span in spans}
    http = "POST /v1/chat/completions"
    assert parents == {http: None, "chat tiny": http} | dict.fromkeys(("queue", "prefill", "decode"), "chat tiny")
    phases = sorted((s for s in spans if s.name in ("queue", "prefill", "decode")), key=lambda span: span.start_time)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert all(one.end_time <= other.start_time for one, other in pairwise(phases))


# --- Leaving ----------------------------------------------------------------------------------------------------------


def test_twenty_clients_that_leave_in_mid_stream_leave_nothing(
    service: Service, package: ModuleType, gateway_tests: ModuleType, trtllm: ModuleType
) -> None:
    package.LLM.delay = 0.01
    for number in range(20):
        stream = service.chat(stream=True, max_tokens=100, n=1 + number % 2, temperature=number % 2)
        next(iter(stream))
        stream.close()
    gateway_tests.wait_until(service.is_idle)
    assert service.llm.num_aborts == 30
    package.LLM.delay = 0.0
    assert service.chat().choices[0].message.content == trtllm.TEXT[:20]


async def generate(backend: TensorRTBackend, **fields: Any) -> list[Delta]:
    request = GenerateRequest(request_id="r", model="tiny", **fields)
    return [delta async for delta in backend.generate(request)]


def run(checkpoint: Path, work: Callable[[TensorRTBackend], Any], **fields: Any) -> Any:
    """What ``work`` answers with a started backend, on an event loop of its own."""

    async def all_of_it() -> Any:
        backend = TensorRTBackend(settings(checkpoint, **fields))
        await backend.start()
        try:
            return await work(backend)
        finally:
            await backend.stop()

    return asyncio.run(all_of_it())


def test_a_deadline_aborts(service: Service, package: ModuleType, gateway_tests: ModuleType) -> None:
    package.LLM.delay = 0.01

    async def late() -> None:
        generator, router = service.running.gateway.generator, service.running.gateway.router
        request = GenerateRequest(request_id="d", model="tiny", prompt="Hi", deadline=time.monotonic() + 0.1)
        async for _ in generator.generate(router.find("tiny"), request, stream=True):
            pass

    with pytest.raises(hookspecs.DeadlineExceeded):
        asyncio.run_coroutine_threadsafe(late(), service.running.loop).result(20)
    gateway_tests.wait_until(service.is_idle)
    assert service.llm.num_aborts == 1


def test_a_generator_that_is_closed_early_aborts_all_choices(package: ModuleType, checkpoint: Path) -> None:
    package.LLM.delay = 0.01

    async def leave(backend: TensorRTBackend) -> None:
        sampling = SamplingParams(n=4, max_tokens=100)
        deltas = backend.generate(GenerateRequest(request_id="r", model="tiny", prompt="Hi", sampling=sampling))
        await anext(deltas)
        await deltas.aclose()
        assert backend.load().running == 0 and not backend._choices

    run(checkpoint, leave)
    assert package.LLM.made[-1].num_aborts == 4


def test_stopping_aborts_what_runs_and_shuts_down(package: ModuleType, checkpoint: Path) -> None:
    package.LLM.delay = 0.01

    async def stop_meanwhile(backend: TensorRTBackend) -> None:
        sampling = SamplingParams(max_tokens=200)
        deltas = backend.generate(GenerateRequest(request_id="r", model="tiny", prompt="Hi", sampling=sampling))
        await anext(deltas)
        await backend.stop()
        with pytest.raises(hookspecs.BackendUnavailable):
            _ = [delta async for delta in deltas]
        with pytest.raises(hookspecs.BackendUnavailable, match="draining"):
            await generate(backend, prompt="Hi")

    run(checkpoint, stop_meanwhile)
    assert package.LLM.made[-1].is_shut_down


@pytest.mark.parametrize("moment", ["while it loads", "when it is loaded"])
def test_what_is_stopped_before_it_has_started_is_released(
    package: ModuleType, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    load, in_daemon_thread = package.LLM._load, plugin.in_daemon_thread
    backend, is_loading, may_load = TensorRTBackend(settings(checkpoint)), threading.Event(), threading.Event()

    def load_slowly(llm: Any, folder: Path) -> None:
        is_loading.set()
        assert may_load.wait(30)
        load(llm, folder)

    async def stop_behind(function: Callable[[], Any]) -> Any:
        monkeypatch.setattr(plugin, "in_daemon_thread", in_daemon_thread)
        loaded = await in_daemon_thread(function)
        await backend.stop()
        return loaded

    async def stop_before() -> None:
        starting = asyncio.create_task(backend.start())
        await asyncio.to_thread(is_loading.wait, 30)
        await backend.stop()
        may_load.set()
        await starting

    if moment == "while it loads":
        monkeypatch.setattr(package.LLM, "_load", load_slowly)
    else:
        monkeypatch.setattr(plugin, "in_daemon_thread", stop_behind)
    with pytest.raises(hookspecs.BackendUnavailable, match="stopped while it was being loaded"):
        asyncio.run(stop_before() if moment == "while it loads" else backend.start())
    assert package.LLM.made[-1].is_shut_down
    assert not asyncio.run(backend.health()).ready and backend.describe() == ()


def test_a_package_of_another_kind_is_told_before_anything_is_loaded(
    package: ModuleType, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(package.llmapi, "RequestError")
    num_made = len(package.LLM.made)
    with pytest.raises(hookspecs.BackendUnavailable, match="RequestError"):
        asyncio.run(TensorRTBackend(settings(checkpoint)).start())
    assert len(package.LLM.made) == num_made


def test_the_server_shuts_it_down(start: Callable[..., Service], gateway_tests: ModuleType) -> None:
    service = start()
    service.running.uvicorn.should_exit = True
    gateway_tests.wait_until(lambda: service.llm.is_shut_down)


# --- Prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_every_kind(package: ModuleType, checkpoint: Path) -> None:
    async def all_kinds(backend: TensorRTBackend) -> list[list[int]]:
        messages = (Message(role="user", content="Hello"),)
        ids = tuple(await backend.tokenize(GenerateRequest(request_id="t", model="tiny", messages=messages)))
        assert await backend.detokenize(ids) == PROMPT
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        for fields in ({"messages": messages}, {"prompt": PROMPT}, {"prompt": ids}):
            deltas = await generate(backend, sampling=sampling, **fields)
            assert deltas[-1].usage == Usage(
                prompt_tokens=len(ids),
                completion_tokens=3,
                cached_tokens=deltas[-1].usage.cached_tokens,
            )
        going_on = (*messages, Message(role="assistant", content="Well"))
        kept = {"continue_final_message": True, "add_generation_prompt": False}
        await generate(backend, messages=going_on, sampling=sampling, **kept)
        return [call["inputs"] for call in package.LLM.made[-1].asked]

    *same, open_ended = run(checkpoint, all_kinds)
    assert same[0] == same[1] == same[2]
    assert open_ended[: len("user: Hello\n")] == same[0][: len("user: Hello\n")] and len(open_ended) == 27


def test_junk_for_the_tokenizer_is_400(service: Service) -> None:
    assert service.running.post("/detokenize", {"model": "tiny", "tokens": [258]})[0] == 400
    assert service.running.post("/v1/completions", {"model": "tiny", "prompt": ""})[0] == 400


def test_adapters_are_refused(package: ModuleType, checkpoint: Path) -> None:
    with pytest.raises(hookspecs.InvalidRequest, match="LoRA"):
        run(checkpoint, lambda backend: generate(backend, prompt="Hi", adapter="a"))


# --- Construction -----------------------------------------------------------------------------------------------------


def given(package: ModuleType, checkpoint: Path, **fields: Any) -> dict[str, Any]:
    """What LLM was made with; its configuration objects as their own arguments."""

    async def nothing(backend: TensorRTBackend) -> None:
        assert (await backend.health()).ready

    run(checkpoint, nothing, **fields)
    arguments = package.LLM.made[-1].given
    return {name: getattr(value, "given", value) for name, value in arguments.items()}


def test_what_it_is_made_with_by_default(package: ModuleType, checkpoint: Path) -> None:
    assert given(package, checkpoint) == {
        "model": str(checkpoint),
        "dtype": "auto",
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_seq_len": 256,
        "max_input_len": 256,
        "max_batch_size": 256,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.5},
    }


def test_settings_and_options_in_its_terms(package: ModuleType, checkpoint: Path) -> None:
    options = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "moe_expert_parallel_size": 4,
        "kv_cache_dtype": "fp8",
        "host_cache_size": 1 << 30,
        "guided_decoding_backend": "xgrammar",
        "speculative": {"method": "ngram", "max_draft_len": 4, "max_matching_ngram_size": 3},
    }
    fields = {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "memory_utilization": 0.8,
        "kv_cache_memory": 1 << 32,
        "enable_prefix_caching": False,
        "block_size": 64,
        "num_blocks": 100,
    }
    assert given(package, checkpoint, options=options, **fields) == {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "trust_remote_code": False,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "moe_expert_parallel_size": 4,
        "max_seq_len": 128,
        "max_input_len": 128,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "enable_chunked_prefill": True,
        "guided_decoding_backend": "xgrammar",
        "speculative_config": {"max_draft_len": 4, "max_matching_ngram_size": 3},
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": 0.8,
            "max_gpu_total_bytes": 1 << 32,
            "max_tokens": 6400,
            "tokens_per_block": 64,
            "host_cache_size": 1 << 30,
            "dtype": "fp8",
        },
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": {"tensor_parallel": 2}}, "options.tensor_parallel: is not known; the options of tensorrt_llm are"),
        ({"options": {"tensor_parallel_size": 0}}, "options.tensor_parallel_size: Expected `int` >= 1"),
        ({"options": {"tensor_parallel_size": "2"}}, "options.tensor_parallel_size: Expected `int`, got `str`"),
        ({"options": {"quantization": "int3"}}, "options.quantization: is 'int3'; known are auto, fp8"),
        ({"options": {"speculative": {"method": "medusa"}}}, "has method 'medusa'; known are ngram"),
        ({"options": {"speculative": {"max_draft_len": 2}}}, "has method None; known are ngram"),
        ({"options": {"speculative": {"method": ["ngram"]}}}, "has method ['ngram']; known are ngram"),
        ({"device": "cpu"}, "device: is cpu"),
        ({"model": ""}, "model: must be given"),
    ],
)
def test_wrong_settings_are_refused_at_once(checkpoint: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(hookspecs.InvalidRequest) as caught:
        TensorRTBackend(settings(checkpoint, **fields))
    message = caught.value.message.replace("`", "")
    assert message.startswith("model 'tiny': ") and said.replace("`", "") in message


@pytest.mark.parametrize(
    ("version", "fields", "said"),
    [
        ("1.0", {"kv_cache_memory": 1 << 30}, "KvCacheConfig has no max_gpu_total_bytes; it has dtype, enable_block"),
        ("1.2", {"options": {"speculative": {"method": "eagle3"}}}, "has no Eagle3DecodingConfig"),
        ("1.2", {"options": {"speculative": {"method": "ngram", "k": 2}}}, "NGramDecodingConfig has no k; it has"),
        ("1.2", {"options": {"quantization": "fp8"}}, "asks for fp8 (TensorRT-LLM's FP8), but the checkpoint"),
    ],
)
def test_what_the_installed_version_lacks_is_told(
    trtllm: ModuleType, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, version: str, fields: Any, said: str
) -> None:
    install(trtllm, monkeypatch, version)
    with pytest.raises(hookspecs.BackendUnavailable, match=re.escape(said)):
        run(checkpoint, lambda backend: generate(backend, prompt="Hi"), **fields)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}}, "nvfp4"),
        ({"config.json": {"quantization_config": {"quant_algo": "FP8", "quant_method": "modelopt"}}}, "fp8"),
        ({"config.json": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        (
            {"config.json": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128] * 2}}},
            "fp8_block",
        ),
        ({"config.json": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
    ],
)
def test_a_quantization_that_is_asked_for_is_the_checkpoints(
    package: ModuleType, trtllm: ModuleType, tmp_path: Path, files: dict[str, Any], name: str
) -> None:
    trtllm.write_checkpoint(tmp_path, **files.get("config.json", {}))
    if "hf_quant_config.json" in files:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(files["hf_quant_config.json"]))
    assert given(package, tmp_path, options={"quantization": name})["model"] == str(tmp_path)
    other = "awq"
    with pytest.raises(hookspecs.BackendUnavailable, match="W4A16_AWQ"):
        given(package, tmp_path, options={"quantization": other})


def test_a_method_that_is_no_name_is_told_and_no_traceback(
    package: ModuleType, trtllm: ModuleType, tmp_path: Path
) -> None:
    trtllm.write_checkpoint(tmp_path, quantization_config={"quant_method": ["fp8"]})
    with pytest.raises(hookspecs.BackendUnavailable, match=r"holds \['fp8'\]"):
        given(package, tmp_path, options={"quantization": "fp8"})


def test_a_field_that_the_library_refuses_is_told_with_its_value(package: ModuleType, monkeypatch) -> None:
    def refuse(**fields: Any) -> None:
        raise ValueError("max_draft_len: must be a number")

    refuse.model_fields = {"max_draft_len": None}  # type: ignore[attr-defined]
    monkeypatch.setattr(package.llmapi, "NGramDecodingConfig", refuse)
    with pytest.raises(hookspecs.BackendUnavailable, match=r"2026-01-02.*must be a number"):
        tensorrt_llm_options._made(package.llmapi, "NGramDecodingConfig", {"max_draft_len": date(2026, 1, 2)})


def test_later_versions_get_priorities_and_the_trace(
    trtllm: ModuleType, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    context = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for version, passed in (("1.2", False), ("1.3", True)):
        package = install(trtllm, monkeypatch, version)
        run(checkpoint, lambda backend: generate(backend, prompt="Hi", priority=-1, trace_context=context))
        call = package.LLM.made[-1].asked[-1]
        assert (call.get("priority"), call.get("trace_headers")) == ((0.75, context) if passed else (None, None))


def test_priorities_keep_their_order() -> None:
    given = [-1000, -2, -1, 0, 1, 5, 10**9]
    theirs = [relative_priority(priority) for priority in given]
    assert theirs == sorted(theirs, reverse=True)
    assert theirs[3] == 0.5 and 0 <= theirs[-1] < theirs[0] <= 1


def test_a_model_that_cannot_be_loaded_says_why(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(package.LLM, "load_error", RuntimeError("no CUDA device is visible"))
    with pytest.raises(hookspecs.BackendUnavailable, match="cannot load the model: no CUDA device"):
        run(checkpoint, lambda backend: generate(backend, prompt="Hi"))
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(hookspecs.BackendUnavailable, match="folders in Hugging Face's layout"):
        run(tmp_path / "weights.gguf", lambda backend: generate(backend, prompt="Hi"))
    with pytest.raises(hookspecs.BackendUnavailable, match="no such file"):
        run(tmp_path / "nothing", lambda backend: generate(backend, prompt="Hi"))


def test_without_the_package_the_error_says_how_to_get_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # an import of it is an ImportError
    with pytest.raises(hookspecs.BackendUnavailable, match="NVIDIA's own package index") as caught:
        run(checkpoint, lambda backend: generate(backend, prompt="Hi"))
    assert 'pip install "suimon[tensorrt-llm]"' in caught.value.message


def test_only_its_own_models_are_registered(checkpoint: Path) -> None:
    registered: list[Any] = []
    models = (settings(checkpoint), ModelSettings(model="other"))
    plugin.register_backends(register=registered.append, settings=Settings(models=models))
    assert [backend.model_id for backend in registered] == ["tiny"]


# --- The contracts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_backend(package: ModuleType, checkpoint: Path) -> Callable[[], TensorRTBackend]:
    """For the tests of TestContract. Only with that sampler it claims seeds."""
    package.LLM.delay, package.LLM.interval = 0.0, 1
    return lambda: TensorRTBackend(settings(checkpoint, options={"sampler_type": "TRTLLMSampler"}))


class TestContract(BackendContract):
    """What every backend is held to."""


def test_the_plugin_touches_what_the_contract_names_and_the_contract_nothing_else(trtllm: ModuleType) -> None:
    """That it touches nothing beyond, the stand-in sees to; this is the other direction."""
    sources = "".join(path.read_text() for path in (ROOT / "plugins").glob("tensorrt_llm*.py"))
    contract = trtllm.read_contract()
    names: set[str] = set()
    for classes in contract["modules"].values():
        for name, row in classes.items():
            names |= {name, *row.get("parameters", {}), *row.get("keywords", {}), *row.get("methods", {})}
            names |= set(row.get("members", ()))
            names |= set(row.get("fields", ())) if name == "KvCacheConfig" else set()
    generate_async = contract["modules"]["tensorrt_llm"]["LLM"]["methods"]["generate_async"]["parameters"]
    names |= set(generate_async) - {"inputs", "sampling_params"}  # given by position
    for row in contract["results"].values():
        names |= set(row["members"]) - {"__anext__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()


def test_every_known_method_has_a_quant_algo_in_the_contract(trtllm: ModuleType) -> None:
    members = trtllm.read_contract()["modules"]["tensorrt_llm.llmapi"]["QuantAlgo"]["members"]
    assert set(tensorrt_llm_options.QUANT_ALGOS.values()) == set(members)
    decoding = set(trtllm.read_contract()["modules"]["tensorrt_llm.llmapi"])
    assert set(tensorrt_llm_options.DECODING_CONFIGS.values()) <= decoding

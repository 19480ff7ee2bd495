"""EngineClient with real engine processes: what its users see while engines work, hang, die and come back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from suimon.core_engine import client as client_module
from suimon.core_engine import engine_process, tracing
from suimon.core_engine.client import EngineClient
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
)
from suimon.core_engine.outputs import RequestOutput
from suimon.core_engine.request import EngineRequest
from suimon.core_engine.sampling_params import SamplingParams

HERE = Path(__file__).parent
POISON, ENDLESS, FAILING, BREAKING = 290, 291, 292, 293  # as in counting_executor.py
PATIENCE = 60.0  # seconds that only a defect takes


class Service:
    """A started client and the event loop it lives on."""

    def __init__(self, folder: Path, behaviour: dict[str, Any], **options: Any) -> None:
        self.folder = folder
        self.behave(**behaviour)
        defaults = {"model": str(folder), "executor": "counting_executor:CountingExecutor", "heartbeat_interval": 0.1}
        self.client = EngineClient(EngineConfig(**defaults | options))
        self.runner = asyncio.Runner()

    def behave(self, **behaviour: Any) -> None:
        """How engines that start from now on behave."""
        (self.folder / "behaviour.json").write_text(json.dumps(behaviour))

    def run(self, test: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(asyncio.wait_for(test(self.client), PATIENCE))

    def close(self) -> None:
        self.runner.run(self.client.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """``start(behaviour, **options)`` makes a service; it is closed at the end at the latest."""
    services: list[Service] = []

    def make(behaviour: dict[str, Any] | None = None, **options: Any) -> Service:
        from counting_executor import write_model

        folder = write_model(tmp_path_factory.mktemp("model"))
        services.append(Service(folder, behaviour or {}, **options))
        return services[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.setenv("PYTHONPATH", str(HERE))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SUIMON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make
        for service in services:
            service.close()


@pytest.fixture(scope="module")
def steady(start: Callable[..., Service]) -> Service:
    """One engine for the tests that do it no harm: 4 sequences, 16 tokens a step, a queue of 3."""
    behaviour = {"step_seconds": 0.002}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_num_queued_requests": 3, "max_model_len": 2048}
    service = start(behaviour, **limits)
    service.run(EngineClient.start)
    return service


@pytest.fixture
def on_steady(steady: Service) -> Iterator[Callable[..., Any]]:
    """Run a test on the steady engine; afterwards it must be idle, with every block back."""
    yield steady.run
    steady.run(settled(is_idle))


def request(prompt: Any = "5", max_tokens: int | None = 4, **options: Any) -> EngineRequest:
    fields = {name: options.pop(name) for name in ("messages", "trace_context", "priority") if name in options}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | options)
    prompt = None if "messages" in fields else prompt
    return EngineRequest(request_id="r", prompt=prompt, sampling=sampling, **fields)


async def collect(client: EngineClient, wanted: EngineRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(wanted)]


async def words(client: EngineClient, wanted: EngineRequest) -> list[str]:
    return "".join(output.text for output in await collect(client, wanted)).split()


def settled(condition: Callable[[EngineClient], bool]) -> Callable[[EngineClient], Coroutine[Any, Any, None]]:
    """A test that waits until ``condition`` holds; the service's patience is the limit."""

    async def wait(client: EngineClient) -> None:
        while not condition(client):
            await asyncio.sleep(0.005)

    return wait


def is_idle(client: EngineClient) -> bool:
    stats = client.stats
    return stats.running == stats.waiting == stats.used_blocks == stats.leaked_blocks == 0


def numbers(first: int, count: int) -> list[str]:
    return [str((first + i) % 299) for i in range(count)]


async def first_output(client: EngineClient, wanted: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
    """A stream that has begun."""
    stream = client.generate(wanted)
    await anext(stream)
    return stream


# --- prompts and outputs ----------------------------------------------------------------------------------------------


def test_prompts_of_every_form(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        assert await words(client, request("5 6")) == ["7", "8", "9", "10"]
        assert await words(client, request([5, 6])) == ["7", "8", "9", "10"]
        chat = request(messages=[{"role": "user", "content": "20"}, {"role": "user", "content": "30"}])
        assert await words(client, chat) == ["31", "32", "33", "34"]

    on_steady(test)


def test_outputs_carry_counts_logprobs_and_one_finish(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        outputs = await collect(client, request([7] * 20, logprobs=2, max_tokens=5))
        assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert [t for o in outputs for t in o.token_ids] == [8, 9, 10, 11, 12]
        entries = [entry for o in outputs for entry in o.logprobs]
        assert [entry.token_id for entry in entries] == [8, 9, 10, 11, 12]
        assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in entries)
        assert (outputs[-1].num_prompt_tokens, outputs[-1].num_output_tokens) == (20, 5)

    on_steady(test)


def test_no_max_tokens_means_up_to_the_context(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        outputs = await collect(client, request([1] * 2040, max_tokens=None))
        assert outputs[-1].num_output_tokens == 8
        assert outputs[-1].finish_reason == "length"

    on_steady(test)


def test_a_stop_string_ends_the_text_and_the_engines_work(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        aborted = client.stats.aborted
        outputs = await collect(client, request("5", max_tokens=2000, stop=("9",)))
        assert "".join(o.text for o in outputs).split() == ["6", "7", "8"]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "9")
        assert outputs[-1].num_output_tokens == 4
        await settled(is_idle)(client)
        assert client.stats.aborted == aborted + 1

    on_steady(test)


def test_choices_are_one_stream_and_end_one_by_one(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        wanted = request("5", max_tokens=200, n=3, temperature=3.5, seed=3, stop=("77",))
        texts = {0: "", 1: "", 2: ""}
        ends = {}
        for output in await collect(client, wanted):
            assert output.index not in ends
            texts[output.index] += output.text
            if output.finish_reason:
                ends[output.index] = output.num_output_tokens
        assert set(ends) == {0, 1, 2}
        assert len(set(texts.values())) > 1
        assert all("77" not in text for text in texts.values())

    on_steady(test)


def test_end_tokens_of_the_tokenizers_files_end_an_answer(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        outputs = await collect(client, request("5", logit_bias={299: 100.0}, max_tokens=9))
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason, outputs[-1].text) == ("stop", None, "")
        outputs = await collect(client, request("5", logit_bias={299: 100.0}, max_tokens=9, ignore_eos=True))
        assert outputs[-1].finish_reason == "length"

    on_steady(test)


def test_tokenize_and_detokenize(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        assert await client.tokenize(request("5 6 7")) == [5, 6, 7]
        assert await client.tokenize(request("")) == []
        assert await client.detokenize([5, 6, 7]) == "5 6 7"
        for wrong in ([-1], [10**12], [300]):
            with pytest.raises(InvalidRequestError, match="0 to 299"):
                await client.detokenize(wrong)

    on_steady(test)


@pytest.mark.parametrize(
    ("wanted", "kind", "message"),
    [
        (request(""), InvalidRequestError, "empty"),
        (request([]), InvalidRequestError, "empty"),
        (request([300]), InvalidRequestError, "0 to 299"),
        (request([-1]), InvalidRequestError, "0 to 299"),
        (request("5", stop_token_ids=(300,)), InvalidRequestError, "stop_token_ids"),
        (request("5", logit_bias={999999: 5.0}), InvalidRequestError, "logit_bias"),
        (request([1] * 8, max_tokens=2045), ContextLengthError, "2048.* 8 .*2045"),
        (request([1] * 2048, max_tokens=1), ContextLengthError, "2048.*2048.*1"),
        (request([1] * 2049, max_tokens=None), ContextLengthError, "2048.*2049"),
        (request("5" * 10**7), ContextLengthError, "10000000 characters"),
        (request(messages=[]), InvalidRequestError, "messages"),
    ],
)
def test_bad_requests_are_refused_before_the_engine(on_steady, wanted, kind, message) -> None:
    async def test(client: EngineClient) -> None:
        steps = client.stats.steps
        with pytest.raises(kind, match=message):
            await collect(client, wanted)
        assert client.stats.steps == steps
        assert await words(client, request("1", max_tokens=1)) == ["2"]

    on_steady(test)


def test_the_longest_prompt_that_fits_is_answered(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        outputs = await collect(client, request([1] * 2047, max_tokens=1))
        assert (outputs[-1].num_output_tokens, outputs[-1].finish_reason) == (1, "length")

    on_steady(test)


def test_a_request_the_engine_cannot_compute_fails_alone_and_tells_nothing_private(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(EngineError, match="no luck") as caught:
            await collect(client, request([FAILING]))
        assert "/usr" not in str(caught.value) and "0x7f" not in str(caught.value)
        assert await words(client, request("1", max_tokens=1)) == ["2"]

    on_steady(test)


# --- leaving ----------------------------------------------------------------------------------------------------------


async def occupied(client: EngineClient, count: int) -> list[AsyncGenerator[RequestOutput, None]]:
    """``count`` long requests in the midst of decoding."""
    return [await first_output(client, request(str(i), max_tokens=2000)) for i in range(count)]


async def left(streams: list[AsyncGenerator[RequestOutput, None]]) -> None:
    for stream in streams:
        await stream.aclose()


def test_leaving_while_decoding(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        aborted = client.stats.aborted
        (stream,) = await occupied(client, 1)
        await stream.aclose()
        await stream.aclose()
        await settled(is_idle)(client)
        assert client.stats.aborted == aborted + 1

    on_steady(test)


def test_leaving_while_queued(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        aborted = client.stats.aborted
        running = await occupied(client, 4)
        waiting = asyncio.create_task(collect(client, request("9")))
        await settled(lambda c: c.stats.waiting == 1)(client)
        waiting.cancel()
        await settled(lambda c: c.stats.waiting == 0)(client)
        assert (client.stats.running, client.stats.aborted) == (4, aborted + 1)
        await left(running)

    on_steady(test)


def test_leaving_between_two_chunks_of_the_prompt(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        aborted = client.stats.aborted
        prefilling = asyncio.create_task(collect(client, request([1] * 2000, max_tokens=40)))
        await settled(lambda c: c.stats.running == 1)(client)
        prefilling.cancel()
        await settled(is_idle)(client)
        assert client.stats.aborted == aborted + 1

    on_steady(test)


def test_leaving_before_the_engine_has_heard_of_it(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        before = client.stats
        encoding = asyncio.create_task(collect(client, request("5 " * 100_000)))
        await asyncio.sleep(0)
        encoding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await encoding
        assert await words(client, request("1", max_tokens=1)) == ["2"]
        assert (client.stats.aborted, client.stats.prompt_tokens) == (before.aborted, before.prompt_tokens + 1)

    on_steady(test)


def test_a_thousand_who_leave_cost_nothing(on_steady) -> None:
    async def leave(client: EngineClient, number: int) -> None:
        async with asyncio.timeout(0.001 * (number % 7)):
            await collect(client, request(str(number % 200), max_tokens=500))

    async def test(client: EngineClient) -> None:
        for start in range(0, 1000, 5):
            results = [leave(client, number) for number in range(start, start + 5)]
            for result in await asyncio.gather(*results, return_exceptions=True):
                assert isinstance(result, TimeoutError), result
        await settled(is_idle)(client)
        assert client.stats.leaked_blocks == 0
        assert await words(client, request("1", max_tokens=1)) == ["2"]

    on_steady(test)


def test_a_reader_who_does_not_read_gets_everything_in_few_pieces(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        wanted = client.stats.generation_tokens + 400
        stream = await first_output(client, request("5", max_tokens=400))
        await settled(lambda c: c.stats.generation_tokens == wanted)(client)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert rest[0].text.split() == numbers(7, 399)[-len(rest[0].token_ids) :]
        assert rest[0].num_output_tokens == 400

    on_steady(test)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(on_steady) -> None:
    async def test(client: EngineClient) -> None:
        tasks = [asyncio.create_task(collect(client, request(str(i), max_tokens=50))) for i in range(20)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert len(refused) == 20 - (4 + 3)
        assert all(1.0 <= error.retry_after <= 60.0 for error in refused)
        assert sum(isinstance(result, list) for result in results) == 7

    on_steady(test)


def test_tokenizing_beside_chats_has_an_end_and_keeps_no_chat_waiting(on_steady, monkeypatch) -> None:
    async def test(client: EngineClient) -> None:
        may_go = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(client._prompts, "decode", lambda ids, **options: may_go.wait(PATIENCE))
            waiting = [asyncio.create_task(client.detokenize([5])) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="3 texts are waiting"):
                await client.tokenize(request())
            assert await words(client, request("5", max_tokens=1)) == ["6"]
            may_go.set()
            assert await asyncio.gather(*waiting) == [True] * 3
        assert await client.detokenize([5]) == "5"

    on_steady(test)


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(start: Callable[..., Service]) -> Service:
    """2 sequences and a queue of 3; an input takes 5 ms."""
    service = start({"embeds": True, "embed_seconds": 0.005}, max_num_seqs=2, max_num_queued_requests=3)
    service.run(EngineClient.start)
    return service


def test_vectors_come_in_the_order_of_their_inputs(embedder: Service) -> None:
    async def test(client: EngineClient) -> None:
        outputs = await client.embed(["7 8", [9], "1 2 3 4"])
        assert [(list(output.vector), output.num_tokens) for output in outputs] == [
            ([7.0, 0.25], 2),
            ([9.0, 0.125], 1),
            ([1.0, 0.5], 4),
        ]
        with pytest.raises(InvalidRequestError, match="nothing to embed"):
            await client.embed([])

    embedder.run(test)


def test_too_many_requests_for_embeddings_are_refused_at_once(embedder: Service) -> None:
    async def test(client: EngineClient) -> None:
        results = await asyncio.gather(*(client.embed(["5"]) for _ in range(20)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert len(refused) == 20 - (2 + 3)
        assert all(1.0 <= error.retry_after <= 60.0 for error in refused)
        assert len(await client.embed(["5"])) == 1

    embedder.run(test)


def test_too_many_inputs_of_few_requests_are_refused_too(embedder: Service, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "MAX_QUEUED_INPUTS", 40)

    async def test(client: EngineClient) -> None:
        large = asyncio.create_task(client.embed(["5"] * 40))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="40 inputs are waiting"):
            await client.embed(["5"])
        assert len(await large) == 40
        assert len(await client.embed(["5"])) == 1

    embedder.run(test)


def test_a_small_request_for_embeddings_does_not_wait_for_a_large_one_which_counts_as_load(embedder: Service) -> None:
    async def test(client: EngineClient) -> None:
        large = asyncio.create_task(client.embed(["5 6"] * 200))
        await asyncio.sleep(0)
        assert client.stats.waiting == 200
        while not client.stats.queued_tokens:
            await asyncio.sleep(0.001)
        assert client.stats.queued_tokens <= 400
        assert len(await client.embed(["5"])) == 1
        assert not large.done()
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)
        assert (client.stats.waiting, client.stats.queued_tokens) == (0, 0)

    embedder.run(test)


@pytest.mark.parametrize("culprit", [POISON, BREAKING])
def test_an_engine_that_dies_fails_its_embeddings(start: Callable[..., Service], culprit: int) -> None:
    service = start({"embeds": True})
    service.run(EngineClient.start)

    async def test(client: EngineClient) -> None:
        with pytest.raises(EngineDeadError):
            await client.embed([[5], [culprit]])
        await settled(lambda c: c.state == "ready")(client)
        assert len(await client.embed([[5]])) == 1

    service.run(test)


# --- the way through --------------------------------------------------------------------------------------------------


def test_priorities_reach_the_engine_through_the_protocol(on_steady) -> None:
    # The steady engine serves first come first served, so this only proves that the fields travel.
    async def test(client: EngineClient) -> None:
        assert await words(client, request("1", max_tokens=1, priority=-5)) == ["2"]

    on_steady(test)


def test_spans_of_a_request_have_the_callers_parent_and_the_engines_times(on_steady, monkeypatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "trace", provider)
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    before = time.time_ns()

    async def test(client: EngineClient) -> None:
        context = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
        await collect(client, request("5 6 7", max_tokens=6, trace_context=context))

    on_steady(test)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["queue", "prefill", "decode"]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    assert {f"{span.parent.span_id:016x}" for span in spans} == {parent_id}
    stamps = [stamp for span in spans for stamp in (span.start_time, span.end_time)]
    assert stamps == sorted(stamps)
    assert before <= stamps[0] and stamps[-1] <= time.time_ns()


# --- death and resurrection -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(start: Callable[..., Service]) -> Service:
    """An engine that tests may kill, with room for two sequences; its timeouts are short."""
    service = start({"step_seconds": 0.002}, max_num_seqs=2, heartbeat_timeout=4.0, step_timeout=3.0)
    service.run(EngineClient.start)
    return service


def test_kill_in_mid_stream(mortal: Service) -> None:
    """Those that had begun fail, those that had not are answered, and so is who comes during the restart."""

    async def test(client: EngineClient) -> None:
        started = [await first_output(client, request(str(i), max_tokens=4000)) for i in range(2)]
        queued = asyncio.create_task(words(client, request("40")))
        await settled(lambda c: c.stats.waiting == 1)(client)
        before, pid = client.stats, client.pid
        os.kill(pid, signal.SIGKILL)
        for stream in started:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass
        assert client.state == "restarting"
        assert await words(client, request("50")) == ["51", "52", "53", "54"]
        assert await queued == ["41", "42", "43", "44"]
        assert (client.state, client.restarts) == ("ready", 1)
        assert client.pid != pid and not psutil.pid_exists(pid)
        assert client.stats.generation_tokens >= before.generation_tokens + 8
        await settled(is_idle)(client)

    mortal.run(test)


def test_a_stopped_process_is_replaced(mortal: Service) -> None:
    async def test(client: EngineClient) -> None:
        pid, restarts = client.pid, client.restarts
        os.kill(pid, signal.SIGSTOP)
        assert await words(client, request("50")) == ["51", "52", "53", "54"]
        assert client.restarts == restarts + 1 and not psutil.pid_exists(pid)

    mortal.run(test)


@pytest.mark.parametrize(
    ("culprit", "reason"), [(POISON, "SIGKILL"), (ENDLESS, "stepping for"), (BREAKING, "beyond repair")]
)
def test_a_request_that_takes_two_engines_with_it_fails_and_no_third_one(mortal: Service, culprit, reason) -> None:
    async def test(client: EngineClient) -> None:
        await words(client, request("1"))
        restarts = client.restarts
        with pytest.raises(EngineDeadError, match=reason):
            await collect(client, request([culprit]))
        assert await words(client, request("60")) == ["61", "62", "63", "64"]
        assert client.restarts == restarts + 2

    mortal.run(test)


def test_an_engine_that_cannot_be_replaced_is_given_up(start, caplog: pytest.LogCaptureFixture) -> None:
    service = start(max_restarts=1)
    service.run(EngineClient.start)

    async def test(client: EngineClient) -> None:
        service.behave(die_loading=True)
        waiting = []
        os.kill(client.pid, signal.SIGKILL)
        await settled(lambda c: c.state == "restarting")(client)
        waiting.append(asyncio.create_task(collect(client, request("1"))))
        (outcome,) = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(outcome, EngineUnavailableError)
        assert (client.state, client.restarts) == ("failed", 1)
        with pytest.raises(EngineUnavailableError, match="failed"):
            await collect(client, request("1"))

    service.run(test)
    told = [record.getMessage().rpartition("; ")[2] for record in caplog.records if "ended" in record.getMessage()]
    assert told == ["restart 1 of 1 in a row", "given up after 1 restarts in a row"]


def test_a_model_that_does_not_load_is_said_to_whoever_starts_it(start) -> None:
    service = start({"fail_load": "/home/someone/models/x.gguf: is no GGUF file"})

    async def test(client: EngineClient) -> None:
        with pytest.raises(EngineUnavailableError, match="loading"):
            await collect(client, request("1"))
        with pytest.raises(ModelLoadError, match=r"x\.gguf: is no GGUF file") as caught:
            await client.start()
        assert "/home/someone" not in str(caught.value)
        assert (client.state, client.pid) == ("failed", 0)

    service.run(test)


def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch) -> None:
    monkeypatch.setattr(engine_process, "COMMAND", ("/nonexistent/python",))
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        engine_process.EngineProcess(lambda message: None)
    assert psutil.Process().num_fds() == before


def test_a_process_that_cannot_be_started_is_said_to_whoever_starts_it(start, monkeypatch) -> None:
    service = start()
    monkeypatch.setattr(engine_process, "COMMAND", ("/nonexistent/python",))

    async def test(client: EngineClient) -> None:
        with pytest.raises(ModelLoadError, match="could not be started: No such file or directory"):
            await client.start()
        assert (client.state, client.pid) == ("failed", 0)

    service.run(test)


def test_a_model_that_is_not_there(start) -> None:
    service = start(model="/nonexistent/model.gguf")

    async def test(client: EngineClient) -> None:
        with pytest.raises(ModelLoadError, match="no such file"):
            await client.start()
        assert client.state == "failed"

    service.run(test)


def test_draining_finishes_what_runs_and_takes_nothing_new(start) -> None:
    service = start({"step_seconds": 0.01})
    service.run(EngineClient.start)

    async def test(client: EngineClient) -> None:
        stream = await first_output(client, request("5", max_tokens=30))
        pid = client.pid
        stopping = asyncio.create_task(client.stop(drain_timeout=PATIENCE))
        await asyncio.sleep(0)
        assert client.state == "draining"
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await collect(client, request("1"))
        assert client.token_bytes(5)  # of log-probabilities that the stream still brings
        rest = [output async for output in stream]
        assert rest[-1].num_output_tokens == 30
        await stopping
        assert not psutil.pid_exists(pid)

    service.run(test)


def test_stopping_at_once_tells_the_readers(start) -> None:
    service = start({"step_seconds": 0.01})
    service.run(EngineClient.start)

    async def test(client: EngineClient) -> None:
        stream = await first_output(client, request("5", max_tokens=4000))
        pid = client.pid
        await client.stop()
        assert not psutil.pid_exists(pid)
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            async for _ in stream:
                pass

    service.run(test)


ORPHAN = """
import asyncio, json, sys
from suimon.core_engine.client import EngineClient
from suimon.core_engine.config import EngineConfig

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1], executor="counting_executor:CountingExecutor"))
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_engine_outlives_its_gateway(start) -> None:
    folder = start().folder
    gateway = subprocess.Popen([sys.executable, "-c", ORPHAN, str(folder)], stdout=subprocess.PIPE)
    engine = psutil.Process(int(gateway.stdout.readline()))
    gateway.kill()
    gateway.communicate()
    engine.wait(PATIENCE)


def test_the_client_needs_no_torch() -> None:
    code = "import sys, suimon.core_engine.client, suimon.plugins.native; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

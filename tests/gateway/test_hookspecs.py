"""The contract itself: its first example, and what it offers to plugins."""

from __future__ import annotations

import asyncio
import inspect
import sys
import textwrap
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from suimon.gateway import hookspecs
from suimon.gateway.hookspecs import (
    Backend,
    BackendError,
    Delta,
    GenerateRequest,
    InvalidRequest,
    Message,
    stream_from_thread,
)
from suimon.gateway.plugin_manager import load_plugins


def test_the_plugin_in_the_docstring_is_complete(tmp_path: Path, monkeypatch: Any, serve: Any) -> None:
    text = inspect.getdoc(hookspecs) or ""
    source = text.split("::", 1)[1].split("\nThree rules", 1)[0]
    (tmp_path / "parrot_of_the_docstring.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        load_plugins(["parrot_of_the_docstring"], built_in=())
        parrot = sys.modules["parrot_of_the_docstring"]
        server = serve(parrot.Parrot())
        status, body = server.chat(model="parrot", messages=[{"role": "user", "content": "pieces of eight"}])
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "pieces of eight "
        assert body["usage"]["completion_tokens"] == 3
    finally:
        sys.modules.pop("parrot_of_the_docstring", None)


def test_the_text_to_answer() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    assert Message(role="user", content=parts).text == "ab"
    assert Message(role="assistant").text == ""
    messages = (Message(role="user", content="1"), Message(role="user", content="2"), Message(role="tool", content="3"))
    assert GenerateRequest(request_id="r", model="m", messages=messages).last_user_text() == "2"
    assert GenerateRequest(request_id="r", model="m", prompt="p").last_user_text() == "p"
    assert GenerateRequest(request_id="r", model="m", prompt=(1, 2)).last_user_text() == ""


def test_a_backend_needs_only_generate() -> None:
    class Least(Backend):
        model_id = "least"

        async def generate(self, request: Any) -> Any:
            yield Delta(finish_reason="stop")

    async def use() -> None:
        backend = Least()
        await backend.start()
        assert (await backend.health()).ready
        assert backend.load().running == 0
        request = GenerateRequest(request_id="r", model="least", prompt="x")
        with pytest.raises(InvalidRequest, match="least"):
            await backend.tokenize(request)
        with pytest.raises(InvalidRequest, match="least"):
            await backend.detokenize([1])
        await backend.stop()

    asyncio.run(use())
    with pytest.raises(TypeError):
        Backend()  # type: ignore[abstract]


def test_every_error_states_a_legal_status() -> None:
    kinds = [kind for kind in vars(hookspecs).values() if isinstance(kind, type) and issubclass(kind, BackendError)]
    assert len(kinds) >= 8
    for kind in kinds:
        assert 400 <= kind.status < 600
        assert kind.__doc__


async def collect(make: Any) -> list[str]:
    return [delta.text async for delta in stream_from_thread(make)]


def test_a_blocking_generator_is_streamed_in_order() -> None:
    assert asyncio.run(collect(lambda: (Delta(text=str(i)) for i in range(100)))) == [str(i) for i in range(100)]


def test_it_runs_outside_the_event_loop() -> None:
    def make() -> Any:
        yield Delta(text=threading.current_thread().name)

    (name,) = asyncio.run(collect(make))
    assert name != threading.main_thread().name


def test_its_errors_arrive_where_it_is_read() -> None:
    def make() -> Any:
        yield Delta(text="a")
        raise InvalidRequest("no", param="prompt")

    with pytest.raises(InvalidRequest, match="no"):
        asyncio.run(collect(make))


def test_it_is_held_back_by_a_slow_reader_and_closed_when_the_reader_leaves() -> None:
    made, closed = [], threading.Event()

    def make() -> Any:
        try:
            for i in range(10_000):
                made.append(i)
                yield Delta(text=str(i))
        finally:
            closed.set()

    async def read_three() -> None:
        async with aclosing(stream_from_thread(make)) as deltas:  # type: ignore[type-var]
            for _ in range(3):
                await anext(deltas)

    asyncio.run(read_three())
    assert closed.wait(10)
    assert len(made) < 50


def test_who_leaves_waits_for_the_thread_however_often_it_is_cancelled() -> None:
    blocked, release, closed = threading.Event(), threading.Event(), threading.Event()

    def make() -> Any:
        try:
            yield Delta(text="a")
            blocked.set()
            release.wait(30)
            yield Delta(text="b")
        finally:
            closed.set()

    async def leave() -> list[bool]:
        deltas = stream_from_thread(make)
        await anext(deltas)
        await asyncio.to_thread(blocked.wait, 30)
        reading = asyncio.ensure_future(anext(deltas))
        ended = []
        for _ in range(3):
            await asyncio.sleep(0)
            ended.append(reading.done())
            reading.cancel()
        await asyncio.wait({reading}, timeout=0.05)
        ended.append(reading.done())
        release.set()
        await asyncio.gather(reading, return_exceptions=True)
        return [*ended, reading.cancelled(), closed.is_set()]

    assert asyncio.run(leave()) == [False, False, False, False, True, True]


def test_a_cancellation_while_it_is_closed_is_not_lost() -> None:
    release = threading.Event()

    def make() -> Any:
        yield Delta(text="a")
        release.wait(30)
        yield Delta(text="b")

    async def close() -> None:
        deltas: Any = stream_from_thread(make)
        await anext(deltas)
        closing = asyncio.ensure_future(deltas.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(close())


def test_an_exit_in_the_thread_is_an_error_and_not_the_servers_end() -> None:
    def make() -> Any:
        yield Delta(text="a")
        sys.exit(3)

    with pytest.raises(RuntimeError, match="ended with SystemExit: 3") as raised:
        asyncio.run(collect(make))
    assert isinstance(raised.value.__cause__, SystemExit)

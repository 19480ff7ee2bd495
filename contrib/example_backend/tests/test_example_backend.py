"""The contract, and what this backend promises beyond it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from suimon_example.backend import ExampleBackend, register_backends

from suimon.gateway.hookspecs import Backend, GenerateRequest, InvalidRequest
from suimon.gateway.loopback import LoopbackServer
from suimon.gateway.testing import BackendContract


class TestExample(BackendContract):
    def create_backend(self) -> Backend:
        return ExampleBackend("backwards", pause=0.001)

    def test_the_words_come_backwards(self, loopback: LoopbackServer, backend: Backend) -> None:
        answer = self.ask(loopback, self.request(backend, prompt="pieces of eight"))
        assert answer.text == "eight of pieces "
        assert [delta.text for delta in answer.deltas] == ["eight ", "of ", "pieces ", ""]

    def test_a_prompt_without_words(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.refused(loopback, self.request(backend, prompt="  "), InvalidRequest)


def registered(options: dict[str, Any]) -> list[Backend]:
    model = SimpleNamespace(backend="example", served_model_name=None, options=options)
    other = SimpleNamespace(backend="echo", served_model_name=None, options={})
    found: list[Backend] = []
    register_backends(found.append, SimpleNamespace(models=(model, other)))  # type: ignore[arg-type]
    return found


def test_it_serves_the_models_that_name_it() -> None:
    assert [backend.model_id for backend in registered({"pause": 1})] == ["example"]


@pytest.mark.parametrize("options", [{"pauses": 1}, {"pause": "long"}, {"pause": -1}, {"pause": True}])
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="pause"):
        registered(options)


def test_a_request_that_was_left_counts_until_its_thread_has_ended() -> None:
    async def leave() -> list[int]:
        backend = ExampleBackend("backwards")
        in_word, go_on = threading.Event(), threading.Event()

        def recite(text: str) -> Iterator[str]:
            yield "first "
            in_word.set()
            go_on.wait(30)
            yield "second "

        backend._library.recite = recite  # type: ignore[method-assign]
        deltas: Any = backend.generate(GenerateRequest(request_id="r", model="backwards", prompt="a b"))
        await anext(deltas)
        await asyncio.to_thread(in_word.wait, 30)
        leaving = asyncio.ensure_future(deltas.aclose())
        await asyncio.sleep(0)
        running = [backend.load().running]
        go_on.set()
        await leaving
        return [*running, backend.load().running]

    assert asyncio.run(leave()) == [1, 0]

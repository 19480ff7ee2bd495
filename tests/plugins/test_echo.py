"""The echo backend, as a gateway would drive it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import Delta, GenerateRequest, InvalidRequest, Message, SamplingParams, Usage
from suimon.plugins import echo


def deltas(backend: echo.EchoBackend, **request: Any) -> list[Delta]:
    async def collect() -> list[Delta]:
        return [delta async for delta in backend.generate(GenerateRequest(request_id="r", model="echo", **request))]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    "prompt",
    [{"prompt": "a  b\nc"}, {"messages": (Message(role="user", content="a  b\nc"), Message(role="assistant"))}],
)
def test_answers_with_the_prompt_word_by_word(prompt) -> None:
    answer = deltas(echo.EchoBackend(), **prompt)
    assert [delta.text for delta in answer] == ["a  ", "b\n", "c", ""]
    assert [delta.finish_reason for delta in answer] == [None, None, None, "stop"]
    assert answer[-1].usage == Usage(prompt_tokens=3, completion_tokens=3)


def test_length_and_choices() -> None:
    answer = deltas(echo.EchoBackend(), prompt="a b c", sampling=SamplingParams(max_tokens=2, n=2))
    assert "".join(delta.text for delta in answer if delta.index == 1) == "a b "
    ends = [delta for delta in answer if delta.finish_reason]
    assert [(delta.index, delta.finish_reason) for delta in ends] == [(0, "length"), (1, "length")]
    assert [delta.usage for delta in ends] == [None, Usage(prompt_tokens=3, completion_tokens=4)]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        deltas(echo.EchoBackend(), prompt="")


def test_is_registered_for_the_models_that_name_it() -> None:
    models = (
        ModelSettings(backend="echo"),
        ModelSettings(backend="echo", served_model_name="parrot"),
        ModelSettings(backend="native"),
    )
    registered: list[Any] = []
    echo.register_backends(registered.append, Settings(models=models))
    assert [backend.model_id for backend in registered] == ["echo", "parrot"]

"""A backend's deltas, collected and held to the contract as they come. For ``testing``, whose tests use it.

Every broken rule is an AssertionError that names it. Knows hookspecs; refuses to know pytest and any backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from suimon.gateway.hookspecs import FINISH_REASONS, Backend, Delta, GenerateRequest, Usage


class Answer:
    """All deltas of one request, checked to be well-formed as they come."""

    def __init__(self, request: GenerateRequest) -> None:
        self.deltas: list[Delta] = []
        self.texts = [""] * request.sampling.n
        self.finish_reasons: dict[int, str] = {}
        self.usage: Usage | None = None

    def add(self, delta: Delta) -> None:
        assert isinstance(delta, Delta), f"generate must yield Deltas, not {type(delta).__name__}"
        assert 0 <= delta.index < len(self.texts), f"choice {delta.index} was not asked for"
        if delta.text or delta.token_ids or delta.finish_reason:
            assert delta.index not in self.finish_reasons, f"choice {delta.index} goes on after its finish_reason"
        self.deltas.append(delta)
        self.texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            assert delta.finish_reason in FINISH_REASONS, f"finish_reason {delta.finish_reason!r} is no such word"
            self.finish_reasons[delta.index] = delta.finish_reason
        self.usage = delta.usage or self.usage

    def check_end(self, request: GenerateRequest) -> None:
        """Every choice is finished, and the counts can be right."""
        unfinished = set(range(request.sampling.n)) - set(self.finish_reasons)
        assert not unfinished, f"choices {sorted(unfinished)} ended without finish_reason"
        assert self.usage is not None, "no delta carried usage"
        assert self.deltas[-1].usage is not None, "usage must come with the last delta"
        assert self.usage.prompt_tokens > 0 and self.usage.completion_tokens >= 0
        assert 0 <= self.usage.cached_tokens <= self.usage.prompt_tokens
        token_ids = sum(len(delta.token_ids) for delta in self.deltas)
        assert token_ids in (0, self.usage.completion_tokens), "usage counts other tokens than the deltas carried"

    @property
    def text(self) -> str:
        return self.texts[0]


async def collect(backend: Backend, request: GenerateRequest) -> Answer:
    """The checked answer to a request."""
    answer = Answer(request)
    async with closing(backend.generate(request)) as deltas:
        async for delta in deltas:
            answer.add(delta)
    answer.check_end(request)
    return answer


def closing(deltas: AsyncIterator[Delta]) -> aclosing[Any]:
    """The generator as a context that closes it."""
    assert hasattr(deltas, "aclose"), "generate must be an async generator: it is cancelled by being closed"
    return aclosing(deltas)

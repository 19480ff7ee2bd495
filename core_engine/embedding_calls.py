"""Requests for embeddings in flight, on the client's side: what was sent, what has come back, who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from suimon.core_engine.errors import EngineError, EngineUnavailableError, InvalidRequestError, error_class
from suimon.core_engine.messages import AbortRequest, Embedding, EmbedRequest, ToEngine


@dataclass(slots=True, eq=False)
class _Call:
    vectors: list[list[float] | None]
    result: asyncio.Future[list[list[float]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def take(self, message: Embedding) -> None:
        self.vectors[message.index] = message.vector
        complete = [vector for vector in self.vectors if vector is not None]
        if len(complete) == len(self.vectors) and not self.result.done():
            self.result.set_result(complete)

    def fail(self, error: EngineError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class EmbeddingCalls:
    """``send`` hands a message to the engine and says whether there is one. All on one event loop."""

    def __init__(self, send: Callable[[ToEngine], bool]) -> None:
        self._send = send
        self._calls: dict[str, _Call] = {}

    async def run(self, request_id: str, inputs: Sequence[list[int]]) -> list[list[float]]:
        """The inputs' vectors, in their order. Raises the engine's error; a cancelled call is forgotten by it too."""
        call = self._calls[request_id] = _Call([None] * len(inputs))
        try:
            if not self._deliver(EmbedRequest(request_id, list(inputs))):
                raise EngineUnavailableError("the engine of this model is being restarted: try again")
            return await call.result
        finally:
            del self._calls[request_id]
            if not call.result.done() or call.result.cancelled():
                self._send(AbortRequest(request_id))

    def _deliver(self, message: EmbedRequest) -> bool:
        try:
            return self._send(message)
        except ValueError as error:
            raise InvalidRequestError(f"the request is too large: {error}", param="input") from None

    def take(self, message: Embedding) -> None:
        """What the engine says about one input."""
        call = self._calls.get(message.request_id)
        if call is None:
            return  # its reader left
        if message.error is None:
            call.take(message)
        else:
            call.fail(error_class(message.error_kind)(message.error))

    def fail_all(self, error: EngineError) -> None:
        """The engine is gone, and with it all that it worked on."""
        for call in self._calls.values():
            call.fail(error)

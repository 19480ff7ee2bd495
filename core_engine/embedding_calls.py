"""Requests for embeddings in flight, on the client's side: what was sent, what has come back, who waits for it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from suimon.core_engine.errors import EngineError, EngineUnavailableError, InvalidRequestError, error_class
from suimon.core_engine.messages import AbortRequest, Embedding, EmbedRequest, ToEngine
from suimon.core_engine.outputs import EmbeddingOutput


@dataclass(slots=True, eq=False)
class _Call:
    """``num_missing`` inputs, of ``num_tokens`` tokens together once they are known, have no vector yet."""

    num_missing: int
    num_tokens: int = 0
    is_sent: bool = False
    outputs: list[EmbeddingOutput] = field(default_factory=list)
    result: asyncio.Future[list[EmbeddingOutput]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def send(self, inputs: Sequence[list[int]]) -> None:
        self.outputs = [EmbeddingOutput(array("f"), len(token_ids)) for token_ids in inputs]
        self.num_tokens = sum(output.num_tokens for output in self.outputs)
        self.is_sent = True

    def take(self, message: Embedding) -> None:
        output = self.outputs[message.index]
        output.vector.extend(message.vector)
        self.num_missing -= 1
        self.num_tokens -= output.num_tokens
        if not self.num_missing and not self.result.done():
            self.result.set_result(self.outputs)

    def fail(self, error: EngineError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class EmbeddingCalls:
    """``send`` hands a message to the engine and says whether there is one. All on one event loop."""

    def __init__(self, send: Callable[[ToEngine], bool]) -> None:
        self._send = send
        self._calls: dict[str, _Call] = {}

    @property
    def num_inputs(self) -> int:
        """Inputs that have no vector yet, those that are still being turned into tokens included."""
        return sum(call.num_missing for call in self._calls.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of those inputs that were sent."""
        return sum(call.num_tokens for call in self._calls.values())

    async def run(
        self, request_id: str, num_inputs: int, encoded: Awaitable[Sequence[list[int]]]
    ) -> list[EmbeddingOutput]:
        """The vectors of ``num_inputs`` inputs, which ``encoded`` turns into tokens, in their order.

        Raises what that raises, the engine's error, InvalidRequestError for more than one message holds and
        EngineUnavailableError if there is no engine now. The engine forgets a call that is cancelled, too.
        """
        call = self._calls[request_id] = _Call(num_inputs)
        try:
            inputs = await encoded
            call.send(inputs)
            if not self._deliver(EmbedRequest(request_id, list(inputs))):
                raise EngineUnavailableError("the engine of this model is being restarted: try again")
            return await call.result
        finally:
            del self._calls[request_id]
            if call.is_sent and (not call.result.done() or call.result.cancelled()):
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
            if call.is_sent:
                call.fail(error)

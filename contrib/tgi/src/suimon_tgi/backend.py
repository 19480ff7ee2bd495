"""A Text Generation Inference (TGI) server as a backend: every configured model whose ``backend`` is ``tgi``.

Completions go to TGI's own ``/generate_stream``. Chats go to its ``/v1/chat/completions``: the text that
``/chat_tokenize`` renders cannot be generated from by itself, since ``/generate_stream`` would put a second
beginning-of-sequence token in front of the one that the template wrote.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    BackendError,
    Capabilities,
    Delta,
    GenerateRequest,
    Health,
    Usage,
    hookimpl,
)
from suimon.plugins.openai_servers import Server
from suimon.plugins.openai_wire import DONE, AnswerReader, request_body
from suimon.plugins.remote_backend import LOOK_TIMEOUT, RemoteBackend
from suimon.plugins.remote_options import RemoteOptions, read_options
from suimon.plugins.remote_streams import EventReader
from suimon_tgi.native import REFUSED, NativeReader, body_of, check
from suimon_tgi.stop_strings import StopStrings

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings

log = logging.getLogger("suimon.tgi")
CHATS = Server("tgi")  # of OpenAI's parameters, what ``check`` lets through


class _Info(msgspec.Struct, frozen=True):
    max_total_tokens: int | None = None


class _ChatTokens(msgspec.Struct, frozen=True):
    tokenize_response: list[Any]


class TGIBackend(RemoteBackend):
    """Asks one TGI server, which serves one model."""

    def __init__(self, model: ModelSettings, options: RemoteOptions, **how: Any) -> None:
        super().__init__(model, options, **how)
        self._knows_limit = False
        self._settle(None)

    def _settle(self, max_model_len: int | None) -> None:
        self.capabilities = Capabilities(
            logprobs=True,
            seed=True,
            unsupported=frozenset(REFUSED),
            max_model_len=max_model_len,
            max_concurrency=self.options.max_concurrency,
        )

    async def look(self) -> Health:
        """The server's own health, and once what it says of its limits."""
        if not self._knows_limit:
            status, body = await self.client.look("/info", LOOK_TIMEOUT)
            if status == 200:
                try:
                    self._settle(msgspec.json.decode(body, type=_Info).max_total_tokens)
                    self._knows_limit = True
                except msgspec.DecodeError:
                    pass
        return await super().look()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer as it comes, cut at the first stop string."""
        check(request)
        sampling = request.sampling
        stops = StopStrings(sampling.stop, keep=sampling.include_stop_str_in_output)
        arrived, tokens = _Arrived(), 0
        async with aclosing(self._answer(request, arrived)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    yield _ending(delta, stops)
                    continue  # nothing follows but the end of the connection's use
                if stops.hit is not None:  # the server sees a stop string only where a token ends
                    break
                tokens = arrived.tokens
                yield msgspec.structs.replace(delta, text=stops.feed(delta.text))
            else:
                return
        usage = await self._usage(request, tokens)  # the first exchange is over
        yield _ending(Delta(finish_reason="stop", usage=usage), stops)

    async def _answer(self, request: GenerateRequest, arrived: _Arrived) -> AsyncGenerator[Delta, None]:
        """What the server sends, whichever endpoint it comes from. Raises BackendErrors."""
        path, body, reader = self._call(request)
        async with self.exchange(request, path, body, reader) as reply, aclosing(reply.items(EventReader())) as events:
            try:
                async for data in events:
                    if data == DONE:
                        break
                    arrived.tokens += 1  # TGI sends a token an event, of which not every one has text
                    for delta in reader.read(data):
                        yield delta
                    if isinstance(reader, NativeReader) and reader.is_complete:
                        break
            except BackendCrashed:
                if not reader.is_complete:
                    raise
            if isinstance(reader, AnswerReader):
                yield reader.end()
            elif not reader.is_complete:
                raise reply.failed("ended its answer before it was finished")
            await reply.release()

    def _call(self, request: GenerateRequest) -> tuple[str, dict[str, Any], AnswerReader | NativeReader]:
        if request.messages is None:
            return "/generate_stream", body_of(request), NativeReader(request, self.client.errors)
        plain = msgspec.structs.replace(request.sampling, include_stop_str_in_output=False)
        wanted = msgspec.structs.replace(request, sampling=plain)
        path, body = request_body(wanted, self.upstream_model, CHATS)
        if body["top_p"] == 1:
            del body["top_p"]  # refused, though it means off
        return path, body, AnswerReader(wanted, self.client.errors)

    async def _usage(self, request: GenerateRequest, completion_tokens: int) -> Usage:
        """The counts of an answer that we cut: nobody told them, so the prompt's tokens are asked for.

        Where that fails they stay 0: the answer itself is complete, and is not to end in an error.
        """
        try:
            return Usage(prompt_tokens=await self._prompt_tokens(request), completion_tokens=completion_tokens)
        except BackendError as error:
            log.warning("the prompt's tokens of request %s are not counted: %s", request.request_id, error)
            return Usage(completion_tokens=completion_tokens)

    async def _prompt_tokens(self, request: GenerateRequest) -> int:
        trace = request.trace_context
        if request.messages is None:
            found = await self.ask("/tokenize", {"inputs": request.prompt}, list[Any], trace_context=trace)
        else:
            messages = [msgspec.to_builtins(message) for message in request.messages]
            body = {"model": self.upstream_model, "messages": messages}
            found = (await self.ask("/chat_tokenize", body, _ChatTokens, trace_context=trace)).tokenize_response
        return len(found)


class _Arrived:
    """How many tokens of an answer have come."""

    tokens = 0


def _ending(delta: Delta, stops: StopStrings) -> Delta:
    """The last Delta: with what was held back, or with the stop string that was hit."""
    if stops.hit is not None:
        return msgspec.structs.replace(delta, finish_reason="stop", stop_reason=stops.hit)
    return msgspec.structs.replace(delta, text=delta.text + stops.rest(), stop_reason=None)


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "tgi":
            register(TGIBackend(model, read_options(model, RemoteOptions)))

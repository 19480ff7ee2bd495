"""A stand-in for Ollama: its routes, its fields and their types, the shapes of its answers. Unknown fields are refused.

It answers with the words of the prompt, a token each, and remembers what it was asked.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import uvicorn
from litestar import Litestar, Request, Response, get, post
from litestar.response import Stream


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    num_keep: int | None = None
    seed: int | None = None
    num_predict: int = -1
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    temperature: float = 0.8
    repeat_penalty: float = 1.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] = []
    num_ctx: int = 4096


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: Function


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str = ""
    tool_calls: list[ToolCall] = []
    tool_name: str = ""


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    stream: bool = True
    options: Options = msgspec.field(default_factory=Options)
    truncate: bool = True
    shift: bool = True
    think: bool | None = None
    keep_alive: str | None = None
    logprobs: bool = False
    top_logprobs: int = 0


class Chat(Common, kw_only=True):
    messages: list[Message]


class Generate(Common, kw_only=True):
    prompt: str
    raw: bool = False


class StandIn:
    """``asked``: (path, body) of each request. ``fail_after``, ``truncate_after``: tokens before that happens."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fail_after: int | None = None
        self.truncate_after: int | None = None
        self.status = 200
        self.done_reason: str | None = None
        self.stalls = False
        self.counts_prompt = True
        self.closed = 0
        self.url = ""

    def app(self) -> Litestar:
        @post("/api/chat", status_code=200, media_type="application/x-ndjson")
        async def chat(request: Request[Any, Any, Any]) -> Any:
            return await self._answer(request, Chat)

        @post("/api/generate", status_code=200, media_type="application/x-ndjson")
        async def generate(request: Request[Any, Any, Any]) -> Any:
            return await self._answer(request, Generate)

        @get("/api/version")
        async def version() -> dict[str, str]:
            return {"version": "0.13.0"}

        return Litestar([chat, generate, version], openapi_config=None)

    async def _answer(self, request: Request[Any, Any, Any], kind: Any) -> Any:
        raw = await request.body()
        self.asked.append((request.url.path, json.loads(raw)))
        try:
            asked = msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            return self._error(400, str(error))
        if self.status != 200:
            return self._error(self.status, "server busy, please try again.  maximum pending requests exceeded")
        if asked.model != "llama3":
            return self._error(404, f"model '{asked.model}' not found")
        text = asked.prompt if kind is Generate else "".join(message.content for message in asked.messages)
        if len(text) > asked.options.num_ctx and not asked.truncate:
            return self._error(400, "the input length exceeds the context length")
        return Stream(self._sent(asked, text, kind is Chat), media_type="application/x-ndjson")

    def _error(self, status: int, words: str) -> Response[bytes]:
        return Response(json.dumps({"error": words}).encode(), status_code=status)

    async def _sent(self, asked: Any, text: str, is_chat: bool) -> AsyncIterator[bytes]:
        try:
            async for line in self._lines(asked, text, is_chat):
                yield json.dumps(line).encode() + b"\n"
        finally:
            self.closed += 1

    async def _lines(self, asked: Any, text: str, is_chat: bool) -> AsyncIterator[Any]:
        def line(content: str, **more: Any) -> Any:
            what = {"message": {"role": "assistant", "content": content}} if is_chat else {"response": content}
            return {"model": asked.model, "created_at": "2026-01-01T00:00:00Z", **what, "done": False, **more}

        stop = min((text.find(s) for s in asked.options.stop if s in text), default=len(text))
        tokens, count = re.findall(r"\s*\S+|\s+", text[:stop]), 0
        for token in tokens:
            if count == self.fail_after:
                yield {"error": "an error was encountered while running the model: CUDA error"}
                return
            if count == self.truncate_after:
                return
            if count == asked.options.num_predict:
                break
            if self.stalls and count == 1:
                await asyncio.Event().wait()
            count += 1
            entry = {"token": token, "logprob": -count / 8, "bytes": list(token.encode())}
            logprobs = [entry | {"top_logprobs": [entry] * asked.top_logprobs}]
            yield line(token, **({"logprobs": logprobs} if asked.logprobs else {}))
        reason = self.done_reason or ("stop" if count == len(tokens) else "length")
        counts = {"prompt_eval_count": len(text.split())} if self.counts_prompt else {}
        yield line("", eval_count=count, total_duration=1, **counts) | {"done": True, "done_reason": reason}


@pytest.fixture(scope="module")
def running() -> Iterator[StandIn]:
    """The stand-in on a loopback port."""
    stand_in = StandIn()
    listener = socket.create_server(("127.0.0.1", 0))
    stand_in.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(stand_in.app(), ws="none", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def server(running: StandIn) -> Iterator[StandIn]:
    """The same as if it were new, and new again afterwards."""
    new = vars(StandIn()) | {"url": running.url}
    vars(running).update(new)
    yield running
    vars(running).update(vars(StandIn()) | {"url": running.url})

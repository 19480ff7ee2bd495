"""A stand-in for Text Generation Inference 3.3: its routes, its checks of a request, the shapes of its answers.

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


class Parameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: int | None = None
    watermark: bool = False
    details: bool = True
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class Generate(msgspec.Struct, forbid_unknown_fields=True):
    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class Chat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    frequency_penalty: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = []
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None


CHECKS = (
    ("temperature", lambda v: v > 0, "`temperature` must be strictly positive"),
    ("repetition_penalty", lambda v: v > 0, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p", lambda v: 0 < v < 1, "`top_p` must be > 0.0 and < 1.0"),
    ("top_k", lambda v: v > 0, "`top_k` must be strictly positive"),
    ("max_new_tokens", lambda v: v > 0, "`max_new_tokens` must be strictly positive"),
    ("seed", lambda v: 0 <= v < 2**64, "`seed` must be a u64"),
    ("top_n_tokens", lambda v: 0 <= v <= 5, "`top_n_tokens` must be >= 0 and <= 5"),
    ("stop", lambda v: len(v) <= 4, "`stop` supports up to 4 stop sequences"),
)


class StandIn:
    """``asked``: (path, body) of each request. ``fail_after``: tokens after which a generation fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fail_after: int | None = None
        self.error_type = "generation"
        self.truncate_after: int | None = None
        self.status = 200
        self.stalls = False
        self.empty_tokens = 0  # at the beginning of a chat: events that carry no text
        self.closed = 0
        self.url = ""

    def app(self) -> Litestar:
        return Litestar([*self._routes()], openapi_config=None)

    def _routes(self) -> Iterator[Any]:
        @post("/generate_stream", status_code=200, media_type="text/event-stream")
        async def generate_stream(request: Request[Any, Any, Any]) -> Any:
            asked = await self._take(request, Generate)
            if not isinstance(asked, Generate):
                return asked
            return self._events(self._native(asked.inputs, asked.parameters))

        @post("/v1/chat/completions", status_code=200, media_type="text/event-stream")
        async def chat(request: Request[Any, Any, Any]) -> Any:
            asked = await self._take(request, Chat)
            return self._events(self._chat(asked)) if isinstance(asked, Chat) else asked

        @post("/tokenize", status_code=200)
        async def tokenize(request: Request[Any, Any, Any]) -> Any:
            asked = await self._take(request, Generate)
            return [{"id": 1, "text": "<s>", "start": 0, "stop": 0}, *tokens_of(asked.inputs)]

        @post("/chat_tokenize", status_code=200)
        async def chat_tokenize(request: Request[Any, Any, Any]) -> Any:
            asked = await self._take(request, Chat)
            text = prompt_of(asked)
            return {"tokenize_response": tokens_of(text), "templated_text": text}

        @get("/health")
        async def health() -> Response[bytes]:
            return Response(b"", status_code=self.status)

        @get("/info")
        async def info() -> dict[str, Any]:
            return {"model_id": "stand-in", "max_total_tokens": 99, "max_concurrent_requests": 128}

        yield from (generate_stream, chat, tokenize, chat_tokenize, health, info)

    async def _take(self, request: Request[Any, Any, Any], kind: Any) -> Any:
        raw = await request.body()
        self.asked.append((request.url.path, json.loads(raw)))
        if self.status != 200:
            return self._error(self.status, "Model is overloaded", "overloaded")
        try:
            asked = msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            return self._error(422, f"Failed to deserialize the JSON body: {error}", "validation")
        checked = asked.parameters if kind is Generate else asked
        for name, fits, words in CHECKS:
            value = getattr(checked, name, None)
            is_greedy_chat = kind is Chat and name == "temperature" and value == 0
            if value is not None and not fits(value) and not is_greedy_chat:
                return self._error(422, f"Input validation error: {words}", "validation")
        text = asked.inputs if kind is Generate else prompt_of(asked)
        if len(tokens_of(text)) > 95:
            words = f"`inputs` must have less than 95 tokens. Given: {len(tokens_of(text))}"
            return self._error(422, f"Input validation error: {words}", "validation")
        return asked

    def _error(self, status: int, words: str, kind: str) -> Response[Any]:
        return Response(json.dumps({"error": words, "error_type": kind}).encode(), status_code=status)

    def _events(self, events: AsyncIterator[Any]) -> Stream:
        async def sent() -> AsyncIterator[bytes]:
            try:
                async for event in events:
                    yield b"data:" + json.dumps(event).encode() + b"\n\n"  # no space, as axum writes it
            finally:
                self.closed += 1

        return Stream(sent(), media_type="text/event-stream")

    async def _tokens(self, text: str, limit: int | None, stop: list[str]) -> AsyncIterator[tuple[Any, str | None]]:
        """(token, how it ends or None), a stop sequence being seen only where the text so far ends with it."""
        tokens, so_far = tokens_of(text), ""
        for number, token in enumerate(tokens, start=1):
            if number - 1 == self.fail_after:
                raise RuntimeError
            if number - 1 == self.truncate_after:
                return
            if self.stalls and number == 2:
                await asyncio.Event().wait()
            so_far += token["text"]
            token = {"id": token["id"], "text": token["text"], "logprob": -number / 8, "special": False}
            if any(so_far.endswith(each) for each in stop):
                yield token, "stop_sequence"
                return
            yield token, "length" if number == limit else None
            if number == limit:
                return
        yield {"id": 2, "text": "</s>", "logprob": -0.5, "special": True}, "eos_token"

    async def _native(self, inputs: str, asked: Parameters) -> AsyncIterator[Any]:
        text, count = "", 0
        try:
            async for token, end in self._tokens(inputs, asked.max_new_tokens, asked.stop):
                text, count = text + token["text"] * (not token["special"]), count + 1
                details = None
                if end is not None:
                    length = len(tokens_of(inputs)) + 1
                    details = {"finish_reason": end, "generated_tokens": count, "input_length": length, "seed": None}
                top = [token | {"id": 7, "text": "other", "logprob": -9.0}] * (asked.top_n_tokens or 0)
                last = {"generated_text": text if end else None, "details": details}
                yield {"index": count, "token": token, **({"top_tokens": top} if top else {}), **last}
        except RuntimeError:
            yield {"error": "Request failed during generation", "error_type": self.error_type}

    async def _chat(self, asked: Chat) -> AsyncIterator[Any]:
        prompt, count = prompt_of(asked), 0
        shape = {"object": "chat.completion.chunk", "id": "", "created": 1, "model": "stand-in"}
        text = prompt.removeprefix("<s>")
        for _ in range(self.empty_tokens):
            count += 1
            yield shape | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}
        async for token, end in self._tokens(text, asked.max_tokens, asked.stop):
            count += 1
            reason = {"eos_token": "stop", "stop_sequence": "stop"}.get(end or "", end)
            delta = {"role": "assistant", "content": "" if token["special"] else token["text"]}
            logprobs = None
            if asked.logprobs:
                entry = {"token": token["text"], "logprob": token["logprob"]}
                top = [entry] * (asked.top_logprobs or 0)
                logprobs = {"content": [entry | {"top_logprobs": top}]}
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            yield shape | {"choices": [choice], "usage": None}
        usage = {"prompt_tokens": len(tokens_of(prompt)), "completion_tokens": count, "total_tokens": 0}
        yield shape | {"choices": [], "usage": usage}


def tokens_of(text: str) -> list[dict[str, Any]]:
    """A word with the spaces before it is a token."""
    found = re.finditer(r"<s>|\s*\S+|\s+", text)
    return [{"id": 10 + i, "text": m[0], "start": m.start(), "stop": m.end()} for i, m in enumerate(found)]


def prompt_of(asked: Chat) -> str:
    return "<s>" + "".join(message["content"] for message in asked.messages)


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

"""A scripted backend, and a real server on a loopback port in front of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn

from suimon.gateway import app as gateway_app
from suimon.gateway.access import AccessLayer
from suimon.gateway.config import Settings
from suimon.gateway.hookspecs import (
    Backend,
    Capabilities,
    Delta,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    Usage,
)
from suimon.gateway.http_protocol import limited_protocol
from suimon.gateway.plugin_manager import PluginManager, load_plugins

STALL = object()  # a step of a script: wait until closed
EVERYTHING = Capabilities(token_prompts=True, logprobs=True, seed=True, tokenize=True, max_model_len=100)


def words(*texts: str, n: int = 1, **last: Any) -> list[Delta]:
    """The deltas of ``n`` equal choices: one per text, then an ending, then the usage."""
    steps = [Delta(text=text, index=i, token_ids=(1,)) for text in texts for i in range(n)]
    steps += [Delta(index=i, finish_reason="stop") for i in range(n)]
    usage = Usage(prompt_tokens=3, completion_tokens=len(texts) * n, cached_tokens=2)
    steps[-1] = Delta(index=n - 1, **{"finish_reason": "stop", "usage": usage} | last)
    return steps


class ScriptedBackend(Backend):
    """Answers each request with the steps of ``script``: a Delta is yielded, an exception raised, a number slept,
    STALL waits until the generator is closed. Records what it was asked and how its generators ended."""

    def __init__(
        self,
        script: Sequence[Any] | Callable[[GenerateRequest], Sequence[Any]] | None = None,
        *,
        model_id: str = "scripted",
        capabilities: Capabilities = EVERYTHING,
    ) -> None:
        self.model_id = model_id
        self.capabilities = capabilities
        self.script: Any = words("Hello", " world") if script is None else script
        self.requests: list[GenerateRequest] = []
        self.opened = 0
        self.closed = 0
        self.most_at_once = 0
        self.state = Health()
        self.startable = threading.Event()  # start() waits for it
        self.startable.set()
        self.start_error: Exception | None = None
        self.stopped = 0

    @property
    def running(self) -> int:
        return self.opened - self.closed

    def load(self) -> Load:
        return Load(running=self.running)

    async def start(self) -> None:
        while not self.startable.is_set():
            await asyncio.sleep(0.01)
        if self.start_error is not None:
            raise self.start_error

    async def stop(self) -> None:
        self.stopped += 1

    async def health(self) -> Health:
        return self.state

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        self.opened += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            for step in self.script(request) if callable(self.script) else self.script:
                if isinstance(step, Exception):
                    raise step
                if step is STALL:
                    await asyncio.Event().wait()
                elif isinstance(step, int | float):
                    await asyncio.sleep(step)
                else:
                    yield step
        finally:
            self.closed += 1

    async def tokenize(self, request: GenerateRequest, *, add_special_tokens: bool = True) -> list[int]:
        text = request.prompt if isinstance(request.prompt, str) else "|".join(m.text for m in request.messages or ())
        return [1] * add_special_tokens + [ord(c) for c in text]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        if any(token_id > 1000 for token_id in token_ids):
            raise InvalidRequest("token id outside the vocabulary of 1000", param="tokens")
        return "".join(chr(token_id) for token_id in token_ids)


class Running:
    """A server that runs: where, and what is inside."""

    def __init__(self, app: Any, port: int, backends: Sequence[Any], server: uvicorn.Server) -> None:
        self.uvicorn = server
        self.loop: asyncio.AbstractEventLoop
        self.app = app
        self.port = port
        self.backend = backends[0]
        self.backends = backends
        self.gateway = app.state.gateway
        self.url = f"http://127.0.0.1:{port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, lower-cased headers, body); a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            sent = {"content-type": "application/json"} if body is not None else {}
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, sent | (headers or {}))
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, decoded JSON)."""
        status, _, answer = self.request("POST", path, body, headers)
        return status, json.loads(answer)

    def chat(self, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/chat/completions", chat_body(**fields))

    def complete(self, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", {"model": "scripted", "prompt": "Once"} | fields)

    def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """The events of a stream, decoded; the last is "[DONE]"."""
        body = chat_body(stream=True, **fields)
        if path == "/v1/completions":
            body = {"model": "scripted", "prompt": "Once", "stream": True} | fields
        status, headers, answer = self.request("POST", path, body)
        assert status == 200, answer
        assert headers["content-type"].startswith("text/event-stream")
        return parse_events(answer)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.settimeout(20)
        return connection


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]} | fields


def parse_events(raw: bytes) -> list[Any]:
    """Every event is one data line and one blank line; comments are skipped."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw[:-2].split(b"\n\n"):
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: ") and b"\n" not in block
        data = block[len(b"data: ") :]
        events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return events


def wait_until(condition: Callable[[], bool], what: str = "the condition", timeout: float = 15.0) -> None:
    """Poll until the condition holds; the time is only a limit on a failing test."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {timeout} s"
        time.sleep(0.005)


class BackendsPlugin:
    """A plugin that registers ready-made backends."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def register(self, manager: PluginManager) -> None:
        from suimon.gateway.hookspecs import hookimpl

        backends = self._backends

        class Plugin:
            @hookimpl
            def register_backends(self, register: Any, settings: Any) -> None:
                for backend in backends:
                    register(backend)

        manager.register(Plugin(), "scripted")


@contextmanager
def running_server(
    *backends: Backend, plugins: Sequence[Any] = (), named: Sequence[Any] = (), ready: bool = True, **settings: Any
) -> Iterator[Running]:
    """A gateway with these backends and plugins behind the real HTTP stack, until the context ends."""
    manager = load_plugins(built_in=())
    backends = backends or (ScriptedBackend(),)
    BackendsPlugin(backends).register(manager)
    for plugin in (*plugins, *named):
        manager.register(plugin)
    manager.named.extend(named)
    configured = Settings(port=0, **settings)
    app = gateway_app.create_app(configured, manager)
    listener = socket.create_server(("127.0.0.1", 0))
    layered = AccessLayer(app, app.state.drain, app.state.telemetry)
    config = uvicorn.Config(
        layered, http=limited_protocol(configured), ws="none", lifespan="on", log_config=None, access_log=False
    )
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    found = Running(app, listener.getsockname()[1], backends, server)

    async def live() -> None:
        found.loop = asyncio.get_running_loop()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server's start")
        if ready:
            wait_until(lambda: all(s.started for s in found.gateway.router.served.values()), "the backends' start")
        yield found
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def scripted() -> type[ScriptedBackend]:
    return ScriptedBackend


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """``serve(*backends, **settings)``: a Running that lives as long as the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(running_server(*args, **kwargs))


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Callable[..., Running]]:
    """The same for servers that a module's tests share."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(running_server(*args, **kwargs))


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A server with one scripted backend, shared by a module's tests; set ``plain.backend.script`` in each."""
    with running_server() as found:
        yield found


@pytest.fixture
def tools() -> Any:
    """The helpers above, for test modules, which cannot import one another."""
    import types

    return types.SimpleNamespace(
        STALL=STALL,
        EVERYTHING=EVERYTHING,
        words=words,
        chat_body=chat_body,
        parse_events=parse_events,
        wait_until=wait_until,
        ScriptedBackend=ScriptedBackend,
    )

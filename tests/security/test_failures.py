"""Engines that are killed or stopped under load, and servers that are told to stop: what clients see, and how soon.

The times are promises, each far above what is measured; labels as in SECURITY.md.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

LONG = {"max_tokens": 1800, "stream": True}


def begun(server: Any, prompt: str, **options: Any) -> socket.socket:
    """A stream that has given something."""
    connection = server.send(prompt=prompt, **LONG | options)
    data = b""
    while b"data: " not in data:
        piece = connection.recv(1)  # no more than that, so that the rest can be read as a whole
        assert piece, data
        data += piece
    connection.settimeout(60)
    return connection


def last_events(connection: socket.socket) -> list[bytes]:
    """The last two events of a stream, undecoded, once it has ended."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    connection.close()
    assert data.endswith(b"0\r\n\r\n"), data[-100:]
    return [part.split(b"\n\n")[0] for part in data.split(b"data: ")[-2:]]


class Watch:
    """Seconds, since it was made, at which things were first seen, each looked for in a thread of its own."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seen: dict[str, float] = {}
        self._threads: list[threading.Thread] = []

    def see(self, name: str, work: Callable[[], Any]) -> None:
        def run() -> None:
            work()
            self.seen[name] = time.monotonic() - self._began

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> dict[str, float]:
        for thread in self._threads:
            thread.join(60)
        return self.seen


def test_a_killed_engine(server: Any, tools: Any) -> None:
    """R3: streams end with an error, probes tell, the server stays, and whoever had not begun is answered."""
    gateway, engine = server.process.pid, server.engine()
    wanted = [server.text(f"waiting {i}", max_tokens=5) for i in range(3)]
    streams = [begun(server, f"{i}") for i in range(4)]
    answers: dict[int, str] = {}

    def wait(number: int) -> None:
        answers[number] = server.text(f"waiting {number}", max_tokens=5)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in waiting:
        thread.start()
    tools.wait_until(lambda: server.gauge("suimon_requests_waiting") == 3, "three that wait")
    endings: list[list[bytes]] = []
    engine.kill()
    watch = Watch()
    watch.see("not ready", lambda: tools.wait_until(lambda: not server.is_ready(), "not ready"))
    watch.see("streams ended", lambda: endings.extend(map(last_events, streams)))
    seen = watch.join()
    for thread in waiting:
        thread.join(60)
    assert (seen["not ready"] < 1.0, seen["streams ended"] < 2.0) == (True, True), seen
    assert all(b'"code":"backend_crashed"' in error and done == b"[DONE]" for error, done in endings)
    assert [answers[number] for number in range(3)] == wanted
    assert (server.process.pid, server.process.poll()) == (gateway, None)
    assert server.engine().pid != engine.pid


def test_a_stopped_engine(server: Any) -> None:
    """R4: its socket stays open and silent; it is killed and replaced after ``heartbeat_timeout`` (here 7 s)."""
    engine, stream = server.engine(), begun(server, "x")
    engine.suspend()
    error, done = last_events(stream)
    assert b'"code":"backend_crashed"' in error and done == b"[DONE]"
    assert len(server.text("x", max_tokens=3)) > 0
    assert not engine.is_running() and server.engine().pid != engine.pid


@pytest.fixture
def stopping(start_server: Callable[..., Any]) -> Callable[..., Any]:
    return lambda drain_timeout: start_server("--drain-timeout", drain_timeout, "--max-num-seqs", "3")


def test_sigterm_lets_streams_and_the_queue_finish(stopping: Callable[..., Any], tools: Any) -> None:
    """R5, B68."""
    with stopping("50") as server:
        family = server.family()
        streams = [begun(server, f"{i}", max_tokens=150) for i in range(3)]
        queued = server.send(prompt="queued", max_tokens=5, stream=True)
        tools.wait_until(lambda: server.gauge("suimon_requests_waiting") == 1, "one that waits")
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        tools.wait_until(lambda: not server.is_ready(), "not ready")
        assert time.monotonic() - began < 1.0
        body = {"model": "tiny", "prompt": "new"}
        refused = httpx.post(server.http.base_url.join("/v1/completions"), json=body, headers=server.http.headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "backend_unavailable")
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
        assert all(b'"finish_reason":"length"' in last_events(each)[0] for each in [*streams, queued])
        assert server.process.wait(10) == 0
        assert psutil.wait_procs(family, 10)[1] == []


ESCAPE = "{% if 'go' in messages[0].content %}{{ ''.__class__.__mro__ }}{% endif %}{{ messages[0].content }}"


def test_a_hostile_template_and_sigterm_without_a_drain(start_server: Callable[..., Any]) -> None:
    """Class 4: a model's own template that would break out costs only who asks for it. R5: the end within 2 s."""
    with start_server("--drain-timeout", "0", template=ESCAPE) as server:
        error = server.refusal("/v1/chat/completions", messages=[{"role": "user", "content": "go"}])
        assert "SecurityError" in error["message"]
        good = [{"role": "user", "content": "fine"}]
        assert server.post("/v1/chat/completions", messages=good, max_tokens=2)[0] == 200
        family = server.family()
        streams = [begun(server, f"{i}") for i in range(3)]
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        for error, done in map(last_events, streams):
            assert b'"code":"backend_unavailable"' in error and done == b"[DONE]"
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 2.0
        assert psutil.wait_procs(family, 10)[1] == []

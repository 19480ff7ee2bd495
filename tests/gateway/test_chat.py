"""``suimon chat`` against a scripted server: piped, and on a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from suimon.gateway import chat

PATIENCE = 30.0


def event(content: str | None = None, **more: Any) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {} if content is None else {"content": content}}], **more}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Script(BaseHTTPRequestHandler):
    """Answers with ``events``; ``asked`` holds the bodies and keys it was sent."""

    events: ClassVar[list[bytes]] = []
    asked: ClassVar[list[Any]] = []
    keys: ClassVar[list[str | None]] = []
    models: ClassVar[bytes] = b'{"data": [{"id": "first"}, {"id": "second"}]}'
    status: ClassVar[int] = 200
    hold: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self._begin(self.status if self.status == 401 else 200)
        self.wfile.write(self.models if self.status != 401 else self.events[0])

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.keys.append(self.headers["authorization"])
        self._begin(self.status)
        for piece in self.events:
            if piece == b"hold":
                self.hold.wait(PATIENCE)
                continue
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(piece)
                self.wfile.flush()

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.send_header("connection", "close")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def script() -> Iterator[tuple[type[Script], str]]:
    """A fresh Script class and the URL it answers at."""
    fresh = type("FreshScript", (Script,), {"events": [], "asked": [], "keys": [], "hold": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), fresh)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield fresh, f"http://127.0.0.1:{server.server_port}"
    fresh.hold.set()
    server.shutdown()
    server.server_close()


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SUIMON_")}
    return kept | {"HOME": str(home), "TERM": "dumb"}


def piped(prompt: str, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "suimon.gateway.cli", "chat", *flags]
    return subprocess.run(
        command, input=prompt, capture_output=True, text=True, timeout=PATIENCE, env=environment(home)
    )


# --- Piped ------------------------------------------------------------------------------------------------------------


def test_an_answer_has_an_end_and_stays_near_the_point_unless_the_user_says_otherwise(
    script: tuple[type[Script], str], tmp_path: Path
) -> None:
    server, url = script
    server.events = [event("Hello"), event(None, usage={}), DONE]
    assert piped("hi\n", tmp_path, "--url", url).returncode == 0
    assert server.asked[-1]["max_tokens"] == 1024
    assert 0 < server.asked[-1]["temperature"] < 1


def test_one_prompt_from_standard_input_gets_one_answer(script: tuple[type[Script], str], tmp_path: Path) -> None:
    server, url = script
    # Line separators inside JSON are text, a control sequence must not reach the terminal, keepalives are skipped.
    server.events = [event(), b": ping\n\n", event("Par\u2028"), event("is\x1b[2J"), event(None, usage={}), DONE]
    flags = (
        "--url",
        f"{url}/v1/",
        "--api-key",
        "k",
        "--system",
        "Be brief.",
        "--temperature",
        "0",
        "--max-tokens",
        "5",
    )
    result = piped("Capital of France?\n", tmp_path, *flags)
    assert (result.returncode, result.stdout, result.stderr) == (0, "Par\u2028is[2J\n", "")
    assert server.asked == [
        {
            "model": "first",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Capital of France?"},
            ],
            "stream": True,
            "temperature": 0.0,
            "max_tokens": 5,
        }
    ]
    assert server.keys == ["Bearer k"]


def test_events_cut_anywhere_are_put_together(script: tuple[type[Script], str], tmp_path: Path) -> None:
    server, url = script
    whole = event("水門") + DONE
    server.events = [whole[index : index + 1] for index in range(len(whole))]
    assert piped("x", tmp_path, "--url", url, "--model", "m").stdout == "水門\n"
    assert server.asked[0]["model"] == "m"


@pytest.mark.parametrize(
    ("status", "events", "said"),
    [
        (200, [event("half"), b'data: {"error": {"message": "the engine died"}}\n\n', DONE], "the engine died"),
        (200, [event("half")], "ended the answer before it was complete"),
        (200, [event("half"), b"data: {half\n\n"], "no event of an OpenAI-compatible server"),
        (200, [b"data: [1]\n\n"], "no event of an OpenAI-compatible server"),
        (429, [b'{"error": {"message": "too busy"}}'], "too busy"),
        (500, [b"<html>"], "status 500"),
        (401, [b'{"error": {"message": "no valid key"}}'], "no valid key"),
    ],
)
def test_an_answer_that_fails_is_one_line_and_a_failure(
    script: tuple[type[Script], str], tmp_path: Path, status: int, events: list[bytes], said: str
) -> None:
    server, url = script
    server.status, server.events = status, events
    result = piped("x", tmp_path, "--url", url)
    assert result.returncode == 1
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_nobody_there_tells_how_to_start_a_server(tmp_path: Path) -> None:
    result = piped("x", tmp_path, "--url", "http://127.0.0.1:9")
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "suimon serve" in result.stderr and "--url" in result.stderr


@pytest.mark.parametrize("models", [b"hello", b"[]", b'{"data": []}'])
def test_somebody_else_there_is_told(script: tuple[type[Script], str], tmp_path: Path, models: bytes) -> None:
    server, url = script
    server.models = models
    result = piped("x", tmp_path, "--url", url)
    assert result.returncode == 1 and result.stderr.startswith("suimon: error: ") and result.stderr.count("\n") == 1


def test_a_key_is_sent_as_utf8_and_a_line_end_in_it_is_told(script: tuple[type[Script], str], tmp_path: Path) -> None:
    server, url = script
    server.events = [event("x"), DONE]
    assert piped("hi", tmp_path, "--url", url, "--api-key", "clé").returncode == 0
    assert server.keys == ["Bearer clé".encode().decode("latin-1")]
    result = piped("hi", tmp_path, "--url", url, "--api-key", "k\r")
    assert result.returncode == 1 and "--api-key" in result.stderr and "Traceback" not in result.stderr


def test_no_prompt_is_told(script: tuple[type[Script], str], tmp_path: Path) -> None:
    assert "no prompt" in piped("  \n", tmp_path, "--url", script[1]).stderr


# --- On a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """``suimon chat`` on a pseudo-terminal."""

    def __init__(self, url: str, home: Path) -> None:
        self._main, side = pty.openpty()
        command = [sys.executable, "-m", "suimon.gateway.cli", "chat", "--url", url]
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environment(home), start_new_session=True,
            preexec_fn=lambda: _own_terminal(side),
        )  # fmt: skip
        os.close(side)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait_for(self, text: str) -> str:
        """What was shown up to ``text``, which is taken as read."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._seen:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._main], [], [], 0.1)[0]:
                self._seen += os.read(self._main, 4096).decode()
        before, _, self._seen = self._seen.partition(text)
        return before

    def interrupt(self) -> None:
        """Ctrl-C while a line is being typed. One that comes while the line editor is not asleep may be lost in it."""
        self.type("x")
        self.wait_for("x")
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.005)
        self.type("\x03")

    def close(self) -> int:
        """Exit status."""
        with contextlib.suppress(OSError):  # the other side is closed
            while select.select([self._main], [], [], PATIENCE)[0] and os.read(self._main, 4096):
                pass
        status = self.process.wait(PATIENCE)
        os.close(self._main)
        return status


def _own_terminal(descriptor: int) -> None:
    """Make it the controlling terminal, so that Ctrl-C becomes a signal; one that a shell's background job ignores."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def test_a_conversation_remembers_until_it_is_cleared(script: tuple[type[Script], str], tmp_path: Path) -> None:
    server, url = script
    server.events = [event("Hello "), event("there"), DONE]
    terminal = Terminal(url, tmp_path)
    terminal.wait_for("> ")
    for line in ("/system Be kind.", "one", "two", "/clear", "three", "/nonsense"):
        terminal.type(f"{line}\n")
        shown = terminal.wait_for("> ")
        assert ("Hello there" in shown) == (not line.startswith("/"))
        assert ("/exit leaves" in shown) == (line == "/nonsense")
    terminal.type("/exit\n")
    assert terminal.close() == 0
    assert [[message["content"] for message in body["messages"]] for body in server.asked] == [
        ["Be kind.", "one"],
        ["Be kind.", "one", "Hello there", "two"],
        ["Be kind.", "three"],
    ]
    assert "two" in (tmp_path / ".cache" / "suimon" / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_conversation(script: tuple[type[Script], str], tmp_path: Path) -> None:
    server, url = script
    server.events = [event("Once upon"), b"hold"]
    terminal = Terminal(url, tmp_path)
    terminal.wait_for("> ")
    terminal.type("a story\n")
    terminal.wait_for("Once upon")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    server.hold.set()
    server.events = [event("The end"), DONE]
    terminal.type("and?\n")
    terminal.wait_for("The end")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["a story", "Once upon", "and?"]
    terminal.wait_for("> ")
    terminal.interrupt()
    terminal.wait_for("> ")
    terminal.interrupt()
    assert terminal.close() == 0


def test_an_error_leaves_the_conversation_as_it_was(script: tuple[type[Script], str], tmp_path: Path) -> None:
    server, url = script
    server.status, server.events = 503, [b'{"error": {"message": "loading"}}']
    terminal = Terminal(url, tmp_path)
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("error: loading")
    server.status, server.events = 200, [event("fine"), DONE]
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("fine")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    assert [message["content"] for message in server.asked[1]["messages"]] == ["two"]


def test_an_answer_left_early_stays_as_far_as_it_was_read(script: tuple[type[Script], str]) -> None:
    server, url = script
    server.events = [event("a"), event("b"), event("c"), DONE]
    with chat.connect(url, None) as client:
        conversation = chat.Conversation(client, "m")
        pieces = conversation.ask("x")
        assert next(pieces) == "a"
        del pieces
        assert [message["content"] for message in conversation.messages] == ["x", "a"]

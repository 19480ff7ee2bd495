"""Messages to prompt text by the model's own chat template. Knows worker processes and deadlines; no jinja2, no tokens.

A chat template is a program that comes with the model, and it runs over what strangers send. So it runs in a worker
process (template_worker.py) that can be killed: when a rendering takes longer than its deadline, or its process dies,
that one request fails and the worker is replaced; the others do not notice.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suimon.core_engine.errors import EngineUnavailableError, InvalidRequestError, ModelLoadError
from suimon.core_engine.json_frames import encode_frame, read_frame

DEADLINE = 5.0  # seconds that one rendering may take
START_TIMEOUT = 30.0  # seconds until a new worker must have compiled the template, on a machine under load
MAX_CHARS = 16 << 20
MEMORY_LIMIT = 1 << 30

_CLOSED = "the renderer of chat templates is closed"
# What a worker needs to find Python and jinja2. No keys or tokens of the operator: a template might get out.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class ChatTemplateRenderer:
    """Renders one template. Blocking, and safe to use from several threads.

    ``special_tokens`` (``bos_token``, ...) are variables of the template. Up to ``workers`` requests render at once,
    each for at most ``deadline`` seconds; more wait their turn. ``template`` may be None: then every rendering is
    refused, with what to do about it.
    """

    def __init__(
        self,
        template: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        workers: int = 2,
        deadline: float = DEADLINE,
        max_chars: int = MAX_CHARS,
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        self.template = template
        self._deadline = deadline
        self._setup = {
            "template": template,
            "variables": dict(special_tokens or {}),
            "max_chars": max_chars,
            "memory_limit": memory_limit,
            # For a worker whose parent is gone; while it is there, the deadline ends a rendering sooner.
            "cpu_seconds": int(deadline + START_TIMEOUT),
        }
        # One entry per place: an idle worker, or None where it is to be started first.
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._places = workers
        self._running: set[_Worker] = set()
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the workers now, without waiting for them. Otherwise they start with the first requests."""
        if self.template is None:
            return
        for _ in range(self._places):
            self._idle.put(self._idle.get() or self._new_worker())

    def check(self) -> None:
        """Return when the template is compiled. Raises ModelLoadError if it cannot be."""
        worker = self._idle.get()
        try:
            worker = self._ready(worker)
        finally:
            self._idle.put(worker)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for ``messages`` (dicts as in OpenAI's API), special tokens included.

        ``add_generation_prompt`` opens the assistant's turn; ``continue_final_message`` leaves the last message open
        instead. ``template_kwargs`` sets further variables that the template reads. Raises InvalidRequestError when
        the template refuses the messages, fails or takes too long over them; ModelLoadError when it is no template.
        """
        frame = self._request(messages, add_generation_prompt, continue_final_message, tools, template_kwargs)
        worker = self._idle.get()
        try:
            worker = self._ready(worker)
            return _text(worker.ask(frame, self._deadline))
        except _WorkerLostError as lost:
            worker = self._replace(worker)
            raise InvalidRequestError(f"the model's chat template {lost}", param="messages") from lost
        finally:
            self._idle.put(worker)

    def _ready(self, worker: _Worker | None) -> _Worker:
        """``worker`` if it still runs, else a new one; it has compiled the template."""
        if worker is None or not worker.alive():
            worker = self._replace(worker)
        try:
            worker.wait_until_ready()
        except ModelLoadError:
            self._drop(worker)
            if self._closed:  # the template may be sound: it is we who ended the worker
                raise EngineUnavailableError(_CLOSED) from None
            raise
        return worker

    def _new_worker(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise EngineUnavailableError(_CLOSED)
            worker = _Worker(self._setup)
            self._running.add(worker)
            return worker

    def _replace(self, worker: _Worker | None) -> _Worker:
        if worker is not None:
            self._drop(worker)
        return self._new_worker()

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._running.discard(worker)

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> bytes:
        self._check(messages, add_generation_prompt and continue_final_message)
        request = {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "kwargs": dict(template_kwargs or {}),
        }
        try:
            return encode_frame(request)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"the messages cannot be rendered: {error}", param="messages") from error

    def _check(self, messages: Sequence[Mapping[str, Any]], contradictory: bool) -> None:
        if self.template is None:
            raise InvalidRequestError(
                "the model has no chat template, so it takes no messages: use /v1/completions with a prompt, or start "
                "the server with --chat-template FILE",
                param="messages",
            )
        if not messages:
            raise InvalidRequestError("messages is empty; at least one message is needed", param="messages")
        if contradictory:
            message = "add_generation_prompt and continue_final_message exclude each other"
            raise InvalidRequestError(message, param="continue_final_message")

    def close(self) -> None:
        """End the workers at once; a rendering in progress fails."""
        with self._lock:
            self._closed = True
            running, self._running = self._running, set()
        for worker in running:
            worker.kill()


class _WorkerLostError(Exception):
    """The worker took too long or ended; it is dead. The text completes "the chat template ..."."""


class _Worker:
    """One worker process. Used by one thread at a time, but for ``kill``."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "suimon.core_engine.template_worker"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        self._setup: Mapping[str, Any] | None = setup

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Return when the template is compiled. Raises ModelLoadError if it cannot be."""
        if self._setup is None:
            return
        try:
            answer = self._exchange(encode_frame(self._setup), START_TIMEOUT)
        except _WorkerLostError as lost:
            raise ModelLoadError(f"the model's chat template {lost} while it was compiled") from lost
        if "error" in answer:
            raise ModelLoadError(f"the model's chat template cannot be compiled: {answer['message']}")
        self._setup = None

    def ask(self, frame: bytes, deadline: float) -> dict[str, Any]:
        """The answer frame; raises _WorkerLostError after ``deadline`` seconds or if the process ends."""
        return self._exchange(frame, deadline)

    def _exchange(self, frame: bytes, deadline: float) -> dict[str, Any]:
        end = time.monotonic() + deadline
        try:
            self._socket.settimeout(deadline)
            self._socket.sendall(frame)
            answer: dict[str, Any] = read_frame(lambda size: self._receive(size, end))
        except TimeoutError as error:
            self.kill()
            raise _WorkerLostError(f"took longer than {deadline:g} seconds") from error
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            raise _WorkerLostError(f"ended its process (status {self._process.returncode})") from error
        return answer

    def _receive(self, size: int, end: float) -> bytes:
        """``size`` bytes, or fewer if the stream ends. Raises TimeoutError at the time ``end``."""
        chunks = bytearray()
        while len(chunks) < size:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            chunk = self._socket.recv(min(size - len(chunks), 1 << 20))
            if not chunk:
                break
            chunks += chunk
        return bytes(chunks)

    def kill(self) -> None:
        """End the process; whoever waits for its answer sees the end of the stream."""
        self._process.kill()
        self._process.wait()


# How a request's failure reads, by the kind that the worker reports.
_REFUSALS = {
    "raised": "the model's chat template refuses these messages: {}",
    "failed": "the model's chat template fails on these messages: {}",
    "request": "{}",
}


def _text(answer: Mapping[str, Any]) -> str:
    kind = answer.get("error")
    if kind is not None:
        raise InvalidRequestError(_REFUSALS[kind].format(answer["message"]), param=answer["param"])
    return str(answer["text"])


def load_chat_template(source: str) -> str:
    """The template that ``--chat-template`` names: a file, or the template itself. Raises ModelLoadError."""
    if "{{" in source or "{%" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"--chat-template {source}: cannot be read: {error}") from error

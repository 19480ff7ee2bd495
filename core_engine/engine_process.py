"""One engine process as its client sees it: started, spoken to, listened to, killed, reaped.

Knows the socket, the frames and the process; does not judge whether the engine is healthy and never restarts it. From
``connect`` on everything happens on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from suimon.core_engine.framing import FrameReader, FramingError
from suimon.core_engine.heartbeat import LOADING
from suimon.core_engine.messages import (
    FromEngine,
    Heartbeat,
    MessageError,
    ToEngine,
    decode_from_engine,
    to_frame,
)

logger = logging.getLogger(__name__)

# Safe path (-P): a file in the working directory must not pass for one of the engine's modules.
COMMAND = (sys.executable, "-P", "-m", "suimon.core_engine.process")

# What OpenMP's threads do while they wait for each other. By default they spin for milliseconds, on a busy machine on a
# core that somebody else needs: with one other busy process on two cores a step took 1070 ms, and 270 ms with this.
# Whoever sets the variable, or OMP_WAIT_POLICY, knows better.
OPENMP_SPIN = {"GOMP_SPINCOUNT": "10000"}

EXIT_TIMEOUT = 0.5  # seconds from its last sign to its exit
BURIAL_TIMEOUT = 10.0  # seconds from kill -9 to the exit: much memory takes time to free
POLL_INTERVAL = 0.01


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    return {**inherited} if "OMP_WAIT_POLICY" in inherited else {**OPENMP_SPIN, **inherited}


class EngineProcess(asyncio.Protocol):
    """A started engine process. ``closed`` is done, with the reason, once it can no longer be heard.

    ``heard_at`` is when the last message came; ``doing`` is the (state, since) of the last heartbeat.
    """

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        """Start the process. Must be called on a thread that lives as long as the engine shall. Raises OSError."""
        self._on_message = on_message
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[str] | None = None
        self.heard_at = time.monotonic()
        self.doing = (LOADING, self.heard_at)
        self._sock, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.callback(self._sock.close)
            # A session of its own: Ctrl-C in a terminal reaches the gateway, which then decides about its engines.
            self._process = subprocess.Popen(
                [*COMMAND, f"--fd={theirs.fileno()}"],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(os.environ),
            )
            unless_started.pop_all()

    async def connect(self) -> asyncio.Future[str]:
        """Begin to listen, on this event loop; what is returned is ``closed``."""
        loop = asyncio.get_running_loop()
        self.closed = loop.create_future()
        self.heard_at = time.monotonic()
        await loop.create_connection(lambda: self, sock=self._sock)
        return self.closed

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message; what is sent to a dead engine is lost. Raises ValueError if it is too long for a frame."""
        data = to_frame(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def kill(self) -> None:
        """kill -9, also of a stopped process. Harmless when it is gone."""
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._sock.close()

    async def bury(self) -> str:
        """See it gone, by force unless it is just ending by itself; how it ended, in words."""
        if self.closed is not None and self.closed.done():
            await self._wait(EXIT_TIMEOUT)
        self.kill()
        await self._wait(BURIAL_TIMEOUT)
        code = self._process.returncode
        if code is None:
            return "not gone even after kill -9"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    async def _wait(self, timeout: float) -> None:
        # Polled: what asyncio offers for child processes differs between versions and kinds of loop.
        until = time.monotonic() + timeout
        while self._process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(POLL_INTERVAL)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        try:
            for payload in self._frames.feed(data):
                self._receive(payload)
        except (FramingError, MessageError) as error:
            # An engine that talks nonsense is not to be trusted with requests.
            self._close(f"its messages cannot be read: {error}")
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close("it closed its connection")

    def _receive(self, payload: bytes) -> None:
        message = decode_from_engine(payload)
        if isinstance(message, Heartbeat):
            self.doing = (message.state, message.since)
        else:
            self._on_message(message)

    def _close(self, reason: str) -> None:
        if self.closed is not None and not self.closed.done():
            self.closed.set_result(reason)

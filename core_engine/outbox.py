"""The sending end of the engine's socket: takes frames from any thread and never waits for the reader.

What the kernel does not take at once stays here and goes out with the next frame (heartbeats see to it that there is
one) or when the owner of the socket sees it writable. It knows no messages.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

# Above this the owner should produce no more: the reader has stopped reading, and memory is finite.
CONGESTED_BYTES = 16 * 1024 * 1024


class Outbox:
    """Frames on their way out. ``put`` and ``flush`` raise ConnectionError once the reader is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # held for copying and non-blocking sends only
        self._pending = bytearray()

    @property
    def is_empty(self) -> bool:
        return not self._pending

    @property
    def is_congested(self) -> bool:
        return len(self._pending) > CONGESTED_BYTES

    def put(self, frame: bytes) -> None:
        """Queue one whole frame and send what the socket takes."""
        with self._lock:
            self._pending += frame
            self._send()

    def flush(self) -> None:
        """Send what the socket takes now."""
        with self._lock:
            self._send()

    def take(self) -> bytes:
        """Hand over what is unsent, for an owner who means to wait for the reader after all."""
        with self._lock:
            pending, self._pending = bytes(self._pending), bytearray()
            return pending

    def _send(self) -> None:
        with suppress(BlockingIOError):
            while self._pending:
                sent = self._sock.send(self._pending, socket.MSG_DONTWAIT)
                del self._pending[:sent]

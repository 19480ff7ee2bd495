"""The receiving end of the engine's socket: messages as they arrive, and sleep while none do.

Knows frames and the protocol's messages; refuses to know what they ask for. A frame that is no message is logged and
dropped.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Iterator
from contextlib import suppress

from suimon.core_engine.framing import FrameReader
from suimon.core_engine.messages import MessageError, ToEngine, decode_to_engine
from suimon.core_engine.outbox import Outbox

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
READS_AT_ONCE = 16  # a flood of messages must not keep the engine from stepping


class ClientGoneError(Exception):
    """The client's end of the socket is closed."""


class Inbox:
    """What the client sends, read by the main thread only. Sleeping, it also sends what the outbox could not."""

    def __init__(self, sock: socket.socket, outbox: Outbox) -> None:
        self._sock = sock
        self._outbox = outbox
        self._frames = FrameReader()
        self._poll = select.poll()  # not select(): a busy server's descriptors are beyond its 1024
        self._put_back: list[ToEngine] = []
        self._num_dropped = 0

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """The messages that have arrived; with ``wait``, sleep until the socket has something to read or to take.

        Raises ClientGoneError at the end of the stream, FramingError if it is out of step.
        """
        messages, self._put_back = self._put_back, []
        self._sleep(None if wait and not messages else 0)
        return messages + [message for data in self._read() for message in self._decode(data)]

    def put_back(self, messages: list[ToEngine]) -> None:
        """Let these be received again, first."""
        self._put_back = messages

    def _sleep(self, timeout: float | None) -> None:
        events = select.POLLIN | (0 if self._outbox.is_empty else select.POLLOUT)
        self._poll.register(self._sock, events)
        if any(event & select.POLLOUT for _, event in self._poll.poll(timeout)):
            self._outbox.flush()

    def _read(self) -> Iterator[bytes]:
        with suppress(BlockingIOError):
            for _ in range(READS_AT_ONCE):
                data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    raise ClientGoneError
                yield data

    def _decode(self, data: bytes) -> Iterator[ToEngine]:
        for payload in self._frames.feed(data):
            try:
                yield decode_to_engine(payload)
            except MessageError as error:
                self._count_dropped(payload, error)

    def _count_dropped(self, payload: bytes, error: MessageError) -> None:
        self._num_dropped += 1
        if self._num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a flood must not drown the log
            logger.warning("dropped frame no. %d, of %d bytes: %s", self._num_dropped, len(payload), error)

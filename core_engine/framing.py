"""Length-prefixed frames on a byte stream: a 4-byte little-endian length, then so many bytes.

Knows bytes only. A frame's content may be anything; a length above the maximum means that the two ends no longer agree
where frames begin, from which a stream cannot recover.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

# A prompt of 4 million tokens takes under 20 MiB.
MAX_FRAME_BYTES = 32 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class FramingError(Exception):
    """The stream is out of step: the connection is of no more use."""


def frame(payload: bytes) -> bytes:
    """``payload`` with its length in front. Raises ValueError if it is too long to be read at the other end."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes is above the maximum of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream into frames. Feed it what arrives, in pieces of any size."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that ``data`` completes. Raises FramingError for a length above the maximum."""
        self._buffer += data
        start = 0
        try:
            while (end := self._end_of_frame(start)) is not None:
                payload = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
                start = end
                yield payload
        finally:
            del self._buffer[:start]

    def _end_of_frame(self, start: int) -> int | None:
        if len(self._buffer) - start < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if length > self._max:
            raise FramingError(f"a frame announces {length} bytes, above the maximum of {self._max}")
        end = start + _LENGTH.size + int(length)
        return end if end <= len(self._buffer) else None

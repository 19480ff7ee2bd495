"""Frames of JSON on a byte stream: a length (4 bytes, big endian) and that much JSON. Knows no meaning of either."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

MAX_FRAME = 256 << 20  # bytes

_LENGTH = struct.Struct(">I")


def encode_frame(content: Any) -> bytes:
    """``content`` as a frame. Raises ValueError, TypeError or RecursionError if it is no JSON of bearable size."""
    body = json.dumps(content).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"{len(body)} bytes of JSON are more than {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes]) -> Any:
    """The content of the next frame, where ``read(n)`` gives n bytes, or fewer at the end of the stream.

    Raises EOFError at the end, ValueError for a frame that is too large or no JSON.
    """
    (size,) = _LENGTH.unpack(_exactly(read, _LENGTH.size))
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes, more than {MAX_FRAME}")
    return json.loads(_exactly(read, size))


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    content = read(size)
    if len(content) < size:
        raise EOFError("the stream ended inside a frame" if content else "the stream ended")
    return content

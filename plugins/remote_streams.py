"""Streams of a remote server, cut up: server-sent events and newline-delimited JSON, from bytes in pieces of any size.

Strict about size, since a broken or hostile server must not fill this process: a line, and an event, end at a limit.
Knows framing; refuses to know what is framed and where the bytes come from.
"""

from __future__ import annotations

MAX_LINE = 1024 * 1024  # bytes
MAX_EVENT = 4 * MAX_LINE  # bytes in all the data lines of one event
_BOM = b"\xef\xbb\xbf"


class StreamTooLong(Exception):  # noqa: N818 - said of the server
    """A line or an event is longer than any honest one."""


class LineSplitter:
    """Lines, ended by LF, CR LF or CR, of a stream that comes in pieces."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._pieces: list[bytes] = []  # of the line that has not ended; joined once, however slowly it trickles in
        self._held = 0  # bytes in them
        self._after_cr = False  # a LF that comes next belongs to the line end that was already seen

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that ``piece`` completes. Raises StreamTooLong."""
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        lines = piece.splitlines()
        rest = lines.pop() if piece and not piece.endswith((b"\n", b"\r")) else b""
        self._after_cr = self._after_cr or piece.endswith(b"\r")
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces.clear()
            self._held = 0
        self._hold(rest)
        if any(len(line) > self._max_line for line in lines):
            raise StreamTooLong(f"a line has more than {self._max_line} bytes")
        return lines

    def _hold(self, rest: bytes) -> None:
        if not rest:
            return
        self._held += len(rest)
        if self._held > self._max_line:
            raise StreamTooLong(f"a line has more than {self._max_line} bytes")
        self._pieces.append(rest)

    def rest(self) -> bytes:
        """What came after the last line end."""
        return b"".join(self._pieces)


class EventReader:
    """The ``data`` of server-sent events (WHATWG HTML, 9.2.6). Comments and other fields say nothing here."""

    def __init__(self, max_line: int = MAX_LINE, max_event: int = MAX_EVENT) -> None:
        self._lines = LineSplitter(max_line)
        self._max_event = max_event
        self._data: list[bytes] = []
        self._size = 0
        self._is_first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ``piece`` completes. Raises StreamTooLong."""
        events = []
        for line in self._lines.feed(piece):
            if self._is_first:
                self._is_first = False
                line = line.removeprefix(_BOM)
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._size = 0
        return events

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field != b"data":
            return
        self._size += len(value) + 1
        if self._size > self._max_event:
            raise StreamTooLong(f"an event has more than {self._max_event} bytes")
        self._data.append(value.removeprefix(b" "))

    def end(self) -> list[bytes]:
        """The stream is over: an event that no blank line completed was cut off, and is none."""
        return []


class JsonLineReader:
    """The lines of newline-delimited JSON, each one value; blank ones are skipped."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._lines = LineSplitter(max_line)

    def feed(self, piece: bytes) -> list[bytes]:
        """The values that ``piece`` completes. Raises StreamTooLong."""
        return [line for line in self._lines.feed(piece) if line.strip()]

    def end(self) -> list[bytes]:
        """The stream is over: its last line needs no line end."""
        rest = self._lines.rest()
        return [rest] if rest.strip() else []

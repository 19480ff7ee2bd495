"""httptools' request parser, deaf to offers of another protocol.

Java's HTTP client, for one, offers h2c with every request in clear text (``Connection: Upgrade, HTTP2-Settings``). A
server may go on as if nothing had been offered (RFC 9110, 7.8); httptools instead takes the offer as accepted: it drops
the body and stops. So the head is parsed once more without its offer. Knows the parser; knows nothing of limits.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class Head(Protocol):
    """What the connection has collected of a request's head; ``headers`` with lower-case names."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """The calls of ``httptools.HttpRequestParser`` that uvicorn makes.

    While ``is_offer`` is true, callbacks tell of a request that will be told of again, and are to be ignored.
    """

    def __init__(self, connection: Head) -> None:
        self._connection = connection
        self._parser = self._new_parser()

    @property
    def is_offer(self) -> bool:
        """Whether the head that was just parsed offers another protocol. CONNECT, which demands one, is none."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse ``data``; raises as httptools does."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self.is_offer:
                    raise
                data = self._head_without_offer() + data[offer.args[0] :]
                self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._connection)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: a last line end is no error
        return parser

    def _head_without_offer(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._connection.url, version)]
        lines += [b"%b: %b" % field for field in self._connection.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Never: this server knows no other protocol."""
        return False

"""How a gateway stops: refuse new requests, let running ones finish, then end what is left.

Shared by the server, which begins the drain on a signal, and the routes, which count themselves in and listen for its
end. It knows no signal and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Drain:
    """One per application, as ``app.state.drain``. Only used from the event loop's thread, so it needs no lock."""

    def __init__(self) -> None:
        self.draining = False  # new requests are refused with 503
        self.in_flight = 0  # requests inside ``running``
        self.expired = asyncio.Event()  # set: streams still running must end now, with an error event
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """From now on nothing new is accepted. May be called again."""
        self.draining = True

    def expire(self) -> None:
        """Time is up: whoever awaits ``expired`` ends its stream with an explicit error."""
        self.begin()
        self.expired.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one request in flight for as long as its answer is being made or sent."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

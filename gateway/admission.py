"""Who may start now, in front of a backend that has no queue of its own.

The same RequestQueue as the engine's, with the same policies: at most ``max_concurrency`` requests are inside the
backend, at most ``max_queued`` wait, and whoever is turned away is told when to come back. A backend with a queue of
its own (the native engine) is passed through uncounted. Only used from the event loop's thread, so it needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from suimon.core_engine.drain_rate import DrainRate
from suimon.core_engine.request_queue import Policy, RequestQueue
from suimon.gateway.deadlines import until
from suimon.gateway.hookspecs import Capabilities, EmbedRequest, GenerateRequest, Overloaded


class _Ticket:
    """One waiting request, and the future that lets it in."""

    __slots__ = ("admitted", "arrival", "priority")

    def __init__(self, request: GenerateRequest | EmbedRequest) -> None:
        self.arrival = request.arrival
        self.priority = request.priority
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_admitted(self) -> bool:
        return self.admitted.done() and not self.admitted.cancelled()


class Admission:
    """The door of one backend."""

    def __init__(self, capabilities: Capabilities, *, max_queued: int, policy: str | Policy = "fcfs") -> None:
        self._unlimited = capabilities.own_queue
        self._capacity = capabilities.max_concurrency
        self._max_queued = max_queued
        self._queue: RequestQueue[_Ticket] = RequestQueue(policy)
        self._drain_rate = DrainRate()
        self.running = 0

    @property
    def is_queue(self) -> bool:
        """Whether requests can wait here: not in front of a backend with a queue of its own."""
        return not self._unlimited

    @property
    def waiting(self) -> int:
        """Requests at the door."""
        return len(self._queue)

    @asynccontextmanager
    async def admit(self, request: GenerateRequest | EmbedRequest) -> AsyncIterator[None]:
        """Enter the backend when it is this request's turn; leave it with the context.

        Raises Overloaded at once when too many wait, and DeadlineExceeded when the request's deadline comes first.
        """
        if not self._unlimited:
            await self._enter(request)
        try:
            yield
        finally:
            if not self._unlimited:
                self._leave()

    async def _enter(self, request: GenerateRequest | EmbedRequest) -> None:
        if self.running < self._capacity:
            self.running += 1
            return
        if self.waiting >= self._max_queued:
            raise self._overloaded()
        await self._wait(_Ticket(request), request.deadline)

    async def _wait(self, ticket: _Ticket, deadline: float | None) -> None:
        self._queue.push(ticket)
        try:
            await until(deadline, ticket.admitted, "while the request was waiting")
        except BaseException:
            if ticket.is_admitted:
                self._leave()  # it was let in, but is no longer there to enter
            else:
                self._queue.remove(ticket)
            raise

    def _leave(self) -> None:
        self._drain_rate.count()
        while self._queue:
            ticket = self._queue.pop()
            if not ticket.admitted.cancelled():  # else it is leaving, and has not woken yet to say so
                ticket.admitted.set_result(None)  # the place goes straight to the next
                return
        self.running -= 1

    def _overloaded(self) -> Overloaded:
        seconds = self._drain_rate.seconds_for(self.waiting + 1)
        return Overloaded(
            f"{self.running} requests are running and {self.waiting} waiting: try again in {seconds:.0f} s",
            retry_after=seconds,
        )

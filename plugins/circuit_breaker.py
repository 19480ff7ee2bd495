"""A circuit breaker: whether to try a server that has been failing.

Closed: everything is let through. After ``failures`` failures in a row it opens: nothing is, for ``cooldown`` seconds,
twice as long each time up to ``MAX_COOLDOWN``. Then it is half open: one attempt is let through, whose outcome closes
it or opens it again (Nygard, "Release It!", 2007). Knows counts and a clock; refuses to know what is being tried.

An attempt that began before the state last changed says nothing about the present one: its verdict is ignored. So is
the failure of one that heard nothing since somebody else saw the server alive: it tells of an outage that is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half open"
MAX_COOLDOWN = 60.0  # seconds


class Ticket(NamedTuple):
    """An attempt that was let through: in which state, and after how many signs of life."""

    epoch: int
    signs: int


class CircuitBreaker:
    """One server's. Every ``enter`` that let through is followed by exactly one of the three verdicts."""

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._first_cooldown = cooldown
        self._clock = clock
        self._cooldown = cooldown
        self._failures = 0
        self._opened = 0.0
        self._trying = False  # the one attempt while half open
        self._epoch = 0  # of the state
        self._signs = 0  # of life: answers that were whole, and good looks
        self._state = CLOSED

    @property
    def state(self) -> str:
        """closed, open or half open, now."""
        if self._state == OPEN and self._clock() >= self._opened + self._cooldown:
            self._become(HALF_OPEN)
        return self._state

    @property
    def wait(self) -> float:
        """Seconds until an attempt may be let through; 0 where that is now."""
        return max(0.0, self._opened + self._cooldown - self._clock()) if self.state == OPEN else 0.0

    def enter(self) -> Ticket | None:
        """A ticket for one attempt, to be given back with its verdict; None: do not try."""
        state = self.state
        if state == OPEN or (state == HALF_OPEN and self._trying):
            return None
        self._trying = state == HALF_OPEN
        return Ticket(self._epoch, self._signs)

    def heard(self, ticket: Ticket) -> Ticket:
        """Part of an answer came, and the attempt goes on with this ticket. A trial is over; its verdict is to come."""
        if ticket.epoch != self._epoch:
            return ticket
        if self._state == HALF_OPEN:
            self._become(CLOSED)
        return Ticket(self._epoch, self._signs)

    def succeeded(self, ticket: Ticket) -> None:
        """The server gave the whole of its answer."""
        if ticket.epoch != self._epoch:
            return
        self._live()
        self._cooldown = self._first_cooldown
        if self._state == HALF_OPEN:
            self._become(CLOSED)

    def failed(self, ticket: Ticket) -> None:
        """The server did not answer, or broke off."""
        if ticket.epoch != self._epoch:
            return
        if self._state == HALF_OPEN:
            self._cooldown = min(MAX_COOLDOWN, 2 * self._cooldown)
            self._open()
        elif ticket.signs == self._signs:
            self._failures += 1
            if self._failures >= self._limit:
                self._open()

    def abandoned(self, ticket: Ticket) -> None:
        """The attempt was given up before its outcome was known: the next one may try."""
        if ticket.epoch == self._epoch:
            self._trying = False

    def seen_alive(self) -> None:
        """Somebody else saw the server answer: failures so far count no more, and there is no cooldown to sit out."""
        self._live()
        if self.state == OPEN:
            self._become(HALF_OPEN)

    def seen_dead(self) -> None:
        """Somebody else saw the server not answer: one more failure."""
        ticket = self.enter()
        if ticket is not None:
            self.failed(ticket)

    def _live(self) -> None:
        self._signs += 1
        self._failures = 0

    def _open(self) -> None:
        self._opened = self._clock()
        self._become(OPEN)

    def _become(self, state: str) -> None:
        self._state = state
        self._trying = False
        self._failures = 0
        self._epoch += 1

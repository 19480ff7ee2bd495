"""A circuit breaker: whether to try a server that has been failing.

Closed: everything is let through. After ``failures`` failures in a row it opens: nothing is, for ``cooldown`` seconds,
twice as long each time up to ``MAX_COOLDOWN``. Then it is half open: one attempt is let through, whose outcome closes
it or opens it again (Nygard, "Release It!", 2007). Knows counts and a clock; refuses to know what is being tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half open"
MAX_COOLDOWN = 60.0  # seconds


class CircuitBreaker:
    """One server's. Every ``enter`` that let through is followed by exactly one of the three verdicts.

    An attempt that began before the state last changed says nothing about the present one: its verdict is ignored.
    """

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._first_cooldown = cooldown
        self._clock = clock
        self._cooldown = cooldown
        self._failures = 0
        self._opened = 0.0
        self._trying = False  # the one attempt while half open
        self._epoch = 0
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

    def enter(self) -> int | None:
        """A ticket for one attempt, to be given back with its verdict; None: do not try."""
        state = self.state
        if state == OPEN or (state == HALF_OPEN and self._trying):
            return None
        self._trying = state == HALF_OPEN
        return self._epoch

    def succeeded(self, ticket: int) -> None:
        """The server answered."""
        if ticket != self._epoch:
            return
        self._failures = 0
        if self._state == HALF_OPEN:
            self._cooldown = self._first_cooldown
            self._become(CLOSED)

    def failed(self, ticket: int) -> None:
        """The server did not answer."""
        if ticket != self._epoch:
            return
        self._failures += 1
        if self._state == HALF_OPEN:
            self._cooldown = min(MAX_COOLDOWN, 2 * self._cooldown)
            self._open()
        elif self._failures >= self._limit:
            self._open()

    def abandoned(self, ticket: int) -> None:
        """The attempt was given up before its outcome was known: the next one may try."""
        if ticket == self._epoch:
            self._trying = False

    def seen_alive(self) -> None:
        """Somebody else saw the server answer: no need to sit out the cooldown."""
        if self.state == OPEN:
            self._become(HALF_OPEN)

    def _open(self) -> None:
        self._opened = self._clock()
        self._become(OPEN)

    def _become(self, state: str) -> None:
        self._state = state
        self._trying = False
        self._failures = 0
        self._epoch += 1

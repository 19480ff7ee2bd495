"""Signs of life from a thread of their own, so that a long load or step does not look like death.

Each says what the engine is doing and since when; whether that has taken too long is for the reader to judge.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOADING, READY, STEPPING = "loading", "ready", "stepping"
EXIT_ORPHANED = 70


class HeartbeatThread:
    """Calls ``send(state, since)`` every ``interval`` seconds; ends the process when nobody receives it any more.

    Only the engine's main thread changes the state. A gone reader ends the process here, not only in the main loop,
    because the main thread may be minutes deep in a step.
    """

    def __init__(self, send: Callable[[str, float], None], interval: float) -> None:
        self._send = send
        self._status = (LOADING, time.monotonic())
        self.interval = interval

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def enter(self, state: str) -> None:
        """From now on the engine is in ``state``."""
        self._status = (state, time.monotonic())

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """In ``state`` within the block, ready after it."""
        self.enter(state)
        try:
            yield
        finally:
            self.enter(READY)

    def _run(self) -> None:
        while True:
            try:
                self._send(*self._status)
            except OSError:
                os._exit(EXIT_ORPHANED)
            time.sleep(self.interval)

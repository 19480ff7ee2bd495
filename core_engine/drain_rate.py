"""How fast requests have been leaving lately, from which a refused client is told when to come back.

Standard library only, because both sides of the process boundary import it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

SHORTEST, LONGEST = 1.0, 60.0  # seconds of advice; a longer estimate is a guess
_REMEMBERED = 64


class DrainRate:
    """The departures of the last ``_REMEMBERED`` requests. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: deque[float] = deque(maxlen=_REMEMBERED)

    def count(self) -> None:
        """One has left now."""
        self._left.append(self._clock())

    def seconds_for(self, num_requests: int) -> float:
        """Whole seconds until so many will have left at the recent rate, within SHORTEST and LONGEST."""
        if len(self._left) < 2:
            return SHORTEST
        since = max(self._clock() - self._left[0], 1e-3)
        return min(max(math.ceil(num_requests * since / len(self._left)), SHORTEST), LONGEST)

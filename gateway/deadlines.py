"""A request's own deadline around whatever is awaited for it. Knows clocks; refuses to know what is awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from suimon.gateway.hookspecs import DeadlineExceeded

T = TypeVar("T")


async def until(deadline: float | None, work: Awaitable[T], passed: str = "before the answer was complete") -> T:
    """What ``work`` gives, by ``time.monotonic()`` before the ``deadline``, if there is one.

    Raises DeadlineExceeded, and what ``work`` raises: a TimeoutError of its own stays one.
    """
    limit = asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"The deadline passed {passed}.") from None

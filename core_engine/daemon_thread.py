"""Slow start-up work beside the event loop, in a thread that never holds up the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(function: Callable[[], Result]) -> Result:
    """What ``function`` returns or raises. Cancelling stops the waiting, not the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            set_outcome()

    def run() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, _outcome(function, future))

    threading.Thread(target=run, name="start-up", daemon=True).start()
    return await future


def _outcome(function: Callable[[], Result], future: asyncio.Future[Result]) -> Callable[[], None]:
    try:
        result = function()
    except BaseException as error:
        return lambda caught=error: future.set_exception(caught)  # type: ignore[misc]
    return lambda: future.set_result(result)

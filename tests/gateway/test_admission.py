"""The door in front of backends without a queue: order, limits, leaving, and the estimate of when to come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suimon.gateway.admission import Admission
from suimon.gateway.hookspecs import Capabilities, DeadlineExceeded, GenerateRequest, Overloaded


def request(arrival: float = 0.0, *, priority: int = 0, deadline: float | None = None) -> GenerateRequest:
    return GenerateRequest(request_id="r", model="m", arrival=arrival, priority=priority, deadline=deadline)


def admission(concurrency: int = 1, max_queued: int = 10, **options: Any) -> Admission:
    return Admission(Capabilities(max_concurrency=concurrency), max_queued=max_queued, **options)


class Guest:
    """A task that enters, waits to be told, and leaves."""

    def __init__(self, door: Admission, name: str, inside: list[str], **fields: Any) -> None:
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._visit(door, name, inside, request(**fields)))

    async def _visit(self, door: Admission, name: str, inside: list[str], wanted: GenerateRequest) -> None:
        async with door.admit(wanted):
            inside.append(name)
            await self.done.wait()

    async def leave(self) -> None:
        self.done.set()
        await self.task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@in_loop
async def test_no_more_than_the_backend_takes_are_inside() -> None:
    door, inside = admission(2), []
    guests = [Guest(door, str(i), inside, arrival=i) for i in range(5)]
    await settle()
    assert (inside, door.running, door.waiting) == (["0", "1"], 2, 3)
    await guests[1].leave()
    await settle()
    assert (inside, door.running, door.waiting) == (["0", "1", "2"], 2, 2)
    for guest in guests:
        await guest.leave()
    assert (door.running, door.waiting) == (0, 0)


@in_loop
async def test_the_order_is_that_of_the_policy() -> None:
    for policy, expected in (("fcfs", ["a", "b", "c", "d"]), ("priority", ["a", "d", "b", "c"])):
        door, inside = admission(policy=policy), []
        guests = [
            Guest(door, name, inside, arrival=arrival, priority=priority)
            for name, arrival, priority in (("a", 0, 0), ("b", 1, 5), ("c", 2, 5), ("d", 3, -1))
        ]
        await settle()
        for guest in guests:
            guest.done.set()
        await asyncio.gather(*(guest.task for guest in guests))
        assert inside == expected


@in_loop
async def test_one_more_than_may_wait_is_refused_at_once() -> None:
    door, inside = admission(1, max_queued=2), []
    guests = [Guest(door, str(i), inside) for i in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="1 requests are running and 2 waiting") as caught:
        async with door.admit(request()):
            pass
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 1
    for guest in guests:
        await guest.leave()
    async with door.admit(request()):
        assert door.running == 1


@in_loop
async def test_whoever_leaves_the_queue_takes_no_place() -> None:
    door, inside = admission(), []
    first, second, third = (Guest(door, name, inside, arrival=i) for i, name in enumerate("abc"))
    await settle()
    second.task.cancel()
    await settle()
    assert door.waiting == 1
    await first.leave()
    await settle()
    assert inside == ["a", "c"]
    await third.leave()
    assert door.running == 0


@in_loop
async def test_a_place_given_to_one_who_left_in_that_moment_is_passed_on() -> None:
    door, inside = admission(), []
    first, second, third = (Guest(door, name, inside, arrival=i) for i, name in enumerate("abc"))
    await settle()
    first.done.set()
    await asyncio.sleep(0)  # the place is the second's now, who has not yet woken
    second.task.cancel()
    await settle()
    assert inside == ["a", "c"]
    await third.leave()
    assert (door.running, door.waiting) == (0, 0)


@in_loop
async def test_a_place_that_falls_free_as_its_next_owner_leaves_is_passed_on() -> None:
    door, inside = admission(), []
    first, second, third = (Guest(door, name, inside, arrival=i) for i, name in enumerate("abc"))
    await settle()
    first.done.set()
    second.task.cancel()  # it has not woken to leave the queue when the first gives up its place
    await settle()
    await first.task
    assert inside == ["a", "c"]
    await third.leave()
    assert (door.running, door.waiting) == (0, 0)


@in_loop
async def test_a_deadline_that_passes_while_waiting() -> None:
    door, inside = admission(), []
    first = Guest(door, "a", inside)
    await settle()
    with pytest.raises(DeadlineExceeded):
        async with door.admit(request(deadline=time.monotonic())):
            inside.append("never")
    assert (inside, door.waiting) == (["a"], 0)
    await first.leave()
    assert door.running == 0


@in_loop
async def test_a_place_is_given_back_after_an_error() -> None:
    door = admission()
    with pytest.raises(ZeroDivisionError):
        async with door.admit(request()):
            raise ZeroDivisionError
    assert door.running == 0


@in_loop
async def test_a_backend_with_its_own_queue_is_passed_through() -> None:
    door, inside = Admission(Capabilities(own_queue=True, max_concurrency=1), max_queued=1), []
    guests = [Guest(door, str(i), inside) for i in range(50)]
    await settle()
    assert len(inside) == 50
    for guest in guests:
        await guest.leave()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["arrive", "leave", "cancel"]), st.integers(0, 30)), max_size=60))
def test_places_are_neither_lost_nor_made(moves: list[tuple[str, int]]) -> None:
    async def play() -> None:
        door, inside = admission(3, max_queued=4), []
        guests: list[Guest] = []
        for move, which in moves:
            if move == "arrive":
                guests.append(Guest(door, str(len(guests)), inside, arrival=len(guests)))
            elif guests:
                guest = guests[which % len(guests)]
                guest.done.set() if move == "leave" else guest.task.cancel()
            if which % 3:
                await settle()
            assert door.running <= 3
            assert door.waiting <= 4
            assert not door.waiting or door.running == 3
        await settle()
        for guest in guests:
            guest.done.set()
        await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)
        assert (door.running, door.waiting) == (0, 0)

    asyncio.run(play())

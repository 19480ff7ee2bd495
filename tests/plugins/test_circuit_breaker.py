"""The circuit breaker, on a clock that the test holds."""

from __future__ import annotations

import pytest

from suimon.plugins.circuit_breaker import MAX_COOLDOWN, CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(3, 10.0, clock)


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        ticket = breaker.enter()
        assert ticket is not None
        breaker.failed(ticket)


def test_opens_after_failures_in_a_row_and_no_others(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    ticket = breaker.enter()
    assert ticket is not None
    breaker.succeeded(ticket)
    fail(breaker, 2)
    assert (breaker.state, breaker.wait) == ("closed", 0.0)
    fail(breaker)
    assert (breaker.state, breaker.wait) == ("open", 10.0)
    assert breaker.enter() is None


def test_half_open_lets_one_through_whose_success_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 9.9
    assert breaker.enter() is None
    clock.now += 0.1
    assert breaker.state == "half open"
    ticket = breaker.enter()
    assert ticket is not None and breaker.enter() is None
    breaker.succeeded(ticket)
    assert breaker.state == "closed"
    assert all(breaker.enter() is not None for _ in range(5))


def test_each_failure_while_half_open_doubles_the_cooldown_up_to_a_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    waits = []
    for _ in range(4):
        clock.now += breaker.wait
        fail(breaker)
        waits.append(breaker.wait)
    assert waits == [20.0, 40.0, MAX_COOLDOWN, MAX_COOLDOWN]
    clock.now += MAX_COOLDOWN
    ticket = breaker.enter()
    assert ticket is not None
    breaker.succeeded(ticket)
    fail(breaker, 3)
    assert breaker.wait == 10.0


def test_an_attempt_that_was_given_up_leaves_its_place_to_the_next(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 10
    ticket = breaker.enter()
    assert ticket is not None
    breaker.abandoned(ticket)
    assert breaker.state == "half open" and breaker.enter() is not None


def test_late_verdicts_of_an_earlier_state_are_ignored(breaker: CircuitBreaker, clock: Clock) -> None:
    early = [breaker.enter() for _ in range(3)]
    assert None not in early
    fail(breaker, 3)
    for ticket in early:
        breaker.failed(ticket or 0)
    assert breaker.wait == 10.0
    clock.now += 10
    trial = breaker.enter()
    breaker.succeeded(early[0] or 0)
    breaker.abandoned(early[1] or 0)
    assert trial is not None and breaker.state == "half open" and breaker.enter() is None


def test_a_server_that_was_seen_alive_is_tried_before_the_cooldown_is_over(breaker: CircuitBreaker) -> None:
    breaker.seen_alive()
    assert breaker.state == "closed"
    fail(breaker, 3)
    breaker.seen_alive()
    assert breaker.state == "half open" and breaker.enter() is not None and breaker.enter() is None

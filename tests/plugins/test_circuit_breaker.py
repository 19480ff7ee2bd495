"""The circuit breaker, on a clock that the test holds."""

from __future__ import annotations

import pytest

from suimon.plugins.circuit_breaker import MAX_COOLDOWN, CircuitBreaker, Ticket


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


def entered(breaker: CircuitBreaker) -> Ticket:
    ticket = breaker.enter()
    assert ticket is not None
    return ticket


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.failed(entered(breaker))


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
    early = [entered(breaker) for _ in range(4)]
    fail(breaker, 3)
    for ticket in early:
        breaker.failed(ticket)
    assert breaker.wait == 10.0
    clock.now += 10
    trial = breaker.enter()
    breaker.succeeded(early[0])
    breaker.abandoned(early[1])
    breaker.failed(breaker.heard(early[2]))
    assert trial is not None and breaker.state == "half open" and breaker.enter() is None


def test_a_server_that_was_seen_alive_is_tried_before_the_cooldown_is_over(breaker: CircuitBreaker) -> None:
    breaker.seen_alive()
    assert breaker.state == "closed"
    fail(breaker, 3)
    breaker.seen_alive()
    assert breaker.state == "half open" and breaker.enter() is not None and breaker.enter() is None


def test_looks_that_fail_now_and_then_do_not_add_up(breaker: CircuitBreaker) -> None:
    for _ in range(10):
        breaker.seen_dead()
        breaker.seen_dead()
        breaker.seen_alive()
    assert breaker.state == "closed"
    for _ in range(3):
        breaker.seen_dead()
    assert breaker.state == "open"
    breaker.seen_dead()
    assert breaker.wait == 10.0, "nobody was let through, so nothing was learnt"


def test_the_first_part_of_an_answer_ends_a_trial_and_its_end_still_counts(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 10
    trial = breaker.heard(entered(breaker))
    assert breaker.state == "closed" and breaker.enter() is not None
    breaker.failed(trial)
    fail(breaker, 2)
    assert breaker.state == "open"


def test_failures_of_attempts_that_wait_since_before_an_outage_do_not_open_it_again(breaker: CircuitBreaker) -> None:
    dead = [breaker.heard(entered(breaker)) for _ in range(5)]
    breaker.seen_alive()  # the server was restarted
    for ticket in dead:
        breaker.failed(ticket)
    assert breaker.state == "closed"
    lively = [breaker.heard(breaker.heard(ticket)) for ticket in dead]
    for ticket in lively[:3]:
        breaker.failed(ticket)
    assert breaker.state == "open", "those heard of the server after the look"


def test_a_whole_answer_forgets_the_failures_before_it_whenever_it_began(breaker: CircuitBreaker) -> None:
    early = [entered(breaker), entered(breaker)]
    for ticket in early:
        fail(breaker, 2)
        breaker.succeeded(ticket)
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_a_trial_that_fails_reopens_even_if_the_server_was_seen_alive_meanwhile(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 10
    trial = entered(breaker)
    breaker.seen_alive()
    breaker.failed(trial)
    assert (breaker.state, breaker.wait) == ("open", 20.0)

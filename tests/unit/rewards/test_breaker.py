"""When an address is left alone."""

from __future__ import annotations

from digenrl.rewards.breaker import CircuitBreaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker(break_after=3, rest_s=10)
    for now in (0.0, 1.0):
        breaker.failed(now)
        assert breaker.wait_s(now) == 0
    breaker.succeeded()
    for now in (2.0, 3.0):
        breaker.failed(now)
    assert breaker.wait_s(3.0) == 0
    breaker.failed(4.0)
    assert breaker.wait_s(4.0) == 10 and breaker.wait_s(13.0) == 1


def test_after_its_rest_one_call_decides() -> None:
    breaker = CircuitBreaker(break_after=1, rest_s=10)
    breaker.failed(0.0)
    assert breaker.wait_s(10.0) == 0  # may try
    assert breaker.wait_s(10.0) > 0  # others wait for it
    breaker.failed(11.0)
    assert breaker.wait_s(12.0) == 9  # open again
    assert breaker.wait_s(21.0) == 0
    breaker.succeeded()
    assert breaker.wait_s(21.0) == breaker.wait_s(21.0) == 0

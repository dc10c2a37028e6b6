"""A reward that lies to the pool costs itself, in bounded time, and no neighbour."""

import time

import pytest

from tests.unit.environments.pool_case import samples

LIE = "hostile_rewards.lie"
BOUND_S = 120.0
"""Lies go on for ever, and a busy machine takes half a minute to start another worker."""


def forged(clock: str, number: str = "0") -> str:
    return f'{{"sample": {number}, "clock": {clock}, "reward": 1, "correct": null, "parts": {{}}}}'


LIES = {
    '{"began": NaN}': "is no result",
    '{"began": 0.0} then stream': "is no result",
    forged("Infinity"): "is no result",
    f"{forged('0.0', '7')} then stream": "is no result",
    '{"sample" then drip': "not done in data.reward.timeout_s=1.0 s",
}


@pytest.mark.parametrize(("what", "detail"), LIES.items(), ids=lambda text: text[:30])
def test_a_lie_costs_its_own_sample_alone(pool_of, what, detail):
    with pool_of(LIE, timeout_s=1.0) as pool:
        began = time.monotonic()
        lie, *others = pool.score(samples(what, " then ", " then sleep 0.2"))
        assert time.monotonic() - began < BOUND_S
    assert lie.value is None and detail in lie.detail
    assert [(one.value, one.status) for one in others] == [(1.0, "ok")] * 2
    assert 0.2 <= others[1].seconds < 1.0


@pytest.mark.parametrize("clock", ["-1e300", "1e300"])
def test_a_forged_result_moves_no_clock(pool_of, clock):
    """It takes the place of the sample's own result, which is then a message too many."""
    with pool_of(LIE, timeout_s=0.5) as pool:
        began = time.monotonic()
        results = pool.score(samples(f"{forged(clock)} then sleep 600", " then sleep 0.3"))
        assert time.monotonic() - began < BOUND_S
    assert [one.status for one in results] in (["ok", "ok"], ["ok", "timeout"])
    assert all(0 <= one.seconds < 2 for one in results)


def test_a_message_too_many_costs_no_other_sample(pool_of):
    """Who wrote it is not known, so the sample that runs gets another worker, once."""
    with pool_of(LIE) as pool:
        results = pool.score(samples(f"{forged('0.0')} then sleep 0", *[" then "] * 3))
    assert [one.value for one in results] == [1.0] * 4

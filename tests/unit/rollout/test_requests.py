"""Seeds are a function of their arguments alone."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rltrain.rollout.requests import request_seed

ARGS = st.tuples(st.integers(), st.integers(0), st.text(max_size=20), st.integers(0))


@given(ARGS)
def test_seed_fits_a_signed_64_bit_integer(args: tuple[int, int, str, int]) -> None:
    assert 0 <= request_seed(*args) < 2**63


@given(ARGS, ARGS)
def test_different_arguments_give_different_seeds(
    one: tuple[int, int, str, int], other: tuple[int, int, str, int]
) -> None:
    assert (request_seed(*one) == request_seed(*other)) == (one == other)


def test_seed_is_the_same_in_another_process() -> None:
    code = "from rltrain.rollout.requests import request_seed as s; print(s(1, 2, 'abc', 3))"
    found = {
        int(
            subprocess.check_output(
                [sys.executable, "-c", code], env={"PYTHONHASHSEED": h, "PYTHONPATH": "."}
            )
        )
        for h in ("0", "1")
    }
    assert found == {request_seed(1, 2, "abc", 3)}

"""Calls of remote methods are what the code says. That they fit the remote class, mypy checks."""

import pytest

from rltrain.controller.cluster.method_call import method_call


def test_the_method_and_its_arguments() -> None:
    call = method_call(lambda worker, rank: worker.save(rank, to="disk"), 3)
    assert call == ("save", (3,), {"to": "disk"})


def test_code_that_calls_no_method() -> None:
    with pytest.raises(AssertionError, match="expected one method call, found 1"):
        method_call(lambda worker: 1)

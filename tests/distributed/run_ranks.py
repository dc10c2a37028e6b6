"""Runs ranks for tests, with the package's own code."""

from collections.abc import Iterable

import pytest

from rltrain.policy.ranks import rendezvous, run_ranks

__all__ = ["asked_for", "rendezvous", "run_ranks"]


def asked_for(request: pytest.FixtureRequest, cases: Iterable[str]) -> list[str]:
    """Of the cases that a fixture of a module can run, those that this session's tests name as
    their ``case``; all of them where a test names none."""
    named = set()
    for item in request.session.items:
        if item.path == request.path:
            callspec = getattr(item, "callspec", None)
            named.add(None if callspec is None else callspec.params.get("case"))
    return [case for case in cases if case in named or None in named]

"""A short form of `python -m tests.reliability.fuzz`; see docs/reliability.md."""

import pytest

from tests.reliability.fuzz import KINDS, run

COUNTS = {"configurations": 150, "command lines": 15, "Parquet": 200, "JSONL": 300}
REACHED = {
    "configurations": {"valid", "refused"},
    "command lines": {"composed", "refused"},
    "JSONL": {"read", "refused"},
    "Parquet": {"read", "refused"},
    "checkpoint records": {"accepted", "refused"},
    "checkpoint tensors": {"runs no code", "refused"},
    "engine routes": {"taken", "refused"},
    "engine completions": {"taken", "refused"},
    "reward messages": {"taken", "refused"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_malformed_is_refused_in_words(kind: str) -> None:
    report = run(kind, COUNTS.get(kind, 400))
    assert not report.failures, "\n".join(report.failures[:3])
    assert report.outcomes.keys() >= REACHED[kind]

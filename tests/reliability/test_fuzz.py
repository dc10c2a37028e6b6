"""A short form of `python -m tests.reliability.fuzz`; see docs/reliability.md."""

import json
import random
from pathlib import Path

import pytest

from tests.reliability import fuzz
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


def test_what_must_not_be_is_counted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def try_one(dice: random.Random) -> str:
        assert dice.random() < 0.8, "it was accepted"
        return "refused"

    monkeypatch.setitem(KINDS, "made up", lambda _: try_one)
    file = tmp_path / "kept" / "fuzz.json"
    arguments = ["--only", "made up", "--count", "100", "--json", str(file)]
    assert fuzz.main(arguments) == 1
    (kept,) = json.loads(file.read_text())
    failures = len(kept["failures"])
    assert 5 < failures < 40 and kept["outcomes"] == {"refused": 100 - failures}
    shown = capsys.readouterr().out
    assert f"| made up | 100 | {100 - failures} refused | {failures} |" in shown
    assert shown.count("it was accepted") >= 3
    number = kept["failures"][0].partition(":")[0]
    assert fuzz.main(["--only", "made up", "--first", number, "--count", "1"]) == 1

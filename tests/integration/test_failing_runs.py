"""Runs that must stop: at once, in a sentence that says what to do, with what they had kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]

REWARD = "def score(response, answer, **columns):\n    raise KeyError('no such grade')\n"


def test_routes_that_mean_nothing_and_a_reward_that_raises(start: Any, tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text(REWARD)
    # In bf16 some routes differ from native ones, so a bound of 1 takes good routes for wrong ones.
    gated = start("gated", "trainer.steps=1", "routing_replay.min_overlap=1.0")
    raising = start("raising", "trainer.steps=1", "data.reward.function=broken_reward.score")
    for run, messages in (
        (gated, ["layer ", "native routing shares 0.9", "routing_replay.min_overlap=1.0"]),
        (raising, ["broken_reward.score", "32 of 32", "KeyError: 'no such grade'", "of prompt"]),
    ):
        run.wait(expect=1)
        assert all(message in run.output for message in messages), run.output
        assert "Traceback" not in run.output
        assert "Traceback" in (run.folder / "error.log").read_text()
        assert (run.folder / "report.html").exists()
        assert json.loads((run.folder / "outcome.json").read_text())["state"] == "failed"


def test_bad_data_ends_before_an_engine_starts(start: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    contents = {
        "empty": ([], "empty.jsonl has no rows: a dataset needs at least one"),
        "column": ([{"prompt": "1+1="}], "row 0 has no column 'answer'; columns found: 'prompt'"),
        "long": (
            [*rows, {"prompt": "1" * 100, "answer": "1"}],
            "row 40: the prompt has 101 tok",
        ),
    }
    runs = {}
    for name, (content, _) in contents.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        runs[name] = start(f"{name}-run", "data=jsonl", f"data.path={path}")
    for name, (_, message) in contents.items():
        run = runs[name].wait(expect=1)
        assert message in run.output
        assert "Traceback" not in run.output

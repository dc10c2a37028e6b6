"""compare.html: several runs, their differences, and a winner only where an interval says so."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from rltrain.tracking.report.compare import (
    compare_runs,
    config_differences,
    notes_of,
    read_runs,
    short_labels,
)
from rltrain.tracking.report.compare_page import write_comparison
from rltrain.tracking.report.frame import library


def _run(
    folder: Path,
    *,
    reward: float = 0.5,
    k3: float = 1e-4,
    accuracy: float = 0.6,
    seconds: float = 2.0,
    config: dict | None = None,
    steps: int = 60,
    seed: int = 0,
) -> Path:
    folder.mkdir(parents=True)
    noise = random.Random(f"{folder.name} {seed}")
    rows = [
        {
            "step": step,
            "reward/mean": reward + noise.gauss(0, 0.02),
            "mismatch/k3": k3 * noise.lognormvariate(0, 0.3),
            "time/step": seconds * noise.lognormvariate(0, 0.1),
        }
        for step in range(1, steps + 1)
    ]
    rows[-1] |= {"eval/accuracy": accuracy, "eval/num_scored": 512.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "trainer": {"output_dir": str(folder), "seed": seed},
                "data": {"source": "arithmetic", "seed": seed},
                **(config or {}),
            }
        )
    )
    return folder


def _verdicts(*folders):
    return {one.quantity: one for one in compare_runs(read_runs(folders))}


def test_runs_that_differ_are_told_apart_and_each_side_is_named(tmp_path):
    a = _run(tmp_path / "a")
    b = _run(tmp_path / "b", reward=0.6, k3=1e-5, accuracy=0.7, seconds=3.0)
    verdicts = _verdicts(a, b)
    assert {name: (one.verdict, one.state) for name, one in verdicts.items()} == {
        "Accuracy": ("higher", "good"),
        "Reward, last third": ("higher", "good"),
        "Seconds per step": ("higher", "bad"),
        "Mismatch k3": ("lower", "good"),
    }
    assert verdicts["Accuracy"].value == "+10.0 points"
    assert "512 problems, step 60" in verdicts["Accuracy"].interval
    assert re.fullmatch(r"x 1\.\d+", verdicts["Seconds per step"].value)


def test_equal_runs_have_no_winner(tmp_path):
    a, b = _run(tmp_path / "a"), _run(tmp_path / "b", accuracy=0.62)
    assert {one.verdict for one in _verdicts(a, b).values()} == {"no difference shown"}
    assert {one.state for one in _verdicts(a, b).values()} == {"unjudged"}


def test_rewards_and_accuracies_of_other_problems_are_not_judged(tmp_path):
    a = _run(tmp_path / "a")
    b = _run(tmp_path / "b", reward=0.9, accuracy=0.9, config={"data": {"source": "jsonl"}})
    verdicts = _verdicts(a, b)
    for name in ("Accuracy", "Reward, last third"):
        assert verdicts[name].verdict == "not judged: other data.source"
        assert verdicts[name].value


def test_short_runs_and_uncounted_evaluations_are_not_judged(tmp_path):
    a, b = _run(tmp_path / "a", steps=8), _run(tmp_path / "b", steps=9)
    verdicts = _verdicts(a, b)
    assert verdicts["Accuracy"].verdict.startswith("not judged: no evaluation of the same step")
    assert verdicts["Reward, last third"].verdict == "not judged: fewer than 10 common steps"


def test_every_evaluation_set_is_compared_and_parts_of_the_reward_are_not(tmp_path):
    folders = [_run(tmp_path / name) for name in "ab"]
    row = {"step": 99, "eval/gsm8k/accuracy": 0.5, "eval/gsm8k/num_scored": 100.0}
    for folder in folders:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**row, "eval/part/accuracy": 0.5}) + "\n")
    assert [name for name in _verdicts(*folders) if "Accuracy" in name] == [
        "Accuracy",
        "Accuracy, gsm8k",
    ]


def test_one_seed_each_is_said_and_runs_that_differ_in_the_seed_alone(tmp_path):
    runs = read_runs([_run(tmp_path / "a"), _run(tmp_path / "b", seed=1)])
    changes = config_differences(runs)
    notes = notes_of(runs, changes)
    assert "One seed each: a has seed 0, b has seed 1." in notes[0]
    assert any("differ in the seed alone" in note for note in notes)
    other = read_runs(
        [_run(tmp_path / "c"), _run(tmp_path / "d", config={"optimizer": {"lr": 1.0}})]
    )
    assert config_differences(other) == {"optimizer.lr": ["not set", 1.0]}
    assert not any("alone" in note for note in notes_of(other, config_differences(other)))


def test_what_is_no_run_is_refused(tmp_path):
    a = _run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    for folders, said in (
        ([a], "at least two folders of runs, found 1"),
        ([a, tmp_path / "empty"], "empty is no run folder: expected metrics.jsonl"),
        ([a, tmp_path / "none"], "none is no run folder"),
        ([a, a / "metrics.jsonl"], "is no run folder"),
        ([a, tmp_path / "b" / ".." / "a"], "was given twice"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_runs(folders)


def test_runs_without_a_common_metric_get_a_page_that_says_so(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, name in zip(folders, ("reward/mean", "sft/loss"), strict=True):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, name: 0.5}) + "\n")
    page, _ = write_comparison(folders, tmp_path / "out.html")
    assert "The runs have no metric in common" in page.read_text()


def test_the_page_has_a_line_per_run_and_no_markup_of_a_run(tmp_path):
    attack = "</script><img src=x onerror=alert(1)>"
    folders = [
        _run(tmp_path / "x" / "run", config={attack: attack}),
        _run(tmp_path / "y" / "run"),
        _run(tmp_path / "z" / "run"),
    ]
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 99, attack: 1.0}) + "\n")
    page, _ = write_comparison(folders, tmp_path / "compare.html")
    text = page.read_text().replace(library(), "")
    assert "<img" not in text and text.count("</script>") == 3
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', text, re.S)[1])
    for chart in data["charts"].values():
        if "Accuracy" not in chart["title"]:
            assert [line["label"] for line in chart["lines"]] == ["x/run", "y/run", "z/run"]
    assert [line["label"] for line in data["metric_lines"][attack]] == ["x/run"]


def test_labels_are_as_short_as_they_can_be():
    assert short_labels([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_labels([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "b/y"]

"""report.html: whole, self-contained, and safe with whatever a model writes."""

import html.parser
import json
import math
import re
import shutil

import pytest
import yaml

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.report import write_report
from rltrain.tracking.tracker import Tracker
from rltrain.tracking.verdicts import verdicts

VOID = {"meta", "link", "br", "img", "input", "hr"}
# Everything that makes a browser fetch, from the page or from CSS.
FETCHES = re.compile(r"(?:\b(?:src|href|srcset|action)\s*=)|@import|url\(", re.I)


class Outline(html.parser.HTMLParser):
    """Collects tags and text, and fails on a tag that is closed out of order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def _page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def _row(**metrics):
    return {name.replace("__", "/"): value for name, value in metrics.items()}


def test_a_finished_run_shows_every_part(run_dir):
    page = _page(run_dir)
    text = " ".join(Outline(page).text)
    for part in (
        "GRPO with routing replay R3",
        "60 of 60",
        "2 cores, 24 GiB, no GPU",
        "Accuracy on held-out problems",
        "k3 over all response tokens",
        "native routing",
        "layer 4",
        "Seconds a step, by phase",
        "What is 3 + 17?",
        "cut at the limit",
    ):
        assert part in text
    assert Outline(page).tags.count("svg") == 6
    assert not re.search(r"\bnan\b|\binf\b", text, re.I)


def test_the_page_fetches_nothing(run_dir):
    page = _page(run_dir)
    assert FETCHES.search(page) is None
    assert "://" not in page
    assert "script" not in Outline(page).tags


def test_what_a_model_or_a_file_says_is_text_and_never_markup(tmp_path):
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    sample = {
        "prompt": attack,
        "response": attack,
        "answer": attack,
        "reward": 0.0,
        "finish_reason": "stop",
    }
    config = {"model": {"path": attack}, "trainer": {"seed": attack}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    tracking = TrackingConfig(wandb="disabled")
    tracker = Tracker(tmp_path, tracking, config, {attack: attack, "machine": attack}, num_steps=1)
    tracker.log(0, {"reward/mean": 0.0})
    tracker.samples(0, [sample])
    tracker.finish(RuntimeError(attack))
    outline = Outline(_page(tmp_path))
    assert not {"script", "img"} & set(outline.tags)
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    # Model, seed, a version twice, the error; then prompt, response, answer; and the config.
    assert "".join(outline.text).count(attack) >= 11


def test_a_run_that_failed_says_so(tmp_path, run_dir):
    for name in ("config.yaml", "versions.json", "metrics.jsonl"):
        shutil.copy(run_dir / name, tmp_path / name)
    outcome = {"state": "failed", "error": "ValueError: layer 2 overlaps 0.31", "ended": "now"}
    (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    write_report(tmp_path)
    text = "".join(Outline(_page(tmp_path)).text)
    assert "The run failed." in text
    assert "layer 2 overlaps 0.31" in text


def test_an_empty_run_folder_still_gives_a_page(tmp_path):
    text = "".join(Outline(_page(write_report(tmp_path).parent)).text)
    assert "No step was logged." in text
    assert "has not ended" in text


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run folder"):
        write_report(tmp_path / "nothing")


def test_verdicts_weigh_by_tokens_and_use_only_paired_steps():
    rows = [
        _row(step=0, mismatch__k3=1e-4, mismatch_native__k3=4e-4, mismatch__num_tokens=100),
        _row(step=1, mismatch__k3=9.0, mismatch__num_tokens=1000),
        _row(step=2, mismatch__k3=3e-4, mismatch_native__k3=8e-4, mismatch__num_tokens=300),
    ]
    (k3,) = verdicts(rows, "r3")
    assert k3.value == "2.5e-4"
    assert k3.detail == "native 7e-4, 2.8x lower (2.7 to 4.0 over 2 steps); 400 tokens"
    assert k3.state == "good"


@pytest.mark.parametrize("name", ["k3", "abs_diff_median_flipped"])
@pytest.mark.parametrize(
    ("trained", "replay", "state"),
    [
        ([0.9, 0.2, 0.3], "r3", "good"),
        ([1.1, 0.2, 0.3], "r3", "mixed"),  # 2 times lower on the whole, and worse in step 1
        ([1.0, 1.0], "r3", "bad"),
        ([0.2], "r3", "unjudged"),  # one step knows nothing of its spread
        ([1.2], "r3", "bad"),
        ([0.1, 0.1], "r2", "unjudged"),
        ([1.0, 1.0], "off", "unjudged"),
    ],
)
def test_a_mismatch_is_judged_by_every_step_under_r3_only(name, trained, replay, state):
    rows = [
        {
            "step": step,
            f"mismatch/{name}": value,
            f"mismatch_native/{name}": 1.0,
            "mismatch/num_flipped": 7,
            "mismatch/num_tokens": 7,
        }
        for step, value in enumerate(trained, start=1)
    ]
    (found,) = verdicts(rows, replay)
    assert found.state == state
    assert f"{7 * len(trained)} tokens" in found.detail
    if len(trained) > 1:
        low, high = 1 / max(trained), 1 / min(trained)
        assert f"({low:.1f} to {high:.1f} over {len(trained)} steps)" in found.detail


@pytest.mark.parametrize(
    ("accuracies", "state"),
    [
        ([0.5, 0.9], "good"),
        ([0.5, 0.56], "mixed"),  # 6 +- 6.1 points of 512 problems
        ([0.5, 0.57], "good"),
        ([0.5, 0.4], "bad"),
        ([0.5, 0.9, 0.7], "mixed"),  # it has learned, and lost some of it again
        ([1.0, 1.0], "mixed"),
        ([0.0, 0.004], "mixed"),  # 2 of 512
    ],
)
def test_accuracy_is_judged_by_the_interval_of_its_problems(accuracies, state):
    rows = [
        _row(step=step, eval__accuracy=value, eval__num_scored=512)
        for step, value in enumerate(accuracies)
    ]
    (accuracy,) = verdicts(rows, "r3")
    assert accuracy.state == state
    assert ("90.0% at step 1" in accuracy.detail) == (accuracies[-1] == 0.7)


def test_coverage_and_accuracy_verdicts():
    rows = [
        _row(step=0, routing__coverage=1.0, eval__accuracy=0.5),
        _row(step=1, routing__coverage=0.999),
        _row(step=2, routing__coverage=1.0, eval__accuracy=0.4),
    ]
    accuracy, coverage = verdicts(rows, "r3")
    assert (accuracy.value, accuracy.state) == ("50.0% to 40.0%", "unjudged")
    assert (coverage.value, coverage.state) == ("0.999", "bad")
    assert verdicts(rows[:1], "r3")[0].value == "1.0"


def test_a_long_run_of_a_deep_model_stays_small(tmp_path):
    tracking = TrackingConfig(wandb="disabled")
    with Tracker(tmp_path, tracking, {}, {}, num_steps=1000) as tracker:
        for step in range(1000):
            layers = {f"routing/overlap/layer_{i}": 0.9 for i in range(1, 49)}
            phases = {"time/generate": 2.0, "time/update": math.pi, "time/step": 5.5}
            tracker.log(step, {"reward/mean": 0.1, **phases, **layers})
    page = _page(tmp_path)
    assert page.count('class="cell"') <= 48 * 100
    assert page.count("phase-generate") < 200
    assert not re.search(r'(width|height)="-', page)

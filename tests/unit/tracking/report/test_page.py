"""report.html: whole, self-contained, and safe with whatever a model or a file says."""

import base64
import hashlib
import html.parser
import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.catalogue import METRICS
from rltrain.tracking.report import write_report
from rltrain.tracking.report.frame import FOLDER, SCRIPTS, json_script, library
from rltrain.tracking.tracker import Tracker

VOID = {"meta", "link", "br", "img", "input", "hr"}
# Everything that makes a browser fetch, from the page or from CSS.
FETCHES = re.compile(r"(?:\b(?:src|srcset|action)\s*=)|@import|url\(", re.I)
ATTACK = "</pre></script><!--<script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Outline(html.parser.HTMLParser):
    """Collects tags and text, and fails on a tag that is closed out of order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)


def _page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def _data(page):
    return json.loads(Outline(page).scripts[0])


def _text(page):
    return " ".join(" ".join(Outline(page).text).split())


def _write_rows(folder, rows, tail=""):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail)
    return _page(write_report(folder).parent)


def test_a_finished_run_shows_every_part(run_dir):
    page = _page(run_dir)
    text = _text(page)
    for part in (
        "GRPO with routing replay R3",
        "60 of 60",
        "The run finished.",
        "2 cores, 24 GiB, no GPU",
        "Accuracy on held-out problems",
        "k3 over all response tokens",
        "Experts that native routing also picks, by layer",
        "Seconds per step, by phase",
        "What is 3 + 17?",
        "cut at the limit",
        "grpo_moe_r3 as measured by its authors, 3 seeds",
    ):
        assert part in text
    data = _data(page)
    charts = {chart["title"]: chart for chart in data["charts"].values()}
    assert {line["label"] for line in charts["k3 over all response tokens"]["lines"]} == {
        "as trained",
        "native routing",
    }
    assert Outline(page).attributes.count(("class", "chart")) == len(charts) == len(data["charts"])
    assert not re.search(r"\bnan\b|\binf\b", text, re.I)


def test_the_page_fetches_nothing_and_runs_its_own_scripts_alone(run_dir):
    page = _page(run_dir)
    outline = Outline(page)
    _, chart_library, script = outline.scripts
    own_part = page.replace(chart_library, "")
    assert FETCHES.search(own_part.replace(script, "")) is None
    assert "://" not in own_part
    (policy,) = [v for name, v in outline.attributes if name == "content" and "script-src" in v]
    for text in (chart_library, script):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_scripts_cannot_be_ended_by_their_own_text():
    for text in (library(), *((FOLDER / name).read_text() for name in SCRIPTS)):
        assert not re.search(r"</script|<!--|<script", text, re.I)
    assert json.loads(json_script({ATTACK: [ATTACK]})) == {ATTACK: [ATTACK]}
    assert not set("<>&") & set(json_script({ATTACK: ATTACK}))


def test_the_chart_library_is_the_published_one():
    """Its version and hash are those that vendor/ECHARTS.txt names."""
    noted = (FOLDER / "vendor" / "ECHARTS.txt").read_text()
    digest = hashlib.sha256((FOLDER / "vendor" / "echarts.min.js").read_bytes()).hexdigest()
    assert f"{digest}  echarts.min.js" in noted
    (version,) = re.findall(r"\.version=\"(6\.[\d.]+)\"", library()) or [""]
    assert f"ECharts {version}," in noted


def test_what_a_model_or_a_file_says_is_text_and_never_markup(tmp_path):
    sample = {
        "prompt": ATTACK,
        "response": ATTACK,
        "answer": ATTACK,
        "reward": 0.0,
        "finish_reason": ATTACK,
    }
    config = {"model": {"path": ATTACK}, "trainer": {"seed": ATTACK}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    tracking = TrackingConfig(backends=[])
    tracker = Tracker(tmp_path, tracking, config, {ATTACK: ATTACK, "machine": ATTACK}, num_steps=1)
    tracker.log(0, {"reward/mean": 0.0})
    tracker.samples(0, [sample])
    rollout = {"step": 1, **sample, "tokens": [ATTACK], "reward_parts": {ATTACK: 1.0}}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    changes = {ATTACK: {"recipe": ATTACK, "run": ATTACK}}
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "x", "changes": changes}))
    tracker.finish(RuntimeError(ATTACK))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, ATTACK: 1.0, f"{ATTACK}/layer_1": 1.0}) + "\n")
    page = _page(write_report(tmp_path).parent)
    outline = Outline(page)
    assert outline.tags.count("script") == 3 and "img" not in outline.tags
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    # Model, seed, a version twice, the error; prompt, response, answer, reason; config; metrics.
    assert "".join(outline.text).count(ATTACK) >= 12
    assert ATTACK in json.dumps(_data(page)).encode().decode("unicode_escape")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"state": "failed", "error": "ValueError: layer 2 overlaps 0.31"}, "The run failed. V"),
        ({"state": "interrupted", "step": 7, "error": None}, "The run was interrupted at step 7."),
        ({"state": "interrupted", "error": "Ctrl-C"}, "The run was interrupted. Ctrl-C"),
        ({"state": "finished", "error": None}, "The run finished."),
        ({"state": "of another version"}, "The outcome is of another version."),
        (None, "The run has not ended."),
    ],
)
def test_the_page_says_how_the_run_ended(outcome, said, tmp_path, run_dir):
    for name in ("config.yaml", "versions.json", "metrics.jsonl"):
        shutil.copy(run_dir / name, tmp_path / name)
    if outcome:
        (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    write_report(tmp_path)
    assert said in _text(_page(tmp_path))


def test_an_empty_run_folder_still_gives_a_page(tmp_path):
    text = _text(_page(write_report(tmp_path).parent))
    assert "No step was logged." in text
    assert "has not ended" in text


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run folder"):
        write_report(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.yaml", "a: [1", "config.yaml: expected YAML"),
        ("config.yaml", "- 1", "config.yaml: expected sections of keys"),
        ("versions.json", "{", "versions.json: expected JSON"),
        ("outcome.json", "[]", "outcome.json: expected a JSON object"),
        ("metrics.jsonl", 'no\n{"step": 1}\n', "metrics.jsonl:1: expected a JSON object"),
        ("rollouts.jsonl", "no\n", "rollouts.jsonl:1: expected a JSON object"),
        ("rollouts.jsonl", '{"step": 1, no\n', "rollouts.jsonl:byte 0: expected a JSON object"),
        ("rollouts.jsonl", '{"group": 1}\n', "rollouts.jsonl:1: expected an int 'step'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        write_report(tmp_path)


def test_a_torn_line_null_and_strange_values_and_repeated_steps_are_told(tmp_path):
    rows = [
        {"step": 2, "reward/mean": 0.2, "policy/grad_norm": None},
        {"step": 1, "reward/mean": 0.1, "policy/grad_norm": 1.0, "note": "text"},
        {"step": 2, "reward/mean": 0.3, "policy/entropy": float("nan")},
    ]
    page = _write_rows(tmp_path, rows, tail='{"step": 3, "rew')
    text = _text(page)
    assert "The last line of metrics.jsonl was cut off" in text
    assert "policy/entropy was not finite in 1 steps, first in step 2." in text
    assert "Not a number, so left out: note." in text
    assert "1 steps were logged more than once. The last line of each counts." in text
    assert "policy/entropy not finite" in text


def test_a_run_of_one_step_says_so_and_still_has_its_charts(tmp_path):
    page = _write_rows(tmp_path, [{"step": 1, "reward/mean": 0.5, "routing/load_max/layer_0": 1}])
    assert "One step was logged" in _text(page)
    assert {chart["kind"] for chart in _data(page)["charts"].values()} == {"lines", "heatmap"}


def test_a_resumed_run_says_after_which_steps(tmp_path):
    for first_step in (0, 4, 9):
        tracking = TrackingConfig(backends=[])
        with Tracker(tmp_path, tracking, {}, {}, num_steps=9, first_step=first_step) as tracker:
            tracker.log(first_step, {"reward/mean": 0.1})
    page = _page(tmp_path)
    assert "The run was resumed after step 3, 8." in _text(page)
    assert _data(page)["resumed"] == [3, 8]


def test_metrics_of_another_version_are_shown(tmp_path):
    rows = [{"step": s, "own/margin": 0.1 * s, "gone/metric": 1.0} for s in range(3)]
    page = _write_rows(tmp_path, rows)
    text = _text(page)
    assert "Not in the catalogue" in text and "gone/metric" in text
    (chart,) = _data(page)["charts"].values()
    assert (chart["title"], chart["lines"][0]["label"]) == ("Statistics of your own loss", "margin")
    assert "gone/metric" in _data(page)["series"]


def test_a_lone_surrogate_does_not_stop_the_report(tmp_path):
    sample = {"step": 0, "prompt": "a", "response": "\ud800", "answer": "", "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text(json.dumps({**sample, "finish_reason": "stop"}) + "\n")
    assert "?" in _page(write_report(tmp_path).parent)


def test_every_script_and_template_is_in_the_package():
    names = {path.name for path in FOLDER.iterdir()}
    assert {*SCRIPTS, "page.css", "report.html.j2", "frame.html.j2", "figures.html.j2"} <= names
    assert Path(FOLDER / "vendor" / "LICENSE-echarts").read_text().lstrip().startswith("Apache")


NAMES = [metric.name.replace("{", "").replace("}", "") for metric in METRICS]
NAMES += ["routing/overlap/layer_0", "routing/overlap/layer_59", "own/x", "a", ""]
VALUES = st.one_of(
    st.sampled_from(
        [None, math.nan, math.inf, 0, -1, True, "text", [1], {}, 10**30, 1e300, 1e-300]
    ),
    st.floats(),
)
ROWS = st.lists(
    st.tuples(st.integers(-5, 10**7), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_any_numbers_give_a_page(rows):
    with tempfile.TemporaryDirectory() as name:
        page = _write_rows(Path(name), [{**values, "step": step} for step, values in rows])
    _data(page)


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"tiny": {}}},
        {"model": {"tiny": None}, "policy": {"parallel": None}},
        {"model": None, "algorithm": "grpo", "trainer": [1]},
        {"routing_replay": {"mode": None}},
    ],
)
def test_a_configuration_of_another_version_gives_a_page(config, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("outcome", "invariants", "recipe", "versions"):
        (tmp_path / f"{name}.json").write_text('{"other": 1}')
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n')
    _write_rows(tmp_path, [{"step": 1, "reward/mean": 0.5}])

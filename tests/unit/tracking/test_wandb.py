"""An offline wandb run, read back with wandb's own reader."""

import json
import os
import subprocess
import sys

import pytest

from rltrain.tracking.catalogue import METRICS
from rltrain.tracking.dashboard import DASHBOARD, panel_lines
from rltrain.tracking.metrics import find_metric
from rltrain.tracking.wandb import STEP, dashboard_view
from tests.unit.tracking.conftest import KNOWN

LAYERS = {f"routing/overlap/layer_{i}": 0.9 for i in (1, 2)}


def read_back(folder):
    """The records of each run in the folder, the oldest first, by `wandb leet inspect`."""
    files = sorted(
        folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    )
    environment = os.environ | {"WANDB_ERROR_REPORTING": "false"}
    return [
        [
            json.loads(line)
            for line in subprocess.run(
                [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
                env=environment,
                stdin=subprocess.DEVNULL,
            ).stdout.splitlines()
        ]
        for file in files
    ]


def _records(run, kind):
    return [record[kind] for record in run if record["type"] == kind]


@pytest.fixture(scope="module")
def runs(copied_run):
    return read_back(copied_run)


def test_metrics_lie_on_the_step_axis(runs):
    history = [r["item"] for r in _records(runs[0], "history") if "reward/mean" in r["item"]]
    assert [(item[STEP], item["reward/mean"]) for item in history] == [(0, 0), (1, 0.25)]
    assert history[0]["routing/overlap/layer_2"] == 0.9


def test_every_metric_of_the_catalogue_has_the_step_axis(runs):
    defined = {
        record.get("name") or record["glob_name"]: record for record in _records(runs[0], "metric")
    }
    for metric in METRICS:
        assert defined[metric.glob]["step_metric"] == STEP
    assert defined["eval/accuracy"]["summary"]["max"] is True
    assert defined["mismatch/k3"]["summary"]["min"] is True


def test_samples_and_rollouts_are_tables(runs, copied_run):
    for table, steps, shape in (("samples", [0], (2, 6)), ("rollouts", [0, 1], (1, 10))):
        items = [r["item"] for r in _records(runs[0], "history") if f"{table}._type" in r["item"]]
        assert [item[STEP] for item in items] == steps
        assert {item[f"{table}._type"] for item in items} == {"table-file"}
        assert {(item[f"{table}.nrows"], item[f"{table}.ncols"]) for item in items} == {shape}
    files = copied_run.glob("wandb/offline-run-*/files/media/table/rollouts_*.table.json")
    tables = [json.loads(file.read_text()) for file in files]
    assert len(tables) == 4
    row = dict(zip(tables[0]["columns"], tables[0]["data"][0], strict=True))
    assert row["reward_parts"] == '{"brief": -0.5}' and row["advantage"] == 0.25


def test_an_alert_is_one_of_wandb(runs):
    (alert,) = _records(runs[0], "alert")
    assert (alert["title"], alert["level"]) == ("missing routes", "WARN")
    assert alert["text"].startswith("Since step 0: routing/coverage is 0.5")
    assert _records(runs[1], "alert") == []  # the resumed run remembers what was said


def test_the_dashboard_is_in_the_run_by_section(runs):
    prefix = "_wandb.visualize."
    charts = {
        name.removeprefix(prefix): chart["panel_config"]
        for record in _records(runs[0], "config")
        for name, chart in record["update"].items()
        if name.startswith(prefix)
    }
    # Nothing was logged that the other panels could show.
    assert set(charts) == {
        "learning/reward",
        "mismatch/k3, as trained and native",
        "routing/coverage",
        "routing/overlap",
        "routing/overlap per layer",
    }
    assert charts["learning/reward"]["stringSettings"] == {"title": "reward", "xname": "step"}


def test_no_secret_reaches_wandb(runs):
    (started,) = _records(runs[0], "run")
    assert started["config"]["update"]["trainer"] == {"seed": 7, "steps": 4}
    assert "hf_do_not_show" not in json.dumps(runs)
    assert KNOWN not in json.dumps(runs)


def test_a_resumed_run_keeps_its_id_and_a_failed_one_says_so(runs):
    first, second = runs
    assert _records(first, "run")[0]["run_id"] == _records(second, "run")[0]["run_id"]
    assert _records(first, "exit")[0]["exit_code"] == 1
    assert _records(second, "exit")[0].get("exit_code", 0) == 0


def test_the_dashboard_has_the_sections_and_only_known_metrics():
    assert list(DASHBOARD) == [
        *("learning", "critic", "mismatch", "routing", "rollout", "performance")
    ]
    for panels in DASHBOARD.values():
        for panel in panels:
            for name in panel.metrics:
                assert find_metric(name.replace("{layer}", "1"))


def test_a_family_is_one_line_a_member():
    (panel,) = [p for p in DASHBOARD["routing"] if p.title == "overlap per layer"]
    rows = [
        {"step": 4, **LAYERS, "routing/overlap": 0.1},
        {"step": 5, "routing/overlap/layer_1": 0.8},
    ]
    assert panel_lines(panel, rows) == {
        "routing/overlap/layer_1": ([4, 5], [0.9, 0.8]),
        "routing/overlap/layer_2": ([4], [0.9]),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")
def test_the_saved_view_has_every_panel():
    pytest.importorskip("wandb_workspaces")
    view = dashboard_view("entity", "project")
    spec = view._to_model().spec.model_dump(by_alias=True, mode="json")
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(DASHBOARD)
    for section in sections:
        titles = [panel["config"]["chartTitle"] for panel in section["panels"]]
        assert titles == [panel.title for panel in DASHBOARD[section["name"]]]
        assert {panel["config"]["xAxis"] for panel in section["panels"]} == {STEP}

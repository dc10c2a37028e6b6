"""The recipe of a run: what it changed, and whether the expected curve can be drawn."""

import json

import pytest
import yaml

from rltrain.controller.run_data import RunData
from rltrain.main import main as train
from rltrain.tracking.report import write_report
from rltrain.tracking.report.recipe_curve import expected_curve, recipe_of
from rltrain.tracking.report.run_folder import read_run

COMMAND = "# python -m rltrain.main +recipe=grpo_moe_r3"


def _recipe(folder, command, changes=None):
    (folder / "config.yaml").write_text(f"{command}\n{yaml.safe_dump({'trainer': {'seed': 1}})}")
    if changes is not None:
        (folder / "recipe.json").write_text(json.dumps({"name": "grpo_moe_r3", "changes": changes}))
    return recipe_of(read_run(folder))


def test_a_run_of_the_recipe_has_its_three_seeds(tmp_path):
    curves, note = expected_curve(_recipe(tmp_path, COMMAND))
    assert len(curves) == 3 and "3 seeds" in note and "override" not in note
    first = curves["expected seed_0"]
    assert (first.steps[0], first.values[0]) == (0.0, pytest.approx(0.529))


@pytest.mark.parametrize(
    ("override", "drawn", "said"),
    [
        ("trainer.steps=20", True, "This run overrides trainer.steps."),
        ("policy=tp2_pp2", True, "This run overrides policy."),
        ("trainer.output_dir=/tmp/x", True, "3 seeds."),
        ("data.reward.num_workers=4", True, "3 seeds."),
        ("data.reward.shuffle=true", False, "another data.reward.shuffle"),
        ("data=jsonl", False, "another data"),
        ("++model.tiny.num_layers=8", False, "another model.tiny.num_layers"),
    ],
)
def test_the_curve_is_drawn_only_where_model_and_data_are_the_recipes(
    override, drawn, said, tmp_path
):
    curves, note = expected_curve(_recipe(tmp_path, f"{COMMAND} {override}"))
    assert bool(curves) == drawn
    assert said in note


def test_saved_changes_count_more_than_the_command_line(tmp_path):
    changes = {"optimizer.lr": {"recipe": 1e-4, "run": None}}
    recipe = _recipe(tmp_path, f"{COMMAND} data=jsonl", changes)
    assert recipe.changes == [("optimizer.lr", "0.0001", "null")]
    curves, note = expected_curve(recipe)
    assert curves and "This run overrides optimizer.lr." in note


@pytest.mark.parametrize(
    "command", ["# python -m rltrain.main trainer.steps=1", "# an 'open quote", "trainer: {}"]
)
def test_a_run_without_a_recipe_has_none(command, tmp_path):
    assert _recipe(tmp_path, command) is None


def test_a_recipe_of_ones_own_has_no_curve(tmp_path):
    assert expected_curve(_recipe(tmp_path, "# rltrain train +recipe=mine")) == ({}, "")


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A run that ends before it starts anything; returns its recipe.json."""

    monkeypatch.setattr("rltrain.controller.checks.preflight.preflight", lambda _: RunData())
    monkeypatch.setattr("rltrain.controller.rl.run", lambda *_: None)

    def start(*overrides):
        assert train([*overrides, f"trainer.output_dir={tmp_path}/run"]) == 0
        return json.loads((tmp_path / "run" / "recipe.json").read_text())

    return start


def test_a_run_saves_what_it_changed_of_its_recipe(started, tmp_path):
    saved = started("+recipe=grpo_moe_r3", "trainer.steps=3")
    assert saved == {"name": "grpo_moe_r3", "changes": {"trainer.steps": {"recipe": 40, "run": 3}}}
    page = write_report(tmp_path / "run").read_text()
    assert "1 differences from the recipe grpo_moe_r3" in page


def test_a_recipe_file_of_ones_own_is_a_recipe(started, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ntrainer:\n  steps: 5\n")
    saved = started(str(file), "trainer.steps=3", "optimizer.lr=0.5")
    assert saved["name"] == str(file)
    assert saved["changes"]["trainer.steps"] == {"recipe": 5, "run": 3}
    assert set(saved["changes"]) == {"trainer.steps", "optimizer.lr"}
    assert recipe_of(read_run(tmp_path / "run")).name == str(file)

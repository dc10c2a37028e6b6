"""Who gets a live panel, and which steps take longer."""

import io
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from rltrain.config import Config
from rltrain.config.trainer import TrainerConfig
from rltrain.controller.run_progress import run_progress
from rltrain.controller.weight_sync import is_sync_due
from rltrain.tracking.panel import LivePanel
from rltrain.tracking.progress import ProgressLines


def config(folder: Path) -> Config:
    trainer = {"output_dir": str(folder), "steps": 10, "eval_every": 4, "sync_every": 2}
    return Config.model_validate(
        {
            "trainer": trainer,
            "checkpoint": {"every": 6},
            "data": {"max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 16},
        }
    )


def test_a_terminal_gets_a_panel_and_a_pipe_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    here = config(tmp_path / "outputs" / "run")
    with closing(run_progress(here, has_held_out=True, console=terminal)) as progress:
        assert isinstance(progress, LivePanel)
        assert progress._title == "rltrain  outputs/run"
    pipe = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(run_progress(here, has_held_out=True, console=pipe), ProgressLines)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(run_progress(here, has_held_out=True, console=dumb), ProgressLines)


def test_steps_that_do_more(tmp_path: Path) -> None:
    pipe = Console(file=io.StringIO(), force_terminal=False)
    progress = run_progress(config(tmp_path), has_held_out=True, console=pipe)
    assert isinstance(progress, ProgressLines)
    due = {
        name: [step for step in range(1, 11) if is_due(step)]
        for name, is_due in progress._eta.due.items()
    }
    assert due == {"eval": [4, 8, 10], "checkpoint": [6, 10], "weight_sync": [2, 4, 6, 8, 10]}


def test_the_last_step_syncs_for_its_evaluation_alone() -> None:
    trainer = TrainerConfig(steps=5, sync_every=2)
    assert [step for step in range(1, 6) if is_sync_due(trainer, step, evaluates=False)] == [2, 4]
    assert is_sync_due(trainer, 5, evaluates=True)
    assert not is_sync_due(trainer, 3, evaluates=True)

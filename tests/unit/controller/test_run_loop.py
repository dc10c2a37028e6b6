"""Whether a run in a folder has steps left."""

import json
from pathlib import Path

import pytest

from rltrain.config import Config
from rltrain.controller.run_loop import is_finished


def config(folder: Path, steps: int, resume: str = "auto") -> Config:
    trainer = {"output_dir": str(folder), "steps": steps, "resume": resume}
    return Config.model_validate({"trainer": trainer})


def leave(folder: Path, state: str, *saved: int) -> None:
    """What a run of this outcome leaves, with checkpoints after the given steps."""
    (folder / "outcome.json").write_text(json.dumps({"state": state}))
    for step in saved:
        path = folder / f"checkpoints/step_{step:06d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")


def test_a_run_without_an_outcome_goes_on(tmp_path: Path) -> None:
    """It was killed, or is new."""
    assert not is_finished(config(tmp_path, 5))
    leave(tmp_path, "failed", 5)
    assert not is_finished(config(tmp_path, 5))  # what follows the last step may be missing


@pytest.mark.parametrize("torn", ["", '{"state": "fin', "\0" * 80, "[]", '"finished"'])
def test_a_torn_outcome_is_none(torn: str, tmp_path: Path) -> None:
    leave(tmp_path, "finished", 5)
    (tmp_path / "outcome.json").write_text(torn)
    assert not is_finished(config(tmp_path, 5))


@pytest.mark.parametrize(("steps", "finished"), [(9, True), (10, True), (11, False)])
def test_a_finished_run_has_its_last_checkpoint_at_the_end(
    tmp_path: Path, steps: int, finished: bool
) -> None:
    leave(tmp_path, "finished", 8, 10)
    assert is_finished(config(tmp_path, steps)) == finished
    assert not is_finished(config(tmp_path, steps, resume="never"))


def test_a_finished_run_without_a_checkpoint_does_not_start_again(tmp_path: Path) -> None:
    leave(tmp_path, "finished")
    with pytest.raises(ValueError, match="finished and has no checkpoint to go on from"):
        is_finished(config(tmp_path, 5))

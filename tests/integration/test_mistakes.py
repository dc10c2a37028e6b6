"""What a user does wrong in the first hour: the real command, its exit status and its message.

`benchmarks/mistakes.py` has the commands, and measures the seconds until the message.
"""

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.mistakes import (
    JSONL,
    NO_MISTAKES,
    PLANTED,
    SIBLINGS,
    TRAIN,
    Mistake,
    environment,
    problems,
    run,
)
from benchmarks.mistakes_world import make_world
from rltrain.cli.app import main

pytestmark = pytest.mark.integration
IN_A_PROCESS_OF_THEIR_OWN = (
    "misspelt key",
    "wrong recipe",
    "reward that raises",
    "unwritable folder",
)
"""Of each stage of the checks one; the others share this process, in which torch is loaded once."""
LONGEST_S = 60.0
"""It takes some seconds; ten tests and runs of other people may share the cores."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def home(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The world as the current and the home folder of a user who is logged in nowhere."""
    monkeypatch.chdir(world)
    for name in os.environ.keys() - environment(world).keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(world))
    shutil.rmtree(world / "run", ignore_errors=True)
    return world


@pytest.mark.parametrize("mistake", [*PLANTED, *SIBLINGS], ids=lambda mistake: mistake.name)
def test_a_mistake_ends_in_a_message_that_says_what_to_do(
    mistake: Mistake, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if mistake.name in IN_A_PROCESS_OF_THEIR_OWN:
        outcome = run(mistake, home)
        assert outcome.seconds < LONGEST_S
        status, errors = outcome.status, outcome.errors
    else:
        status, errors = main(mistake.arguments), capfd.readouterr().err
    assert problems(mistake, status, errors) == [], errors
    if status == 2:  # nothing was started, and nothing is left
        assert not (home / "run").exists()


@pytest.mark.parametrize(
    "overrides", [case[1:] for case in NO_MISTAKES], ids=[c[0] for c in NO_MISTAKES]
)
def test_what_only_looks_like_a_mistake_works(
    overrides: tuple[str, ...], home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The data are read, and the run ends at the GPU that is not there."""
    assert main([*TRAIN, *JSONL, *overrides, "cluster.device=cuda"]) == 2
    assert "[RL4001]" in capfd.readouterr().err


def test_there_are_fifteen_and_as_many_others() -> None:
    assert len(PLANTED) == 15 and len(SIBLINGS) >= 15
    page = (Path(__file__).parents[2] / "docs/failures.md").read_text()
    for mistake in PLANTED:
        assert f"| {mistake.name} | {mistake.code} |" in page
    assert set(IN_A_PROCESS_OF_THEIR_OWN) <= {mistake.name for mistake in PLANTED}

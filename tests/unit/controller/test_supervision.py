"""A lost part starts the run again from its checkpoint; what would be raised again does not."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from rltrain.actors.failures import ActorFailed
from rltrain.config import Config
from rltrain.controller.supervision import Restarts, lost_a_part, supervise
from rltrain.weights.huggingface.manifest import write_manifest

DIED = ActorFailed("died", "policy.update", "policy worker 1 died")


def config(folder: Path, **trainer: object) -> Config:
    return Config.model_validate({"trainer": {"output_dir": str(folder), **trainer}})


def save(folder: Path, step: int) -> None:
    made = folder / "checkpoints" / f"step_{step:06d}"
    made.mkdir(parents=True)
    (made / "state.json").write_text(f'{{"step": {step}}}')
    write_manifest(made)


def failing(
    folder: Path, *errors: Exception, saves_from: int = 1
) -> tuple[list[str], Callable[[Config, Restarts], None]]:
    """An attempt that saves a checkpoint and then raises these, one a time; and how it resumed.

    Args:
        saves_from: the attempt that saves the first one
    """
    resumed: list[str] = []

    def attempt(config: Config, _: Restarts) -> None:
        resumed.append(config.trainer.resume)
        if len(resumed) <= len(errors):
            if len(resumed) >= saves_from:
                save(folder, len(resumed))
            raise errors[len(resumed) - 1]

    return resumed, attempt


def test_it_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed, attempt = failing(tmp_path, DIED, RayActorError())
    with caplog.at_level(logging.ERROR):
        supervise(config(tmp_path), attempt)
    assert resumed == ["never", "auto", "auto"]
    assert "policy worker 1 died [RL4007]" in caplog.messages[0]
    assert "from the checkpoint of step 1 (restart 1; at most" in caplog.messages[0]
    assert "from the checkpoint of step 2 (restart 2; at most" in caplog.messages[1]


def test_too_many_losses_end_it(tmp_path: Path) -> None:
    resumed, attempt = failing(tmp_path, *[DIED] * 3)
    with pytest.raises(RuntimeError, match=r"(?s)worker 1 died.*RL4007.*again 2 times") as raised:
        supervise(config(tmp_path, max_restarts=2), attempt)
    assert len(resumed) == 3 and raised.value.__cause__ is DIED


def test_before_the_first_checkpoint_it_starts_from_where_it_began(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed, attempt = failing(tmp_path, *[DIED] * 3, saves_from=3)
    with caplog.at_level(logging.ERROR):
        supervise(config(tmp_path, max_restarts=3), attempt)
    assert resumed == ["never", "never", "never", "auto"]
    assert "start again from step 0, since the run has saved no checkpoint" in caplog.messages[0]
    assert "from the checkpoint of step 3 (restart 3; at most" in caplog.messages[2]


@pytest.mark.parametrize("saves", [True, False])
def test_it_ends_when_it_may_not_start_again(saves: bool, tmp_path: Path) -> None:
    resumed, attempt = failing(tmp_path, DIED, saves_from=1 if saves else 2)
    with pytest.raises(ActorFailed) as raised:
        supervise(config(tmp_path, max_restarts=0), attempt)
    assert raised.value is DIED and len(resumed) == 1


def test_what_an_attempt_starts_again_counts_too(tmp_path: Path) -> None:
    attempts = 0

    def attempt(_: Config, restarts: Restarts) -> None:
        nonlocal attempts
        attempts += 1
        while restarts.take(time.monotonic()):
            pass
        raise DIED

    with pytest.raises(RuntimeError, match="parts were started again 2 times"):
        supervise(config(tmp_path, max_restarts=2), attempt)
    assert attempts == 1


@pytest.mark.parametrize(
    ("kind", "where", "lost"),
    [
        ("died", "rollout.generate, engine 0, step 3", True),
        ("silent", "critic.update", True),
        ("raised", "policy.update", False),
        ("raised", "rollout.load_weight_bucket", True),
        ("raised", "weights.connect", True),
    ],
)
def test_what_counts_as_a_loss(
    kind: Literal["raised", "died", "silent"], where: str, lost: bool
) -> None:
    assert lost_a_part(ActorFailed(kind, where, "text")) == lost
    assert not lost_a_part(ValueError("a message"))
    told = RuntimeError("checkpoint of step 3 not written")  # what followed from it
    told.__cause__ = ActorFailed(kind, where, "text")
    assert lost_a_part(told) == lost


@given(st.lists(st.floats(0, 50), min_size=1), st.integers(1, 4), st.floats(1, 20))
def test_no_window_has_more_restarts_than_allowed(
    gaps: list[float], limit: int, window_s: float
) -> None:
    restarts, now, taken = Restarts(limit, window_s), 0.0, list[float]()
    for gap in gaps:
        now += gap
        before = sum(now - window_s < time for time in taken)
        assert restarts.take(now) == (before < limit)
        taken += [now] if before < limit else []

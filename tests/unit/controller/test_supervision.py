"""A lost part starts the run again from its checkpoint; what would be raised again does not."""

import logging
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


def failing(folder: Path, *errors: Exception) -> tuple[list[str], Callable[[Config], None]]:
    """An attempt that saves a checkpoint and then raises these, one a time; and how it resumed."""
    resumed: list[str] = []

    def attempt(config: Config) -> None:
        resumed.append(config.trainer.resume)
        if len(resumed) <= len(errors):
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


@pytest.mark.parametrize(("limit", "saves"), [(0, True), (3, False)])
def test_it_ends_without_a_checkpoint_or_when_it_may_not(
    limit: int, saves: bool, tmp_path: Path
) -> None:
    if saves:
        save(tmp_path, 1)
    attempts = 0

    def attempt(_: Config) -> None:
        nonlocal attempts
        attempts += 1
        raise DIED

    with pytest.raises(ActorFailed) as raised:
        supervise(config(tmp_path, max_restarts=limit), attempt)
    assert raised.value is DIED and attempts == 1


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

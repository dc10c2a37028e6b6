"""The learning rate of every update."""

import pytest

from rltrain.config.optimizer import OptimizerConfig
from rltrain.policy.optimizer import LearningRate, lr_at


def rates(total: int, **options: object) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, **options})
    return [lr_at(config, update, total) for update in range(total + 1)]


def test_constant_after_warmup() -> None:
    assert rates(5, warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]


def test_linear_ends_at_min_lr() -> None:
    found = rates(4, schedule="linear", min_lr=0.2)
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    found = rates(6, schedule="cosine", warmup_steps=2, min_lr=0.1)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[4] == pytest.approx(0.55)
    assert found[6] == pytest.approx(0.1)
    assert found == [*found[:2], *sorted(found[2:], reverse=True)]


def test_never_rises_again_after_the_end() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", min_lr=0.1)
    assert lr_at(config, 1000, 10) == pytest.approx(0.1)


def test_router_peak_scales_and_stays_above_no_floor_of_others() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr=0.5)
    assert lr_at(config, 0, 10, peak=0.1) == pytest.approx(0.1)
    assert lr_at(config, 10, 10, peak=0.1) == pytest.approx(0.1)


def test_a_falling_schedule_must_know_its_end() -> None:
    with pytest.raises(ValueError, match="needs the number of updates"):
        LearningRate(None, OptimizerConfig(schedule="cosine"), None)  # type: ignore[arg-type]

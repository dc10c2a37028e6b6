"""What the actors of a run get of the GPUs there are."""

from typing import Any

import pytest

from rltrain.config import Config
from rltrain.controller.cluster import HALF, THIRD, Cluster, place


def with_ranks(**algorithm: Any) -> Config:
    values: dict[str, Any] = {"policy": {"parallel": {"dp": 2}}, "cluster": {"device": "cuda"}}
    return Config.model_validate({**values, "algorithm": algorithm})


def test_supervised_steps_need_no_gpu_for_an_engine() -> None:
    assert place(with_ranks(type="sft"), num_gpus=2) == Cluster("cuda", 1, 1)
    assert place(with_ranks(type="rl"), num_gpus=3) == Cluster("cuda", 1, 1)
    with pytest.raises(
        ValueError, match=r"2 GPUs for the policy and 1 for .* expected 3, .* found 2"
    ):
        place(with_ranks(type="rl"), num_gpus=2)


def with_critic(placement: str, dp: int = 2) -> Config:
    layout = {"policy": {"parallel": {"dp": dp}}, "critic": {"placement": placement}}
    return Config.model_validate(
        {**layout, "algorithm": {"advantage": "gae"}, "cluster": {"device": "cuda"}}
    )


def test_a_critic_shares_the_policys_gpus_or_has_its_own() -> None:
    shared, own = with_critic("shared"), with_critic("own")
    assert place(shared, num_gpus=3) == Cluster("cuda", HALF, 1, HALF)
    assert place(own, num_gpus=5) == Cluster("cuda", 1, 1, 1)
    with pytest.raises(ValueError, match=r"2 GPUs for the policy and 1 .* expected 3, .* found 2"):
        place(shared, num_gpus=2)
    with pytest.raises(
        ValueError,
        match=r"policy, 2 for the critic \(.*shared.*\), and 1 .* expected 5, .* found 4",
    ):
        place(own, num_gpus=4)


def test_policy_critic_and_engine_fit_on_one_gpu() -> None:
    placed = place(with_critic("shared", dp=1), num_gpus=1)
    assert placed == Cluster("cuda", THIRD, THIRD, THIRD) and 3 * THIRD <= 1
    with pytest.raises(ValueError, match=r"1 for the critic .* found 1"):
        place(with_critic("own", dp=1), num_gpus=1)

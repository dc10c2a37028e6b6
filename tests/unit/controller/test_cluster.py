"""What the actors of a run get of the GPUs there are."""

from typing import Any

import pytest

from rltrain.config import Config
from rltrain.controller.cluster import Cluster, place


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

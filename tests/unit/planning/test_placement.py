"""Which GPU every rank computes on."""

from typing import Any

import pytest

from rltrain.config import Config
from rltrain.planning.nodes import LOCAL, Slot
from rltrain.planning.place import on_one_cpu, place_locally
from rltrain.planning.placement import Placement


def config(placement: str = "auto", dp: int = 2, **sections: Any) -> Config:
    cluster = {"device": "cuda", "placement": placement}
    return Config.model_validate(
        {"policy": {"parallel": {"dp": dp}}, "cluster": cluster, **sections}
    )


def engines(num: int, tensor_parallel: int = 1) -> dict[str, int]:
    return {"num_engines": num, "tensor_parallel": tensor_parallel}


def slots(*gpus: int) -> tuple[Slot, ...]:
    return tuple(Slot(LOCAL, gpu) for gpu in gpus)


def on_gpus(
    policy: tuple[int, ...],
    *engines: tuple[int, ...],
    critic: tuple[int, ...] = (),
) -> Placement:
    placed = tuple(slots(*engine) for engine in engines)
    return Placement("cuda", (LOCAL,), slots(*policy), slots(*critic), placed)


def test_supervised_steps_need_no_gpu_for_an_engine() -> None:
    placed = place_locally(config("auto", algorithm={"type": "sft"}), num_gpus=2)
    assert placed == on_gpus((0, 1))
    assert not placed.colocated


def test_engines_have_their_own_gpus_where_there_are_enough() -> None:
    apart = place_locally(config(rollout=engines(2, 2)), num_gpus=7)
    assert apart == on_gpus((0, 1), (2, 3), (4, 5))
    assert not apart.colocated
    shared = place_locally(config(), num_gpus=2)
    assert shared == on_gpus((0, 1), (0,))
    assert shared.colocated
    wide = place_locally(config("colocated", dp=4, rollout=engines(2, 2)), num_gpus=8)
    assert wide == on_gpus((0, 1, 2, 3), (0, 1), (2, 3))
    with pytest.raises(
        ValueError,
        match=r"auto: expected 3 \(disaggregated\) or 2 \(colocated\) GPUs, found 1: "
        r"tp\*pp\*cp\*dp = 1\*1\*1\*2 = 2 policy ranks, num_engines\*tensor_parallel = 1\*1 = 1 ",
    ):
        place_locally(config(), num_gpus=1)
    with pytest.raises(ValueError, match=r"expected 3 \(disaggregated\) GPUs, found 2"):
        place_locally(config("disaggregated"), num_gpus=2)


def test_an_engine_rank_has_a_gpu_to_itself() -> None:
    with pytest.raises(ValueError, match=r"colocated: .* at most as many engine ranks as policy"):
        place_locally(config("colocated", rollout=engines(3)), num_gpus=8)
    with pytest.raises(ValueError, match=r"expected 5 \(disaggregated\) GPUs, found 4"):
        place_locally(config(rollout=engines(3)), num_gpus=4)


def test_a_critic_shares_the_policys_gpus_or_has_its_own() -> None:
    gae = {"advantage": "gae"}
    pairs = place_locally(config(algorithm=gae), num_gpus=3)
    assert pairs == on_gpus((0, 1), (2,), critic=(0, 1))
    three = place_locally(config(algorithm=gae, dp=1), num_gpus=1)
    assert three == on_gpus((0,), (0,), critic=(0,))

    own = config(algorithm=gae, critic={"placement": "own"})
    assert place_locally(own, 5) == on_gpus((0, 1), (4,), critic=(2, 3))
    assert place_locally(own, 4) == on_gpus((0, 1), (0,), critic=(2, 3))
    with pytest.raises(ValueError, match=r"found 3: .* critic ranks \(critic.placement=own\)"):
        place_locally(own, num_gpus=3)


def test_no_more_gpus_than_allowed() -> None:
    few = Config.model_validate({"cluster": {"num_gpus": 1}})
    assert place_locally(few, num_gpus=8).num_gpus == 1


def test_on_a_cpu_nothing_has_a_place_of_its_own() -> None:
    for cluster in ({"device": "cpu"}, {"device": "auto", "placement": "colocated"}):
        run = Config.model_validate({"cluster": cluster})
        placed = place_locally(run, num_gpus=0)
        assert placed == on_one_cpu(run) and not placed.colocated and placed.num_gpus == 0
        assert placed.policy == (Slot(LOCAL),) and placed.engines == ((Slot(LOCAL),),)


def test_says_where_everything_is() -> None:
    gae = {"advantage": "gae"}
    apart = place_locally(config(rollout=engines(2, 2)), num_gpus=6)
    assert str(apart) == "6 GPUs: policy on 0, 1; engines on 2, 3, 4, 5"
    shared = place_locally(config(algorithm=gae, dp=1), num_gpus=1)
    assert str(shared) == "1 GPU: policy on 0; critic on 0; engines on 0, colocated"
    assert str(Placement("cpu")) == "all ranks on this machine's CPUs"

"""Where ranks go on many nodes."""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import lcm
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import Config
from rltrain.config.policy import ParallelConfig
from rltrain.planning.node_layout import NodeLayout
from rltrain.planning.nodes import Node, Slot, in_order, planned_nodes
from rltrain.planning.place import place

LAYOUTS = [
    dict(zip(("tp", "cp", "dp", "pp", "ep", "etp"), sizes, strict=True))
    for sizes in product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2))
    if sizes[0] * sizes[1] * sizes[2] % (sizes[4] * sizes[5]) == 0
]


def config(device: str = "cuda", engines: int = 1, width: int = 1, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "policy": {"parallel": changes.pop("parallel", {})},
        "rollout": {"num_engines": engines, "tensor_parallel": width},
        "trainer": {"prompts_per_step": 48},
        "cluster": {"device": device, **changes.pop("cluster", {})},
    }
    return Config.model_validate({**values, **changes})


def gpu_nodes(*free: int, total: int = 8) -> list[Node]:
    return [Node(f"10.0.0.{n}", gpus=f, total_gpus=max(f, total)) for n, f in enumerate(free)]


def cpu_nodes(*free: float) -> list[Node]:
    return [Node(f"10.0.0.{n}", cpus=f, total_cpus=f) for n, f in enumerate(free)]


def split(layout: dict[str, int], slots: Sequence[Slot]) -> set[str]:
    """Kinds of groups of which some lie on two nodes."""
    return set(NodeLayout(ParallelConfig(**layout), [slot.node for slot in slots]).crossing())


def can_be_whole(
    free: list[int], block: int, blocks: int, width: int, engines: int, shared: bool = False
) -> bool:
    """By trying: whether so many blocks and engines fit on the nodes without being cut."""
    reached = {(0, 0)}
    for room in free:
        reached = {
            (b + more, min(engines, e + (more * block if shared else room - more * block) // width))
            for b, e in reached
            for more in range(room // block + 1)
        }
    return (blocks, engines) in reached


@settings(max_examples=400, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    engines=st.integers(1, 4),
    width=st.sampled_from((1, 2, 3, 4)),
    free=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    mode=st.sampled_from(("auto", "colocated", "disaggregated")),
    critic=st.sampled_from((None, "own", "shared")),
)
def test_all_have_a_place_or_none(
    layout: dict[str, int], engines: int, width: int, free: list[int], mode: str, critic: str | None
) -> None:
    algorithm = {"algorithm": {"advantage": "gae"}, "critic": {"placement": critic}}
    run = config(
        engines=engines,
        width=width,
        parallel=layout,
        cluster={"placement": mode},
        **(algorithm if critic else {}),
    )
    nodes = gpu_nodes(*free)
    world = run.policy.parallel.world_size
    block = lcm(layout["tp"] * layout["cp"], layout["etp"] * layout["ep"])
    own = 2 if critic == "own" else 1
    try:
        placed = place(run, nodes)
    except ValueError as error:
        assert str(error).endswith("[RL4001]")
        enough = sum(free) >= own * world
        if mode != "colocated":
            assert not can_be_whole(free, 1, own * world, width, engines)
        if mode != "disaggregated" and enough:
            assert not can_be_whole(free, 1, world, width, engines, shared=True)
        return
    assert placed == place(run, nodes)
    assert len(placed.policy) == world and len(placed.engines) == engines
    assert all(len(engine) == width for engine in placed.engines)
    taken = Counter(slot for engine in placed.engines for slot in engine)
    taken.update(placed.policy if placed.colocated else ())
    assert max(taken.values()) <= (2 if placed.colocated else 1)
    alone = [*placed.policy, *(placed.critic if critic == "own" else ())]
    assert len(set(alone)) == len(alone)
    assert placed.critic == (() if critic is None else placed.policy) or critic == "own"
    if not placed.colocated:
        assert not taken.keys() & set(alone)
    else:
        assert taken.keys() <= set(placed.policy)
    for engine in placed.engines:
        assert len({slot.node for slot in engine}) == 1
    room = {node.address: node.gpus for node in nodes}
    assert all(slot.gpu is not None and slot.gpu < room[slot.node] for slot in placed.slots)
    assert placed.nodes == tuple(n.address for n in nodes if placed.gpus_on(n.address))
    for node in placed.nodes:  # its bundle has no GPU that nobody uses
        assert {s.gpu for s in placed.slots if s.node == node} == set(range(placed.gpus_on(node)))
    if not placed.colocated and can_be_whole(free, block, own * world // block, width, engines):
        assert not split(layout, placed.policy)
        assert critic != "own" or not split(layout, placed.critic)


def test_stages_and_an_engine_each_on_the_nodes_that_have_cpus() -> None:
    run = config("cpu", engines=2, parallel={"pp": 2, "dp": 2, "ep": 2})
    placed = place(run, cpu_nodes(0, 3, 3))
    assert [slot.node for slot in placed.policy] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2
    assert [engine[0].node for engine in placed.engines] == ["10.0.0.1", "10.0.0.2"]
    assert placed.nodes == ("10.0.0.1", "10.0.0.2")
    assert str(placed) == (
        "CPUs of 2 nodes: 10.0.0.1: policy 0, 1; engines 0 | 10.0.0.2: policy 2, 3; engines 1"
    )
    half = config("cpu", parallel={"dp": 3}, cluster={"cpus_per_rank": 0.5, "cpus_per_engine": 2})
    assert place(half, cpu_nodes(1.5, 2)).nodes == ("10.0.0.0", "10.0.0.1")
    with pytest.raises(ValueError, match=r"expected 6 free CPUs .4 ranks x .*; found 5 free") as no:
        place(run, cpu_nodes(0, 3, 2))
    assert "10.0.0.2  0     0     2     2     -" in str(no.value)


def test_a_pipeline_crosses_nodes_and_expert_groups_do_not() -> None:
    run = config(engines=4, width=2, parallel={"tp": 2, "pp": 2, "dp": 4, "ep": 8})
    placed = place(run, gpu_nodes(8, 8, 8))
    assert [slot.node[-1] for slot in placed.policy] == ["0"] * 8 + ["1"] * 8
    assert {engine[0].node for engine in placed.engines} == {"10.0.0.2"}
    # What is free is used: the first node has no place for eight.
    placed = place(run, gpu_nodes(4, 8, 8, 4))
    assert [slot.node[-1] for slot in placed.policy] == ["1"] * 8 + ["2"] * 8
    assert [engine[0].node[-1] for engine in placed.engines] == ["0", "0", "3", "3"]
    # Where a group of experts finds no room, it is the only kind that is cut.
    placed = place(run, gpu_nodes(6, 6, 6, 6))
    assert split(run.policy.parallel.model_dump(), placed.policy) == {"ep"}


def test_the_policy_stays_on_few_nodes_and_the_drivers_comes_first() -> None:
    nodes = in_order(gpu_nodes(8, 8, 4), driver="10.0.0.1")
    placed = place(config(engines=2, parallel={"dp": 4}), nodes)
    assert {slot.node for slot in placed.policy} == {"10.0.0.1"}
    wide = place(config(engines=1, parallel={"dp": 12}), gpu_nodes(2, 4, 8, 3))
    assert wide.nodes == ("10.0.0.0", "10.0.0.1", "10.0.0.2")
    assert {slot.node for slot in wide.policy} == {"10.0.0.1", "10.0.0.2"}
    addresses = ["10.0.0.10", "10.0.0.9", "host-b", "fd00::1", "10.0.0.100"]
    ordered = in_order([Node(address) for address in addresses], driver="10.0.0.100")
    assert [node.address for node in ordered] == [
        "10.0.0.100", "10.0.0.9", "10.0.0.10", "fd00::1", "host-b",
    ]  # fmt: skip


def test_says_which_node_has_too_little_and_who_holds_it() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel=16: an engine lies on one node, .* the"):
        place(config(width=16, cluster={"placement": "disaggregated"}), gpu_nodes(8, 8, 8))
    busy = [Node("10.0.0.7", 3, 4, 8, 8, ("5 GPU: process 3 on 10.0.0.1 (x)",)), *gpu_nodes(3)]
    with pytest.raises(ValueError, match=r"largest node has 8 GPUs, of which 3 are free") as held:
        place(config(width=4, cluster={"placement": "disaggregated"}), busy)
    assert "\n  10.0.0.7  8     3     8     4     5 GPU: process 3 on 10.0.0.1 (x)\n" in str(
        held.value
    )
    with pytest.raises(ValueError, match="but not where engines need them"):
        place(config(engines=2, width=2, parallel={"dp": 2}), gpu_nodes(3, 1, 1, 1))
    capped = config(parallel={"dp": 8}, cluster={"num_gpus": 4})
    with pytest.raises(ValueError, match=r"found 4 \(cluster.num_gpus=4\)"):
        place(capped, gpu_nodes(8, 8))


def test_thousands_of_gpus_are_placed_in_seconds() -> None:
    """512 nodes, some partly occupied, of which every GPU that is free gets a rank."""
    free = [8 if n % 16 else 4 for n in range(512)]
    parallel = {"tp": 4, "pp": 8, "dp": 64, "ep": 8, "etp": 2}
    left = sum(free) - 4 * 8 * 64
    run = config(engines=left // 4, width=4, parallel=parallel, trainer={"prompts_per_step": 64})
    began = time.monotonic()
    placed = place(run, gpu_nodes(*free))
    assert time.monotonic() - began < 10
    assert placed.num_gpus == sum(free)
    parallel["ep"] = 2  # now by the exact way too
    assert place(config(engines=1, parallel=parallel), planned_nodes(4096, 8)).num_gpus == 2049

"""Who sends the weights of which pipeline stage to whom."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rltrain.controller.weight_links import engine_links, group_members, pipeline_crossings
from rltrain.parallel.rendezvous import Address, Rendezvous
from rltrain.weights.sync.stage_plan import StageSender, plan_senders

NODES = st.sampled_from(["a", "b", "c", "d"])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[int]], list[str], list[str], list[int]]:
    pp, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    stages = [[stage * size + i for i in range(size)] for stage in range(pp)]
    policy = draw(st.lists(NODES, min_size=pp * size, max_size=pp * size))
    engines = draw(st.lists(NODES, min_size=1, max_size=4))
    sizes = [draw(st.integers(1, 3)) for _ in engines]
    return stages, policy, engines, sizes


@given(layouts(), st.booleans())
def test_every_worker_gets_every_stage_once_over_the_fewest_links(
    layout: tuple[list[list[int]], list[str], list[str], list[int]], shares_memory: bool
) -> None:
    stages, policy, nodes, sizes = layout
    senders = plan_senders(stages, policy, nodes, sizes, shares_memory=shares_memory)
    at = Address("10.0.0.1", 5000)
    meetings = [
        Rendezvous.at(at, group_members(sender, nodes)) if sender.receivers else None
        for sender in senders
    ]
    limits = 1.0, 2.0
    links = [engine_links(senders, meetings, n, nodes, sizes, limits) for n in range(len(nodes))]
    for stage, ranks in enumerate(stages):
        mine = [sender for sender in senders if sender.stage == stage]
        assert len({s.rank for s in mine}) == len(mine) and {s.rank for s in mine} <= {*ranks}
        assert all(policy[sender.rank] == sender.node for sender in mine)
        holders = {policy[rank] for rank in ranks}
        assert sum(sender.num_remote for sender in mine) == len({*nodes} - holders)
        check_links(stage, mine, links, nodes, sizes, shares_memory)
    assert [s.stage for s in senders] == sorted(s.stage for s in senders)


def check_links(
    stage: int,
    senders: Sequence[StageSender],
    links: Sequence[dict],  # type: ignore[type-arg]
    nodes: Sequence[str],
    sizes: Sequence[int],
    shares_memory: bool,
) -> None:
    """Each worker is in one group of the stage, or one process fills its node's memory."""
    crossed = 0
    for node in {*nodes}:
        memories = [sender.node for sender in senders if sender.shares].count(node)
        for engine in [n for n, own in enumerate(nodes) if own == node]:
            groups = [group for group in links[engine]["groups"] if group["stage"] == stage]
            for worker in range(sizes[engine]):
                joined = [
                    g["rendezvous"]["group"] for g in groups if g["ranks"][worker] is not None
                ]
                assert len(joined) <= 1
                if joined and shares_memory:
                    crossed += 1
                    memories += links[engine]["shares"] or sum(sizes) == 1 or sizes[engine] == 1
                else:
                    assert bool(joined) != shares_memory
        assert memories == shares_memory
    members = sum(len(sender.receivers) for sender in senders)
    assert members == (crossed if shares_memory else sum(sizes))


def test_a_stage_that_other_nodes_need_goes_out_from_where_an_engine_is() -> None:
    stages, policy = [[0, 1], [2, 3]], ["a", "b", "c", "c"]
    senders = plan_senders(stages, policy, ["b", "d", "d"], [1, 2, 1], shares_memory=True)
    assert [(s.stage, s.rank, s.served, s.receivers, s.shares) for s in senders] == [
        (0, 1, ("b", "d"), ((1, 0),), True),
        (1, 2, ("b", "d"), ((0, 0), (1, 0)), False),
    ]
    on_gpus = plan_senders(stages, policy, ["b", "d", "d"], [1, 2, 1], shares_memory=False)
    assert on_gpus[0].receivers == ((0, 0), (1, 0), (1, 1), (2, 0))


def test_what_stages_broadcast_to_one_another_crosses_once_per_further_node() -> None:
    assert pipeline_crossings([[0, 1], [2, 3]], ["a"] * 4) == 0
    assert pipeline_crossings([[0, 1], [2, 3]], ["a", "a", "b", "b"]) == 2
    assert pipeline_crossings([[0], [1], [2]], ["a", "b", "a"]) == 1

"""Samples share objects only while nobody would fetch them in vain; a small store is named."""

from types import SimpleNamespace
from typing import Any

import pytest

from rltrain.config import Config
from rltrain.controller.cluster.route_stores import most_route_bytes, object_bytes, small_stores
from rltrain.routing.objects import OBJECT_BYTES


@pytest.mark.parametrize(
    ("nodes", "stages", "shared"),
    [
        ("", 1, True),
        ("aaaa", 1, True),
        ("aaaa", 4, True),
        ("aabb", 2, True),  # a stage a node
        ("aabb", 4, True),
        ("aabb", 1, False),  # the data-parallel ranks of the one stage are apart
        ("abab", 2, False),
        ("aaaabbbc", 2, False),
    ],
)
def test_samples_share_objects_while_a_node_has_all_ranks_of_a_stage(
    nodes: str, stages: int, shared: bool
) -> None:
    assert object_bytes(list(nodes), stages) == (OBJECT_BYTES if shared else 0)


def test_a_node_whose_store_is_smaller_than_its_part_of_the_routes_is_named() -> None:
    room = {"a": 300, "b": 300, "c": 1}
    (said,) = small_stores(900, ["a", "b", "b"], room)  # 300 on a, 600 on b
    assert said.startswith("node b: the routes of a step may take 0.00 GB there")
    assert small_stores(900, ["a", "unknown"], {"a": 450}) == []


@pytest.mark.parametrize(("experts", "width"), [(256, 1), (257, 2)])
def test_the_most_that_routes_take_is_by_the_longest_sequences(experts: int, width: int) -> None:
    config: Any = Config.model_validate(
        {
            "trainer": {"output_dir": "x", "prompts_per_step": 4},
            "algorithm": {"group_size": 2},
            "data": {"max_prompt_tokens": 10},
            "rollout": {"max_response_tokens": 20},
        }
    )
    arch: Any = SimpleNamespace(num_experts=experts, experts_per_token=3, moe_layers=(1, 2))
    assert most_route_bytes(config, arch) == 4 * 2 * 30 * 2 * 3 * width

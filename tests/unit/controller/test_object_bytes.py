"""Samples share objects only while nobody would fetch them in vain."""

import pytest

from rltrain.controller.cluster.route_stores import object_bytes
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

"""Asks every node of a Ray cluster what it has, and prints the rows of the table as JSON.

``python -m`` of this file, in a process of its own, so that nothing of Ray stays in the caller.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rltrain.controller.checks import node_facts
from rltrain.controller.checks.node_rows import Needs, compare, shared_memory_needed
from rltrain.controller.cluster.node_preflight import LIMIT_S, collect_facts
from rltrain.controller.cluster.ray_nodes import read_nodes
from rltrain.controller.cluster.running_ray import running_ray
from rltrain.planning.nodes import Node


def main() -> None:
    question: dict[str, Any] = json.loads(sys.argv[1])
    try:
        with running_ray(question["address"]):
            found = read_nodes()
            nodes = {node.address: node for node in found.nodes if _can_compute(node)}
            options = {
                address: {
                    "num_cpus": 0,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(
                        found.ids[address], soft=False
                    ),
                }
                for address in nodes
            }
            facts = collect_facts(question, options, LIMIT_S)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    needs = {address: _needs(node, question) for address, node in nodes.items()}
    rows = compare(node_facts.collect(question), facts, needs)
    sys.stdout.write(json.dumps({"nodes": list(nodes), "rows": [asdict(row) for row in rows]}))


def _can_compute(node: Node) -> bool:
    return node.total_gpus > 0 or node.total_cpus > 0


def _needs(node: Node, question: dict[str, Any]) -> Needs:
    """Of a node whose GPUs are all used, by one engine or more that is split over them."""
    return Needs(
        capture=question["capture"],
        engine_args=question["engine_args"],
        device="cuda" if node.total_gpus else "cpu",
        shm=shared_memory_needed(node.total_gpus, min(1, node.total_gpus)),
    )


if __name__ == "__main__":
    main()

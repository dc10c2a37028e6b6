"""Asks every node of a run what it has, before anything heavy starts, and refuses what differs."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from rltrain.actors.failures import FETCH_S
from rltrain.config import Config
from rltrain.controller.checks import node_facts
from rltrain.controller.checks.engine_guards import VARIABLES
from rltrain.controller.checks.node_rows import Needs, compare, shared_memory_needed
from rltrain.controller.checks.node_table import Row, refusals, show

if TYPE_CHECKING:  # it calls this module
    from rltrain.controller.cluster.ray_cluster import Cluster

logger = logging.getLogger(__name__)

LIMIT_S = 120.0
"""For all nodes together; a busy machine takes seconds to start a process."""


def check_nodes(config: Config, placed: "Cluster") -> None:
    """Every node of the run has what the driver has.

    Raises:
        ValueError: one does not; the table of all was logged before.
        RuntimeError: a node does not answer.
    """
    began = time.monotonic()
    limit_s = min(LIMIT_S, config.cluster.start_timeout_s)
    rows = compare_nodes(config, placed, limit_s)
    table = show(rows, placed.nodes)
    if not any(row.state != "same" for row in rows):
        seconds = time.monotonic() - began
        logger.info("%d nodes have what the driver has (%.1f s)", len(placed.nodes), seconds)
        return
    logger.warning("what the nodes of the cluster have:\n%s", table)
    if refused := refusals(rows):
        raise ValueError("the nodes of the cluster differ:\n" + "\n".join(refused) + " [RL4021]")


def compare_nodes(config: Config, placed: "Cluster", limit_s: float) -> list[Row]:
    """The rows of the table.

    Raises:
        RuntimeError: a node does not answer within the limit.
    """
    model = config.model.path
    question = {
        "model": model and str(Path(model).expanduser().absolute()),
        "output": config.trainer.output_dir,
        "variables": sorted({rule.option for rule in VARIABLES}),
    }
    options = {node: placed.actor_on(node) for node in placed.nodes}
    facts = collect_facts(question, options, limit_s)
    return compare(node_facts.collect(question), facts, needs_of(config, placed))


def collect_facts(
    question: dict[str, Any], options: Mapping[str, Mapping[str, Any]], limit_s: float
) -> dict[str, dict[str, Any]]:
    """What every node has, by node; all are asked at once.

    Args:
        options: of the task that is pinned to a node

    Raises:
        RuntimeError: a node does not answer within the limit.
    """
    sent = time.time()
    # A node's own rltrain may lack the module, or have another one of that name.
    cloudpickle.register_pickle_by_value(node_facts)
    try:
        asked = ray.remote(node_facts.collect)
        refs = {
            node: asked.options(max_retries=0, **chosen).remote(question)
            for node, chosen in options.items()
        }
    finally:
        cloudpickle.unregister_pickle_by_value(node_facts)
    missing = ray.wait(list(refs.values()), num_returns=len(refs), timeout=limit_s)[1]
    if silent := [node for node, ref in refs.items() if ref in missing]:
        raise RuntimeError(
            f"expected every node to say within {limit_s:g} s what it has, and {', '.join(silent)} "
            "did not answer: see `ray status`, and the load of that machine [RL4022]"
        )
    received, facts = time.time(), {}
    for node, ref in refs.items():
        try:
            facts[node] = dict(ray.get(ref, timeout=FETCH_S))
        except RayError as error:
            text = " ".join(str(error).split())[-500:]
            raise RuntimeError(f"node {node} cannot say what it has: {text} [RL4022]") from error
        there = facts[node]["time"]
        facts[node]["skew"] = there - min(max(there, sent), received)
    return facts


def needs_of(config: Config, placed: "Cluster") -> dict[str, Needs]:
    """By node."""
    placement = placed.placement
    return {
        node: Needs(
            capture=config.routing_replay.capture and config.algorithm.type == "rl",
            engine_args=config.rollout.engine_args,
            device=placement.device,
            shm=shared_memory_needed(
                placement.gpus_on(node),
                sum(e[0].node == node and len(e) > 1 for e in placement.engines),
            ),
            engines=node in placed.engine_nodes,
        )
        for node in placed.nodes
    }

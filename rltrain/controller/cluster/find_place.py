"""Find a place for all ranks on the nodes of a Ray cluster, and wait for one that others hold."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from rltrain.config import Config
from rltrain.controller.cluster.ray_nodes import RayNodes, read_nodes
from rltrain.planning.nodes import Node
from rltrain.planning.place import place, place_locally
from rltrain.planning.placement import Placement

logger = logging.getLogger(__name__)

POLL_S = 1.0
AGAIN_S = 60.0
"""How often a run says that it waits."""


def find_place(config: Config) -> tuple[Placement, RayNodes]:
    """Where the ranks go, by what is free on the nodes.

    Raises:
        ValueError: the nodes have too little, even if nobody else used them.
        RuntimeError: others hold what the run needs, for longer than ``cluster.start_timeout_s``.
    """
    found = read_nodes()
    if config.cluster.address is None:
        return place_locally(config, found.nodes[0].total_gpus, found.driver), found
    began, said = time.monotonic(), -AGAIN_S
    while True:
        try:
            return place(config, found.nodes), found
        except ValueError as error:
            waited = time.monotonic() - began
            if not _would_fit(config, found.nodes):
                raise
            if waited > config.cluster.start_timeout_s:
                raise RuntimeError(_waited(config, error)) from error
            if waited - said >= AGAIN_S:
                logger.warning("others hold what this run needs, and it waits: %s", error)
                said = waited
        time.sleep(POLL_S)
        found = read_nodes()


def _would_fit(config: Config, nodes: Sequence[Node]) -> bool:
    """Whether there would be a place if nobody else used the nodes."""
    try:
        place(config, [replace(n, gpus=n.total_gpus, cpus=n.total_cpus) for n in nodes])
    except ValueError:
        return False
    return True


def _waited(config: Config, error: ValueError) -> str:
    return (
        f"others hold what this run needs, for longer than cluster.start_timeout_s="
        f"{config.cluster.start_timeout_s:g}: {error}"
    )

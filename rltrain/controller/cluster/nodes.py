"""The nodes of a run: an agent on each, what is called there, and that all of them are alive."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from rltrain.actors.actor_log import token_file
from rltrain.actors.failures import FETCH_S
from rltrain.actors.node_agent import Agent, Watched
from rltrain.actors.process_start import secrets_kept
from rltrain.actors.run_nodes import lost_node, nodes_known
from rltrain.actors.run_processes import RUN, end_processes
from rltrain.config import Config
from rltrain.config.environment import actor_environment
from rltrain.config.redact import REDACTED, remember_secrets
from rltrain.controller.cluster.heartbeat import Heartbeat
from rltrain.controller.cluster.node_preflight import check_nodes

if TYPE_CHECKING:  # it holds the nodes
    from rltrain.controller.cluster.ray_cluster import Cluster

logger = logging.getLogger(__name__)

POLL_S = 2.0
LAST_LOGS_S = 10.0
"""How long the end of a run waits for the last lines of the logs on other nodes."""
GRACE = 1.5
"""An agent ends the run on its node after this many times ``cluster.node_timeout_s``, when the
controller has given it up."""


class Nodes:
    """The agents of a run; `Disks` calls functions through them.

    A run that started its own Ray has none: its one node is this machine.

    Args:
        agents: by the node's address; none without a cluster
        heartbeat: hears from them
    """

    def __init__(
        self, agents: Mapping[str, Any] | None = None, heartbeat: Heartbeat | None = None
    ) -> None:
        self.agents = dict(agents or {})
        self._heartbeat = heartbeat

    def listen(
        self,
        source: str,
        make: Callable[..., Callable[[], Any]],
        args: Mapping[str, Sequence[Any]],
        take: Callable[[str, Any], None],
    ) -> None:
        """From now on, until the end of the run, every second or so: ``take(node, taken)``, in
        another thread, with what ``make(*args[node])``, called once on the node, returns then.

        Args:
            source: a name for it
        """
        assert self._heartbeat is not None, "there are no agents"
        self._heartbeat.takers[source] = take
        for node, given in args.items():
            self.agents[node].add_source.remote(source, make, *given)


def _answers(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    end, missing = time.monotonic() + timeout_s, list(refs.values())
    while missing and (left := end - time.monotonic()) > 0:
        missing = ray.wait(missing, num_returns=len(missing), timeout=min(left, POLL_S))[1]
        if lost := lost_node():
            raise RuntimeError(f"{what}: {lost}")
    if silent := [node for node, ref in refs.items() if ref in missing]:
        raise RuntimeError(
            f"expected an answer of every node to {what} within {timeout_s:g} s, and "
            f"{', '.join(silent)} did not answer: see `ray status` and the load of the machine, or "
            "raise cluster.start_timeout_s [RL4022]"
        )
    try:
        return {node: ray.get(ref, timeout=FETCH_S) for node, ref in refs.items()}
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from error
    except RayError as error:
        raise RuntimeError(f"{what}: a node was lost: {error} [RL4020]") from error


@contextmanager
def with_agents(config: Config, placed: "Cluster") -> Iterator["Cluster"]:
    """``placed`` with the environment of its actors and, if the run joined a cluster, with an agent
    on each of its nodes.

    Raises:
        RuntimeError: a node does not answer.
        ValueError: a secret is missing, or the nodes differ.
    """
    joined = config.cluster.address is not None
    environment = actor_environment(config.cluster.env, os.environ, joined=joined)
    _check_secrets(environment.secret)
    remember_secrets(environment.secret.values())
    with secrets_kept(environment.secret) as key:
        placed = replace(placed, environment={**environment.plain, **key})
        if not joined:
            yield placed
            return
        logs = placed.logs
        assert logs is not None
        check_nodes(config, placed)
        placed = replace(placed, environment={**placed.environment, RUN: secrets.token_hex(6)})
        with running_agents(
            {node: placed.actor_on(node) for node in placed.nodes},
            run=placed.environment[RUN],
            logs=logs,
            start_timeout_s=config.cluster.start_timeout_s,
            node_timeout_s=config.cluster.node_timeout_s,
        ) as nodes:
            yield replace(placed, on_nodes=nodes)


def _check_secrets(secret: Mapping[str, str]) -> None:
    if missing := [name for name, value in secret.items() if value == REDACTED]:
        raise ValueError(
            f"cluster.env.{missing[0]}: the run's folder does not keep secrets, so its value is "
            f"{REDACTED}: give it again, or export {missing[0]} before the start [RL1003]"
        )


@contextmanager
def running_agents(
    options: Mapping[str, Mapping[str, Any]],
    *,
    run: str,
    logs: Path,
    start_timeout_s: float,
    node_timeout_s: float,
) -> Iterator[Nodes]:
    """Start an agent on each node, and hear from all of them within.

    When the block ends, the last lines of the logs are here, and the processes of the run and what
    they logged are removed from the nodes.

    Args:
        options: of the actor that is pinned to a node, by the node's address
        run: the token of the run, which all its actors have in their environment
        start_timeout_s, node_timeout_s: as in ``cluster``
    """
    token = logs / token_file(run)
    token.touch()
    watched = Watched(run, str(logs), GRACE * node_timeout_s)
    agents = {
        node: Agent.options(**chosen).remote(node, watched) for node, chosen in options.items()
    }
    try:
        began = time.monotonic()
        refs = {node: agent.start.remote() for node, agent in agents.items()}
        _answers(refs, "the start of its agent", start_timeout_s)
        logger.info("%d node agents run, after %.1f s", len(agents), time.monotonic() - began)
        heartbeat = Heartbeat(agents, logs, node_timeout_s, run)
        nodes = Nodes(agents, heartbeat)
        with nodes_known(heartbeat):
            try:
                yield nodes
            finally:
                _end(nodes, heartbeat, run)
    finally:
        token.unlink(missing_ok=True)


def _end(nodes: Nodes, heartbeat: Heartbeat, run: str) -> None:
    """End what is left of the run on the nodes that answer, and bring their logs."""
    lost = heartbeat.lost_nodes()
    reached = {node: agent for node, agent in nodes.agents.items() if node not in lost}
    killed = [agent.call.remote(end_processes, run) for agent in reached.values()]
    if killed:
        ray.wait(killed, num_returns=len(killed), timeout=LAST_LOGS_S)
    incomplete = [*lost, *heartbeat.fetch(LAST_LOGS_S)]
    heartbeat.stop()
    done = [agent.remove_logs.remote() for node, agent in reached.items() if node not in incomplete]
    if done:
        ray.wait(done, num_returns=len(done), timeout=LAST_LOGS_S)
    if incomplete:
        logger.warning(
            "the last lines of the logs of %s are not here: see /tmp/rltrain-%s-* there",
            ", ".join(incomplete),
            run,
        )

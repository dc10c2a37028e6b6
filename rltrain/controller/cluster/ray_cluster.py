"""The Ray cluster and what each actor gets of it."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rltrain.actors.actor_log import FOLDER, LOG
from rltrain.actors.call_limits import learn_anew
from rltrain.config import Config
from rltrain.config.redact import remembered_secrets
from rltrain.controller.cluster.find_place import find_place
from rltrain.controller.cluster.nodes import Nodes, with_agents
from rltrain.controller.cluster.reservation import Reservation, in_bundle, reserve
from rltrain.controller.cluster.running_ray import OVERRIDE_ON_ZERO, running_ray
from rltrain.planning.node_layout import NodeLayout
from rltrain.planning.nodes import LOCAL, Slot
from rltrain.planning.placement import Placement
from rltrain.policy.actor import Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """What the actors of a run are started on. A node is named by its Ray address."""

    placement: Placement
    driver_node: str = LOCAL
    """Where this process runs."""
    node_ids: Mapping[str, str] = field(default_factory=dict)
    """Ray's own name of a node."""
    reserved: Reservation | None = None
    """What is kept for the run; None on the CPUs of one machine, of which all ranks share all."""
    logs: Path | None = None
    """The folder of the actors' logs (`rltrain.actors.actor_log`); None: Ray's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every actor."""
    on_nodes: Nodes = field(default_factory=Nodes)
    """Calls functions on the nodes."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return self.placement.device

    @property
    def nodes(self) -> tuple[str, ...]:
        """All that have ranks or engines."""
        return self.placement.nodes

    @property
    def policy_nodes(self) -> tuple[str, ...]:
        """By rank."""
        return tuple(slot.node for slot in self.placement.policy)

    @property
    def critic_nodes(self) -> tuple[str, ...]:
        """By rank."""
        return tuple(slot.node for slot in self.placement.critic)

    @property
    def engine_nodes(self) -> tuple[str, ...]:
        """By engine."""
        return tuple(slots[0].node for slots in self.placement.engines)

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """The run's GPUs on the driver's own node, as ``CUDA_VISIBLE_DEVICES`` calls them."""
        return self.gpu_ids_of(self.driver_node)

    def gpu_ids_of(self, node: str) -> tuple[str, ...]:
        return self.reserved.gpu_ids.get(node, ()) if self.reserved else ()

    @property
    def gpu_name(self) -> str:
        """The model of the policy's first GPU; empty on CPUs, and where the driver does not say."""
        return self.reserved.gpu_names[self.policy_nodes[0]] if self.reserved else ""

    def worker_options(self, role: Role, rank: int) -> dict[str, Any]:
        """Of the Ray actor of one rank."""
        # Megatron's collectives run in an order that has to be the same on all ranks.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
        slots = {"policy": self.placement.policy, "critic": self.placement.critic}[role]
        return self._options(slots[rank : rank + 1], env, f"{role}-{rank}")

    def engine_options(self, engine: int, log: str = "engine") -> dict[str, Any]:
        """Of the Ray actor of one engine.

        Args:
            log: what its log is called, before the engine's number
        """
        return self._options(self.placement.engines[engine], {}, f"{log}-{engine}")

    def actor_on(self, node: str, log: str | None = None) -> dict[str, Any]:
        """Of a Ray actor that computes nothing, on a node of the cluster.

        Args:
            log: what its log is called; None: Ray's own
        """
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        if node in self.node_ids:
            affinity = NodeAffinitySchedulingStrategy(self.node_ids[node], soft=False)
            options["scheduling_strategy"] = affinity
        env = dict(self.environment)
        if log is not None and self.logs is not None:
            env[LOG] = str(self.logs / f"{log}.log")
        return {**options, "runtime_env": {"env_vars": env}}

    def _options(self, slots: Sequence[Slot], env: dict[str, str], log: str) -> dict[str, Any]:
        """Of an actor that sees the GPUs of these slots alone. Ray counts none for it, since others
        may see the same ones, and so leaves ``CUDA_VISIBLE_DEVICES`` as it is set here."""
        node = slots[0].node
        options = self.actor_on(node, log)
        env = {**options["runtime_env"]["env_vars"], **env}
        if self.reserved is not None:
            bundle = self.nodes.index(node)
            options["scheduling_strategy"] = in_bundle(self.reserved.bundles, bundle)
        if self.device == "cuda":
            ids = self.gpu_ids_of(node)
            seen = ",".join(ids[slot.gpu] for slot in slots if slot.gpu is not None)
            env = {**env, "CUDA_VISIBLE_DEVICES": seen, OVERRIDE_ON_ZERO: "0"}
        return {**options, "runtime_env": {"env_vars": env}}


@contextmanager
def cluster(config: Config) -> Iterator[Cluster]:
    """Start Ray or join it, as `running_ray` does, and give every rank its place.

    Raises:
        RuntimeError: it did not start or cannot be joined, with what to do.
        ValueError: its nodes have too little for the run.
    """
    learn_anew(config.cluster.phase_timeout_factor, config.cluster.phase_timeout_floor_s)
    run_dir, limits = Path(config.trainer.output_dir), config.cluster
    with running_ray(limits.address, run_dir, limits.start_timeout_s) as guardian:
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        os.environ[FOLDER] = str(logs)
        try:
            placed = replace(placed_cluster(config), logs=logs)
            with with_agents(config, placed) as placed:
                guardian.tell(secrets=remembered_secrets())
                yield placed
        finally:
            os.environ.pop(FOLDER, None)


def placed_cluster(config: Config) -> Cluster:
    """Place all ranks on the nodes of the running Ray, and keep their GPUs or CPUs for them.

    Raises:
        RuntimeError: others hold them for longer than ``cluster.start_timeout_s``.
        ValueError: there are too few.
    """
    placement, found = find_place(config)
    logger.info("placement: %s", placement)
    placed = Cluster(placement, found.driver, found.ids)
    for name in NodeLayout(config.policy.parallel, placed.policy_nodes).crossing():
        logger.warning("%s groups cross nodes: every layer waits for the network", name)
    if config.cluster.address is None and placement.device == "cpu":
        return placed
    timeout_s = config.cluster.start_timeout_s
    return replace(placed, reserved=reserve(config, placement, found, timeout_s))

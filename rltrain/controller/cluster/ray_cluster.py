"""The Ray cluster and what each actor gets of it."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private import ray_constants, services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rltrain.actors.actor_log import FOLDER, LOG
from rltrain.actors.call_limits import learn_anew
from rltrain.actors.guardian import Guardian
from rltrain.actors.local_processes import core_processes, watched_ray
from rltrain.config import Config
from rltrain.controller.cluster.find_place import find_place
from rltrain.controller.cluster.nodes import Nodes, with_agents
from rltrain.controller.cluster.ray_start import HostState, check_address, send_token, start_failure
from rltrain.controller.cluster.reservation import Reservation, in_bundle, reserve
from rltrain.parallel.rendezvous import within
from rltrain.planning.node_layout import NodeLayout
from rltrain.planning.nodes import LOCAL, Slot
from rltrain.planning.placement import Placement
from rltrain.policy.actor import Role

logger = logging.getLogger(__name__)

OVERRIDE_ON_ZERO = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""At 1, the default of old versions, Ray shows no GPU at all to an actor it counts none for."""

SHUTDOWN_S = 60.0
"""How long the end of a run waits for Ray to end."""


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
    with running_ray(config.cluster.address):
        run_dir = Path(config.trainer.output_dir)
        _link_logs(run_dir)
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        os.environ[FOLDER] = str(logs)
        try:
            placed = replace(placed_cluster(config), logs=logs)
            with with_agents(config, placed) as placed:
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


@contextmanager
def running_ray(address: str | None) -> Iterator[None]:
    """Start Ray, or join ``address``; local servers listen on loopback alone.

    Raises:
        RuntimeError: it did not start or cannot be joined, with what to do.
    """
    log_level = os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "warning")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(OVERRIDE_ON_ZERO, "0")
    local = {
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "num_cpus": max(8, len(os.sched_getaffinity(0))),
    }
    if address is None:
        # Without this Ray on Linux turns a loopback address into the host's own.
        ray_constants.ENABLE_RAY_CLUSTER = False
    else:
        check_address(address)
        send_token()
    # Its words about a dead actor would come beside ours, which have the actor's own error.
    ray._private.worker._worker_logs_enabled = False
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        with _own_groups():
            ray.init(
                # A cluster of our own, even where Ray finds that of another program here.
                address=address or "local",
                log_to_driver=False,
                logging_level=log_level.upper(),
                **({} if address else local),
            )
    except Exception as error:  # Ray raises that class itself
        _end_ray()  # what it did start
        raise start_failure(error, address, HostState.now()) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)  # Ray's would end the process with status 15
    with _guarded_ray() if address is None else _closing_ray():
        yield


class _InOwnGroup(services.ConsolePopen):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group=0, **kwargs)


@contextmanager
def _own_groups() -> Iterator[None]:
    """Each process that Ray starts within has a process group of its own. A SIGTERM to the group of
    the run (`timeout`, Slurm) is for the run, which needs Ray until it has saved."""
    usual = services.ConsolePopen
    services.ConsolePopen = _InOwnGroup
    try:
        yield
    finally:
        services.ConsolePopen = usual


@contextmanager
def _guarded_ray() -> Iterator[None]:
    """The Ray that this process started: watched, and ended with all that it started."""
    core = core_processes()
    guardian = Guardian(core["raylet"].pid)
    try:
        with _closing_ray(), watched_ray(core):
            yield
    finally:
        guardian.end()


@contextmanager
def _closing_ray() -> Iterator[None]:
    try:
        yield
    finally:
        _end_ray()


def _end_ray() -> None:
    try:
        within(SHUTDOWN_S, ray.shutdown)
    except TimeoutError:
        atexit.unregister(ray.shutdown)  # it would wait for the one that goes on
        logger.error(
            "Ray did not end within %.0f s: its processes are ended with this one", SHUTDOWN_S
        )


def _link_logs(run_dir: Path) -> None:
    """Actors log to Ray's session folder; the run's folder points there."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())  # type: ignore[attr-defined]
    link = run_dir / "ray-logs"
    link.unlink(missing_ok=True)
    link.symlink_to(session / "logs")

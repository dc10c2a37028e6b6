"""Which GPU every rank of a run computes on. Pure: it knows no Ray."""

from dataclasses import dataclass
from typing import Literal

from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config

Mode = Literal["disaggregated", "colocated"]


@dataclass(frozen=True)
class Placement:
    """GPUs have numbers below ``num_gpus``. On a CPU there are none: all ranks share its cores."""

    device: Literal["cpu", "cuda"]
    num_gpus: int = 0
    policy: tuple[int, ...] = ()
    """The GPU of each rank."""
    critic: tuple[int, ...] = ()
    engines: tuple[tuple[int, ...], ...] = ()
    """The GPUs of each engine."""

    @property
    def colocated(self) -> bool:
        """Whether engines share GPUs with the policy, and so alternate with it."""
        return any(gpu in self.policy for engine in self.engines for gpu in engine)

    def __str__(self) -> str:
        if self.device == "cpu":
            return "all ranks on this machine's CPUs"
        groups = {"policy": self.policy, "critic": self.critic, "engines": sum(self.engines, ())}
        parts = [
            f"{name} on {', '.join(map(str, sorted(set(gpus))))}"
            for name, gpus in groups.items()
            if gpus
        ]
        colocated = ", colocated" if self.colocated else ""
        return f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}: {'; '.join(parts)}{colocated}"


def place(config: Config, num_gpus: int) -> Placement:
    """Decide where every rank goes on a machine with ``num_gpus`` GPUs.

    Raises:
        ValueError: as `place_on_gpus`.
    """
    device = config.cluster.device
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return Placement("cpu")
    return place_on_gpus(config, min(num_gpus, config.cluster.num_gpus or num_gpus))


def place_on_gpus(config: Config, num_gpus: int | None) -> Placement:
    """Decide where every rank goes on ``num_gpus`` GPUs; None: as many as it takes.

    Policy and critic ranks of one number share a GPU, or the critic has GPUs of its own. Engines
    have GPUs of their own (disaggregated) or those of the first policy ranks (colocated).

    Raises:
        ValueError: there are not enough, with the arithmetic.
    """
    modes = _modes_to_try(config)
    for mode in modes:
        needed = _count_gpus(config, mode)
        if num_gpus is None or needed <= num_gpus:
            return _placed(config, mode, needed)
    counts = " or ".join(f"{_count_gpus(config, mode)} ({mode})" for mode in modes)
    raise ValueError(
        f"cluster.placement={config.cluster.placement}: expected {counts} GPUs, "
        f"found {num_gpus}: {arithmetic(config)}. Lower policy.parallel.* or rollout.num_engines"
        " [RL4001]"
    )


def _modes_to_try(config: Config) -> list[Mode]:
    """In the order of preference."""
    wanted = config.cluster.placement
    fits = config.engine_ranks <= config.policy.parallel.world_size
    if wanted == "colocated" and not fits:
        raise ValueError(
            "cluster.placement=colocated: expected at most as many engine ranks as policy ranks, "
            f"found {arithmetic(config)}. Lower rollout.num_engines or rollout.tensor_parallel, "
            "or use cluster.placement=disaggregated"
            " [RL4001]"
        )
    if wanted != "auto":
        return [wanted]
    return ["disaggregated", "colocated"] if fits and config.engine_ranks else ["disaggregated"]


def _count_gpus(config: Config, mode: Mode) -> int:
    engine_gpus = config.engine_ranks if mode == "disaggregated" else 0
    return config.policy.parallel.world_size + _critic_ranks_apart(config) + engine_gpus


def _critic_ranks_apart(config: Config) -> int:
    apart = needs_critic(config.algorithm) and config.critic.placement == "own"
    return config.policy.parallel.world_size if apart else 0


def _placed(config: Config, mode: Mode, num_gpus: int) -> Placement:
    ranks, size = config.policy.parallel.world_size, config.rollout.tensor_parallel
    apart = _critic_ranks_apart(config)
    policy = tuple(range(ranks))
    critic = tuple(range(apart, apart + ranks)) if needs_critic(config.algorithm) else ()
    start = ranks + apart if mode == "disaggregated" else 0
    engines = [
        range(first, first + size) for first in range(start, start + config.engine_ranks, size)
    ]
    return Placement("cuda", num_gpus, policy, critic, tuple(map(tuple, engines)))


def count_ranks(config: Config) -> int:
    """Processes that compute, wherever they do."""
    models = 2 if needs_critic(config.algorithm) else 1
    return models * config.policy.parallel.world_size + config.engine_ranks


def arithmetic(config: Config) -> str:
    """How many ranks there are, and why."""
    layout, rollout = config.policy.parallel, config.rollout
    terms = [
        f"tp*pp*cp*dp = {layout.tp}*{layout.pp}*{layout.cp}*{layout.dp} = {layout.world_size} "
        "policy ranks"
    ]
    if needs_critic(config.algorithm):
        terms.append(f"as many critic ranks (critic.placement={config.critic.placement})")
    if config.engine_ranks:
        terms.append(
            f"num_engines*tensor_parallel = {rollout.num_engines}*{rollout.tensor_parallel} = "
            f"{config.engine_ranks} engine ranks"
        )
    return ", ".join(terms)

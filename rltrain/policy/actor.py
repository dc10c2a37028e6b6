"""The Ray actor of a policy or critic worker.

This module does not import Megatron: the controller's process imports it, too. Megatron is imported
in the actor's own process, by its methods.
"""

import gc
import logging
import os
from typing import Any, Literal, NamedTuple

from rltrain.actors.network import use_network
from rltrain.actors.node import node_address
from rltrain.actors.process_start import begin_process
from rltrain.config import Config
from rltrain.parallel.rendezvous import Address, Rendezvous, serve

logger = logging.getLogger(__name__)

Role = Literal["policy", "critic"]


class Prepared(NamedTuple):
    """A rank that can start."""

    node: str
    """Its Ray address."""
    store: Address | None
    """Where all ranks meet, from rank 0."""


class ModelActor:
    """Prepares its process, then passes every call to its worker.

    Create it, then call ``prepare`` and ``start``. Ray does not report an error in an actor's
    constructor as it is, so these do the work.
    """

    def __init__(
        self,
        role: Role,
        config: Config,
        rank: int,
        model_path: str,
        device: str,
    ) -> None:
        begin_process()
        self._role = role
        self._arguments = config, rank, model_path, device

    def prepare(self) -> Prepared:
        """Import what the rank needs. Rank 0 also begins to serve the store where all will meet, so
        that it is there before any other rank looks for it."""
        logger.info("importing torch and Megatron")
        # Imported here: the actor's process alone needs them, and patches come before workers.
        import torch

        from rltrain.patches.megatron import patch_megatron
        from rltrain.patches.megatron_cpu import patch_megatron_for_cpu

        config, rank, _, device = self._arguments
        host = use_network(config.cluster.interface)
        torch.set_num_threads(num_threads(config, device))
        if device == "cpu":
            patch_megatron_for_cpu()
        patch_megatron()
        torch.manual_seed(config.trainer.seed)
        self._worker_class()
        return Prepared(node_address(), None if rank else serve(host, config.cluster.ports))

    def start(self, rendezvous: Rendezvous) -> None:
        """Join the other ranks and load the model. Collective."""
        import torch

        config, rank, model_path, device = self._arguments
        # A process sees the GPU of its rank and no other (controller/cluster/ray_cluster.py).
        rank_device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        logger.info("rank %d joins the other ranks and loads %s", rank, model_path)
        self._worker = self._worker_class()(config, rank, rendezvous, model_path, rank_device)
        # A collection looks at all modules again, and every checkpoint asks for some: with what is
        # loaded by now left out, which stays until the end, it takes milliseconds.
        gc.collect()
        gc.freeze()
        logger.info("rank %d is ready", rank)

    def _worker_class(self) -> Any:
        from rltrain.policy.critic import CriticWorker
        from rltrain.policy.worker import PolicyWorker

        return {"policy": PolicyWorker, "critic": CriticWorker}[self._role]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)


def num_threads(config: Config, device: str) -> int:
    """The threads of a rank's operations on the CPU."""
    if config.policy.threads:
        return config.policy.threads
    if device != "cpu":
        return 1  # CPU operations are short there, and waking threads takes longer
    # Policy and critic run alternately, so each may use all cores.
    return max(1, len(os.sched_getaffinity(0)) // config.policy.parallel.world_size)

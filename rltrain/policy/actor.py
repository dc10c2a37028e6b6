"""The process of a policy worker. Imports Megatron only there, and only once it can be imported."""

import os
from typing import Any

from rltrain.config import Config


class PolicyActor:
    """The Ray actor: prepares its process, then hands every call to a `PolicyWorker`.

    Create it, then call ``start``: an error in an actor's constructor reaches nobody as it was.
    """

    def __init__(
        self, config: Config, rank: int, init_method: str, model_path: str, device: str
    ) -> None:
        self._arguments = config, rank, init_method, model_path, device

    def start(self) -> None:
        """Join the other ranks and load the model. Collective."""
        import torch

        from rltrain.patches.megatron import apply_cpu, apply_fixes

        config, rank, init_method, model_path, device = self._arguments
        if device == "cpu":
            shared = max(1, len(os.sched_getaffinity(0)) // config.policy.parallel.world_size)
            torch.set_num_threads(config.policy.threads or shared)
            apply_cpu()
        apply_fixes()
        torch.manual_seed(config.trainer.seed)
        from rltrain.policy.worker import PolicyWorker

        # Ray shows a process the GPU it was given and no other.
        own = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._worker = PolicyWorker(config, rank, init_method, model_path, own)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

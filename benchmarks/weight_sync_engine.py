"""The rollout engine of `benchmarks.weight_sync`, which also measures what vLLM alone takes."""

import time
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rltrain.rollout.engine import RolloutEngine
from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.load import read_tensors
from rltrain.weights.sync import receiver
from rltrain.weights.sync.engine_fp8 import quantize_stream
from rltrain.weights.sync.expert_stacks import unstack_experts

COPIED_BYTES = 2**30


class MeasuredExtension(receiver.ReceiverExtension):
    def load_ready(self) -> tuple[float, int]:
        """vLLM's own start, update and finish on tensors that are on its device already.

        Returns:
            Seconds, and bytes that were loaded.
        """
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        arch = read_architecture(config.model, "skip")
        read = read_tensors(config.model, arch, config.dtype)
        sent = quantize_stream(read, arch) if receiver.holds_fp8(config) else read
        ready = [(name, tensor.to(self.device)) for name, tensor in sent]
        self.wait()
        start = time.perf_counter()
        initialize_layerwise_reload(model)
        unstack_experts(model)
        model.load_weights(ready)
        finalize_layerwise_reload(model, config)
        self.wait()
        return time.perf_counter() - start, sum(tensor.nbytes for _, tensor in ready)

    def copy(self, nbytes: int) -> float:
        """Seconds that a plain copy of as many bytes takes on this device."""
        source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        self.wait()
        start = time.perf_counter()
        target.copy_(source)
        self.wait()
        return (time.perf_counter() - start) * nbytes / COPIED_BYTES

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class MeasuredEngine(RolloutEngine):
    async def start(self) -> dict[str, Any]:
        theirs = receiver.receiver_args()
        extension = f"{__name__}.{MeasuredExtension.__name__}"
        receiver.receiver_args = lambda: theirs | {"worker_extension_cls": extension}
        return await super().start()

    async def measure(self, what: str, *arguments: Any) -> Any:
        """Of the first vLLM worker."""
        return (await self._engine.collective_rpc(what, args=arguments))[0]

"""The engine's side of weight sync: one vLLM weight transfer backend for all transports.

vLLM runs the model in worker processes. Naming ``ReceiverExtension`` as the worker extension makes
each of them import this module, which registers the backend before the model is built.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(..., **engine_args()))

    await join_groups(engine, links)          # transport "broadcast" only, before the first sync
    await start_sync(engine)                  # no request may be running, or all are paused
    for bucket in buckets:                    # stream.Bucket, filled by the policy
        await load_bucket(engine, bucket)     # its slot may be filled again when this returns
    await finish_sync(engine)                 # checks completeness, resets the prefix cache

A sync that fails leaves the engine with half-loaded weights: end the run or start a new engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.engine.async_llm import AsyncLLM

from rltrain.config.rollout import Transport
from rltrain.patches import vllm as vllm_patches
from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.load import read_tensors
from rltrain.weights.sync.cuda_ipc import IpcReceiver, device_name
from rltrain.weights.sync.delivery import Delivery, expected_tensors
from rltrain.weights.sync.digest import model_digest
from rltrain.weights.sync.engine_fp8 import LOAD_FORMAT, quantize_stream
from rltrain.weights.sync.expert_stacks import stack_experts
from rltrain.weights.sync.links import BroadcastReceiver, EngineLinks, GroupLink, join_links
from rltrain.weights.sync.stream import Bucket, TensorEntry

BACKEND = "rltrain"


def receiver_args() -> dict[str, Any]:
    """What the engine must be started with to receive weights."""
    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{__name__}.{ReceiverExtension.__name__}",
    }


async def devices(engine: AsyncLLM) -> list[str]:
    """The `device_name` of every worker."""
    names: list[str] = await engine.collective_rpc("device_name")
    return names


async def join_groups(engine: AsyncLLM, links: EngineLinks) -> list[dict[int, list[str]]]:
    """Have the workers join their senders. Collective.

    Returns:
        By worker, `BroadcastReceiver.memory`.
    """
    request = WeightTransferInitRequest(init_info=dict(links))
    await engine.init_weight_transfer_engine(request)
    memory: list[dict[int, list[str]]] = await engine.collective_rpc("shared_memory")
    return memory


async def start_sync(engine: AsyncLLM, *, in_flight: bool = False) -> None:
    """Make the engine ready for the first bucket.

    Args:
        in_flight: requests may be running, and are paused
    """
    if not in_flight and engine.output_processor.has_unfinished_requests():
        raise RuntimeError(
            "weight sync began while requests are running, whose KV cache would mix two sets of "
            "weights: wait for them or abort them first"
        )
    await engine.start_weight_update()


async def load_bucket(engine: AsyncLLM, bucket: Bucket) -> None:
    """Read one bucket in every worker; its slot is free again when this returns."""
    await engine.update_weights(WeightTransferUpdateRequest(update_info=dict(bucket)))


async def finish_sync(engine: AsyncLLM, *, in_flight: bool = False) -> None:
    """Check that every weight arrived, put the new ones in use and forget cached prefixes.

    Args:
        in_flight: requests that are paused use these; whoever adds others salts them
    """
    await engine.finish_weight_update()
    if not in_flight and not await engine.reset_prefix_cache():
        raise RuntimeError("prefix cache not reset after weight sync: requests are still running")


async def engine_digest(engine: AsyncLLM) -> dict[str, str]:
    """Digest by name of all engine tensors; with several workers names begin with ``rank<n>.``."""
    by_rank: list[dict[str, str]] = await engine.collective_rpc("weight_digest")
    if len(by_rank) == 1:
        return by_rank[0]
    return {
        f"rank{n}.{name}": digest for n, rank in enumerate(by_rank) for name, digest in rank.items()
    }


class ReceiverExtension:
    """What vLLM mixes into its worker class; callable by ``collective_rpc``."""

    model_runner: Any
    device: torch.device
    weight_transfer_engine: Any

    def device_name(self) -> str:
        return device_name(self.device)

    def shared_memory(self) -> dict[int, list[str]]:
        """See `BroadcastReceiver.memory`."""
        memory: dict[int, list[str]] = self.weight_transfer_engine.broadcast.memory
        return memory

    def weight_digest(self) -> dict[str, str]:
        return model_digest(self.model_runner.get_model())


@register_model_loader(LOAD_FORMAT)
class FolderLoader(BaseModelLoader):
    """Loads a folder whose storage format is not the one that the engine holds.

    The engine gets the same tensors as from a weight sync. vLLM builds the model for the
    ``quantization_config`` in ``hf_overrides``.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """The folder is a local one."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        config = model_config.hf_config
        if config.quantization_config is None:
            # An override cannot remove a field, and vLLM's gpt-oss reads it if it is there.
            del config.quantization_config
        arch = read_architecture(model_config.model, "skip")
        device = next(model.parameters()).device
        read = read_tensors(model_config.model, arch, model_config.dtype)
        tensors = ((name, tensor.to(device)) for name, tensor in read)
        model.load_weights(quantize_stream(tensors, arch) if holds_fp8(model_config) else tensors)


def holds_fp8(model_config: ModelConfig) -> bool:
    return getattr(model_config.hf_config, "quantization_config", None) is not None


@dataclass
class LinksInfo(WeightTransferInitInfo):
    """The fields of `broadcast.EngineLinks`."""

    node: str | None
    shares: bool
    groups: list[GroupLink]
    start_timeout_s: float
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The fields of a `stream.Bucket`."""

    transport: Transport
    stage: int
    stages: int
    index: int
    last: bool
    tensors: list[TensorEntry]
    payload: dict[str, Any]


class BucketWeightTransferEngine(WeightTransferEngine[LinksInfo, BucketInfo]):
    """Loads buckets of checkpoint tensors by layerwise reload, and rejects an incomplete set."""

    init_info_cls = LinksInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied = tied_modules(model)
        self._delivery: Delivery | None = None  # from the start of a sync until it succeeded
        self.broadcast: BroadcastReceiver | None = None
        if device.type == "cpu":
            vllm_patches.patch_vllm_for_cpu()
        if "GptOssForCausalLM" in (vllm_config.model_config.hf_config.architectures or ()):
            vllm_patches.patch_vllm_for_gpt_oss()

    def init_transfer_engine(self, init_info: LinksInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        links = EngineLinks(
            node=init_info.node,
            shares=init_info.shares,
            groups=init_info.groups,
            start_timeout_s=init_info.start_timeout_s,
            timeout_s=init_info.timeout_s,
        )
        if self.broadcast is not None:  # an engine was replaced, and all join anew
            self.broadcast.leave()
        self.broadcast = join_links(links, worker, self.device)

    def start_weight_update(self) -> None:
        if self._delivery is not None:
            raise RuntimeError(
                "an earlier weight sync failed and left this engine half-loaded: start a new engine"
            )
        arch = read_architecture(self.model_config.model, "skip")
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        expected = expected_tensors(arch, dtype, fp8=holds_fp8(self.model_config))
        self._delivery = Delivery(arch, expected)
        initialize_layerwise_reload(self.model)
        stack_experts(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # vLLM's own raises where there is no accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        bucket = Bucket(
            transport=update_info.transport,
            stage=update_info.stage,
            stages=update_info.stages,
            index=update_info.index,
            last=update_info.last,
            tensors=update_info.tensors,
            payload=update_info.payload,
        )
        assert self._delivery is not None  # vLLM's worker calls start_weight_update first
        tensors = self._read(bucket)  # all checked before any is loaded
        self._delivery.accept(bucket)
        self.model.load_weights(tensors)

    def _read(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        if bucket["transport"] == "ipc":
            return self._ipc.read(bucket)
        if self.broadcast is None:
            raise RuntimeError("join_groups comes before a weight sync by broadcast")
        return self.broadcast.read(bucket)

    @cached_property
    def _ipc(self) -> IpcReceiver:
        return IpcReceiver(self.device)

    def finish_weight_update(self) -> None:
        assert self._delivery is not None  # vLLM's worker calls start_weight_update first
        self._delivery.check_ended()
        self._check_complete(self._delivery)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.broadcast is not None:
            self.broadcast.close()
        if self.device.type == "cpu":
            # Nothing was loaded into tied modules, so vLLM kept packed copies of old weights.
            for module in self._tied:
                module.quant_method.process_weights_after_loading(module)
        else:
            self._ipc.close()
            # The buckets are free now. A sleeping KV cache may need their memory.
            torch.cuda.empty_cache()
        self._delivery = None

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM up to 0.26 requires this method of every backend. The policy sends by itself."""
        raise NotImplementedError("send with rltrain.weights.sync.stream.BucketStream")

    def _check_complete(self, delivery: Delivery) -> None:
        """For missing tensors vLLM would use uninitialised memory or keep the old weights."""
        unfilled = unfilled_modules(self.model, self._tied)
        missing = delivery.missing()
        if unfilled or missing:
            raise ValueError(
                f"weight sync is incomplete: received {len(delivery.names)} tensors, missing "
                f"{missing[:8]} ({len(missing)} in all); engine modules "
                f"not filled: {unfilled[:8]}. Send every tensor of the checkpoint, to a new engine"
            )


def tied_modules(model: torch.nn.Module) -> list[Any]:
    """Modules whose parameters are those of modules before them, like a tied output head."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        parameters = {id(parameter) for parameter in module.parameters(recurse=False)}
        if parameters and parameters <= seen:
            tied.append(module)
        seen |= parameters
    return tied


def unfilled_modules(model: torch.nn.Module, tied: Sequence[torch.nn.Module]) -> list[str]:
    """Modules under layerwise reload that received fewer elements than their parameters hold.

    Modules in ``tied`` receive nothing and are skipped. Returns: ``name (received of needed
    elements)``.
    """
    unfilled = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        # A module that cannot load is complete and already processed.
        if not info.can_load() or module in tied:
            continue
        needed = sum(
            parameter.numel()
            for name, parameter in module.named_parameters(recurse=False)
            if name not in _KV_CACHE_SCALES
        ) - _padding(module)
        if info.load_numel < needed:
            unfilled.append(f"{name} ({info.load_numel} of {needed} elements)")
    return unfilled


# With an FP8 quantization_config an attention layer has these. No checkpoint that we send has them,
# and vLLM then uses 1.
_KV_CACHE_SCALES = {"q_scale", "k_scale", "v_scale", "prob_scale"}


def _padding(module: torch.nn.Module) -> int:
    """Elements that a vocabulary layer holds beyond the model's own vocabulary."""
    if not isinstance(module, VocabParallelEmbedding):
        return 0
    rows = module.weight.shape[0] - module.shard_indices.num_org_elements
    return rows * (module.weight.numel() // module.weight.shape[0])


WeightTransferEngineFactory.register_engine(BACKEND, BucketWeightTransferEngine)

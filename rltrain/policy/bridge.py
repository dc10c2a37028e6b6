"""Families that rltrain does not map, by Megatron-Bridge: model, weights in, weights out.

Read in megatron-bridge 0.3.1. Its ``provider`` is a Megatron configuration that can build the
model; its ``tasks`` say of which Hugging Face tensors each parameter is made. What either leaves
out with a warning, a parameter without tensors or a tensor without a parameter, is an error here.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ReplicatedMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rltrain.config.policy import PolicyConfig
from rltrain.policy.bridge_checks import check_sizes, check_torch, family_fields
from rltrain.policy.megatron_args import check_asked
from rltrain.policy.mesh import Mesh
from rltrain.policy.torch_backend import torch_block_spec
from rltrain.policy.transformer_options import (
    routing_options,
    run_options,
    uses_transformer_engine,
)
from rltrain.weights.architecture import Architecture
from rltrain.weights.files import open_folder, stored_quantization
from rltrain.weights.sender import weights_of

# It tells by a module's class name how tensor parallelism cuts the module's weights.
for _name, _cut in {
    "TorchNormColumnParallelLinear": "column",
    "ColumnGroupedLinear": "column",
    "RowGroupedLinear": "row",
    "TorchDuplicatedLinear": "replicated",
}.items():
    AutoMapping.register_module_type(_name, _cut)

_BUFFER = ".expert_bias"
_ROTARY = re.compile(r"\.rotary_emb\.inv_freq$")
"""Old checkpoints hold what every model computes."""
_OFF: dict[str, Any] = {
    "deallocate_pipeline_outputs": False,
    "should_pad_vocab": False,
    "fp16": False,
    "gradient_accumulation_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
}
"""What providers turn on and Megatron has off: for speed, which rltrain's own models do without,
and what belongs to pre-training."""


class Bridge:
    """The model in a Hugging Face folder, for Megatron. Every method is collective."""

    def __init__(self, path: str, arch: Architecture) -> None:
        """Raises ``ValueError`` for a quantised folder, and a family that nobody maps."""
        if stored_quantization(Path(path)) is not None:
            raise ValueError(
                f"{path}: quantization_config: with model.bridge=true weights must be stored plain"
            )
        self.path = path
        self.arch = arch
        self._folder = AutoBridge.from_hf_pretrained(path).hf_pretrained

    def config(
        self, policy: PolicyConfig, mesh: Mesh, *, device: torch.device, routing_replay: bool
    ) -> GPTModelProvider:
        """As `rltrain.policy.transformer_options.transformer_config`; it builds chunks, too.

        Raises:
            ValueError: as that, or the sizes are not those of ``arch``, or the layers need
                Transformer Engine.
        """
        provider = self._family().provider_bridge(self._folder)
        check_sizes(provider, self.arch)
        if self.arch.vocab_size % mesh.tp_size:
            raise ValueError(
                f"policy.parallel.tp={mesh.tp_size}: megatron-bridge does not pad, so it must "
                f"divide the vocabulary of {self.arch.vocab_size}"
            )
        ours = run_options(policy, mesh, device)
        if self.arch.num_experts:
            ours |= routing_options(policy, device, routing_replay)
        fixed = {*ours, *family_fields(provider)} - _OFF.keys()
        check_asked(policy.megatron_args, TransformerConfig, fixed)
        if not uses_transformer_engine(policy, device):
            check_torch(provider, self.path)
            ours["transformer_layer_spec"] = torch_block_spec
        for name, value in {**_OFF, **ours, **policy.megatron_args}.items():
            setattr(provider, name, value)
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        provider.finalize()
        return provider

    def build_chunk(self, config: Any, mesh: Mesh, number: int) -> GPTModel:
        """This rank's chunk ``number`` by what `config` returned, weights still to be loaded."""
        return config.provide(
            pre_process=mesh.reads_tokens(number),
            post_process=mesh.yields_logits(number),
            vp_stage=number if mesh.vpp_size > 1 else None,
        )

    @torch.no_grad()
    def load(self, chunks: Sequence[nn.Module]) -> None:
        """Fill ``chunks`` from the folder.

        Raises:
            ValueError: a parameter has no tensor in the folder, a tensor no parameter, or the two
                differ in shape.
        """
        family, tasks = self._tasks(chunks)
        self._check_complete(chunks, tasks)
        for task in tasks:
            if task.megatron_module is None:
                continue  # of another pipeline stage
            stored = family.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self._folder.state)
            found = task.mapping.hf_to_megatron(stored, task.megatron_module)
            if found.shape != task.param_weight.shape:
                raise ValueError(
                    f"{self.path}: {task.mapping.hf_param} makes {list(found.shape)} of "
                    f"{task.global_param_name}, the model has {list(task.param_weight.shape)}"
                )
            task.param_weight.copy_(found)
        for chunk in chunks:
            # The last pipeline stage's copy of tied embeddings.
            unwrap_model(chunk).setup_embeddings_and_output_layer()

    @torch.no_grad()
    def full_tensors(
        self,
        chunks: Sequence[nn.Module],
        dtype: torch.dtype,
        value: Callable[[Tensor], Tensor] = weights_of,
    ) -> Iterator[tuple[str, Tensor]]:
        """As `rltrain.weights.sender.full_tensors`."""
        family, tasks = self._tasks(chunks)
        buffers = {n for t in tasks if t.global_param_name.endswith(_BUFFER) for n in _names(t)}
        if value is not weights_of:
            tasks = [task for task in tasks if not task.global_param_name.endswith(_BUFFER)]
        chosen = [
            task
            if task.param_weight is None
            else replace(task, param_weight=value(task.param_weight).detach())
            for task in tasks
        ]
        for name, tensor in family.stream_weights_megatron_to_hf(
            list(chunks),
            self._folder,
            cpu=False,
            show_progress=False,
            conversion_tasks=chosen,
            merge_adapter_weights=False,
        ):
            yield name, tensor.to(torch.float32 if name in buffers else dtype).contiguous()

    def _family(self) -> Any:
        """Anew each time: it keeps what it has seen of a model."""
        name = self._folder.config.architectures[0]
        family = model_bridge.get_model_bridge(getattr(transformers, name, name))
        family.hf_config = self._folder.config
        return family

    def _tasks(self, chunks: Sequence[nn.Module]) -> tuple[Any, list[Any]]:
        family = self._family()
        tasks = family.build_conversion_tasks(self._folder, list(chunks))
        return family, [_norm_is_whole(task) for task in tasks if task is not None]

    def _check_complete(self, chunks: Sequence[nn.Module], tasks: Sequence[Any]) -> None:
        filled = {(t.vp_stage, t.param_name) for t in tasks if t.megatron_module is not None}
        tied = unwrap_model(chunks[0]).share_embeddings_and_output_weights
        bare = [
            name
            for stage, chunk in enumerate(chunks)
            for name, _ in unwrap_model(chunk).named_parameters()
            if (stage, name) not in filled and not (tied and name == "output_layer.weight")
        ]
        if bare:
            raise ValueError(
                f"{self.path}: megatron-bridge finds no tensors there for the model's "
                f"{', '.join(bare[:5])} ({len(bare)} in all)"
            )
        read = _over_expert_ranks({name for task in tasks for name in _names(task)})
        unread = sorted(
            name
            for name in open_folder(self.path).keys()
            - read
            - ({"lm_head.weight"} if tied else set())
            if not _ROTARY.search(name)
        )
        if unread:
            raise ValueError(
                f"{self.path}: megatron-bridge makes nothing of {', '.join(unread[:5])} "
                f"({len(unread)} in all), so an export would lack them"
            )


def _norm_is_whole(task: Any) -> Any:
    """A norm's weight lies whole on every rank, also in a linear map that is cut."""
    inside = task.global_param_name.endswith(".layer_norm_weight")
    if not inside or type(task.mapping) is not AutoMapping:
        return task
    return replace(
        task, mapping=ReplicatedMapping(task.mapping.megatron_param, task.mapping.hf_param)
    )


def _names(task: Any) -> list[str]:
    """The Hugging Face tensors of a parameter."""
    found = task.mapping.hf_param
    return [found] if isinstance(found, str) else list(found.values())


def _over_expert_ranks(names: set[str]) -> set[str]:
    """Each rank has tasks for its own experts only."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return set().union(*found)

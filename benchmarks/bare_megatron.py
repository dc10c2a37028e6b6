"""The ceiling of training: Megatron's own model and loss, a bare loop around them, no rltrain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rltrain.config.policy import PolicyConfig
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.megatron.transformer_options import transformer_config
from rltrain.policy.torch_backend.spec import torch_block_spec
from rltrain.weights.architecture.decoder import Architecture


@dataclass(frozen=True)
class Packed:
    """A micro-batch that lies ready on the device."""

    tokens: Tensor  # [1, S]
    positions: Tensor  # [1, S]
    labels: Tensor  # [1, S]
    weights: Tensor  # 0 where nothing follows  # [1, S]
    params: PackedSeqParams


class BareMegatron:
    """Forward and backward passes of cross entropy; in bf16 where the parameters are, the head too.

    Args:
        like: a chunk of rltrain's with the same parameters, whose values are copied
        options: of Megatron's TransformerConfig, beside those that rltrain sets
    """

    def __init__(
        self,
        arch: Architecture,
        policy: PolicyConfig,
        mesh: Mesh,
        device: torch.device,
        like: nn.Module,
        options: dict[str, Any],
    ) -> None:
        policy = policy.model_copy(update={"megatron_args": options})
        config = transformer_config(arch, policy, mesh, device=device, routing_replay=False)
        stock = get_gpt_decoder_block_spec if device.type == "cuda" else _torch_spec
        model = GPTModel(
            config,
            stock(config, use_transformer_engine=True),
            vocab_size=arch.padded_vocab_size(1),
            max_sequence_length=arch.max_positions,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            share_embeddings_and_output_weights=arch.tie_embeddings,
        )
        values = dict(like.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # as Megatron has it where APEX is installed
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, ddp, model)

    def __call__(self, micro_batches: Sequence[Packed]) -> None:
        def step(iterator: Iterator[Packed], model: nn.Module) -> tuple[Tensor, Any]:
            mb = next(iterator)
            losses = model(
                mb.tokens, mb.positions, None, labels=mb.labels, packed_seq_params=mb.params
            )
            return losses, partial(_mean, mb.weights)

        self.model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micro_batches)],
            model=[self.model],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=1,
            forward_only=False,
        )


def packed(tokens: Tensor, length: int, per_micro_batch: int, device: torch.device) -> list[Packed]:
    """Sequences of one length, end to end."""
    found = []
    for part in tokens.split(length * per_micro_batch):
        count = len(part) // length
        ends = (torch.arange(count + 1) * length).int().to(device)
        weights = torch.ones(count, length)
        weights[:, -1] = 0.0
        found.append(
            Packed(
                part.to(device).unsqueeze(0),
                torch.arange(length).repeat(count).to(device).unsqueeze(0),
                part.roll(-1).to(device).unsqueeze(0),
                weights.view(1, -1).to(device),
                PackedSeqParams("thd", ends, ends, ends, ends, length, length),
            )
        )
    return found


def _mean(weights: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (losses.float() * weights).sum() / weights.sum(), {}


def _torch_spec(config: Any, use_transformer_engine: bool) -> Any:
    """Where there is no Transformer Engine."""
    return torch_block_spec(config, vp_stage=None)

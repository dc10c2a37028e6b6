"""Multi-token prediction: its layers keep their weights and never run (ADR 8)."""

from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def frozen_mtp_block(
    config: TransformerConfig,
    block_spec: TransformerBlockSubmodules,
    num_layers: int,
    backend: BackendSpecProvider,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlock:
    """``num_layers`` layers like the decoder's last, for the chunk that has the output head.

    ``config.mtp_num_layers`` must be None. If it is set, Megatron's model runs the layers in every
    forward pass, adds their loss, and needs labels.
    """
    assert config.mtp_num_layers is None
    layer = get_mtp_layer_spec_for_backend(block_spec.layer_specs[-1], backend)
    submodules: Any = MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * num_layers)
    block = MultiTokenPredictionBlock(config, submodules, vp_stage=vp_stage)
    return block.requires_grad_(False)

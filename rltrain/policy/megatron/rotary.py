"""Frequencies of the rotary embedding, as transformers computes them.

Megatron's scaling for Llama 3 has only one of its parameters as an option, and its YaRN is a
separate class that takes no explicit attention factor.
"""

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.weights.architecture.decoder import Architecture, Llama3Rotary, Yarn


def set_rotary(model: Any, arch: Architecture) -> None:
    """Give the rotary embedding of Megatron's ``model`` the frequencies and factor of ``arch``.

    With MLA every layer has its own embedding, which `transformer_options` configures.

    Raises:
        ValueError: the fused kernel is on and does not apply the factor.
    """
    if arch.mla is None:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(arch).to(torch.cuda.current_device())
        _set_factor(model.config, rotary_factor(arch))


def rotary_frequencies(arch: Architecture) -> Tensor:
    """Radians per position of each rotated pair of a head's dimensions: fp32, on CPU."""
    dims = int(arch.head_dim * arch.rotary_fraction)
    frequencies = 1.0 / arch.rope_theta ** (torch.arange(0, dims, 2).float() / dims)
    match arch.rotary_scaling:
        case None:
            return frequencies
        case Llama3Rotary() as scaling:
            return _llama3(frequencies, scaling)
        case Yarn() as scaling:
            return _yarn(frequencies, scaling, arch.rope_theta)


def _set_factor(config: TransformerConfig, factor: float) -> None:
    """Let Megatron's attention multiply cos and sin by ``factor``.

    For YaRN, Megatron computes 0.1 * mscale * log(scaling) + 1 from attributes that are not fields.
    """
    if factor == 1.0:
        return
    if config.apply_rope_fusion:
        raise ValueError(
            "policy.megatron_args.apply_rope_fusion: the fused kernel leaves out the factor of the "
            f"model's YaRN, {factor}; leave this option out"
            " [RL1014]"
        )
    vars(config).update(
        yarn_rotary_scaling_factor=math.e, yarn_mscale=10 * (factor - 1), yarn_mscale_all_dim=0.0
    )


def rotary_factor(arch: Architecture) -> float:
    """The factor of cos and sin."""
    scaling = arch.rotary_scaling
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Rotary) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate in between.

    As ``_compute_llama3_parameters`` of transformers.
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: Tensor, scaling: Yarn, theta: float) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate by the pair's index.

    As ``_compute_yarn_parameters`` of transformers. A frequency with ``beta_fast`` or more turns in
    the original context is kept.
    """
    dims = 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        positions = scaling.original_max_positions / (turns * 2 * math.pi)
        return dims * math.log(positions) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 if low == high else 0.0
    slowed = ((torch.arange(len(frequencies)).float() - low) / (high - low)).clamp(0, 1)
    return slowed * frequencies / scaling.factor + (1 - slowed) * frequencies

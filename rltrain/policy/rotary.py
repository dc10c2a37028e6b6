"""How fast the rotary embedding turns, as transformers computes it.

Megatron's own scaling for Llama 3 fixes all but one of its numbers.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rltrain.weights.architecture import Architecture, Llama3Rotary


def set_rotary(model: Any, arch: Architecture) -> None:
    """Give the rotary embedding of Megatron's ``model`` the frequencies of ``arch``.

    With MLA every layer has its own, which `transformer_options` sets up.

    Raises:
        ValueError: a rotary embedding that is not implemented.
    """
    if arch.mla is None:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(arch).to(torch.cuda.current_device())


def rotary_frequencies(arch: Architecture) -> Tensor:
    """Radians per position of each pair of a head's dims that is turned: fp32, on CPU.

    Raises:
        ValueError: ``arch.rotary_scaling`` is not supported.
    """
    turned = int(arch.head_dim * arch.rotary_fraction)
    frequencies = 1.0 / arch.rope_theta ** (torch.arange(0, turned, 2).float() / turned)
    match arch.rotary_scaling:
        case None:
            return frequencies
        case Llama3Rotary() as scaling:
            return _llama3(frequencies, scaling)
        case other:
            raise ValueError(f"{arch.family}: rotary embeddings with {other} are not supported")


def _llama3(frequencies: Tensor, scaling: Llama3Rotary) -> Tensor:
    """Few turns in the original context: slowed down by the factor. Many: left alone.

    In between the two are mixed, as ``_compute_llama3_parameters`` of transformers does.
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies

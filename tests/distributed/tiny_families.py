"""A random tiny model of every family, as transformers makes it, and what transformers computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.distributed.tiny import LENGTHS, sequences

VOCABULARY = 61  # odd: tp=2 has to pad it
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,  # heads of 32, the least that vLLM's attention takes on CPU
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
HEADS = {"head_dim": 64}  # times the heads more than the hidden size
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _llama3() -> PreTrainedModel:
    # Some pairs of dims are left alone, some slowed down by the factor and some by less.
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(**SIZES, **HEADS, rope_parameters=scaling, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def _mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=8))


def _olmoe() -> PreTrainedModel:
    # By default transformers gives the embedding of a padding token no gradient.
    config = OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3, pad_token_id=None)
    return OlmoeForCausalLM(config)


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def _qwen2_moe() -> PreTrainedModel:
    config = Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=80, mlp_only_layers=[1]
    )
    return Qwen2MoeForCausalLM(config)


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True))


def _qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config)


TINY: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama, llama3 rope, tied": _llama3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""A family, perhaps with what is special about this model of it -> the model."""


def make(name: str, scale: float = 1.0) -> PreTrainedModel:
    """In fp32. No norm is 1 and no bias is 0, so that none can be mistaken or left out.

    ``scale``: a factor of the matrices. They are large enough that a mistake shows; smaller ones
    make a model as little sure of its next token as a new one is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TINY[name]().eval()
        for parameter in model.state_dict().values():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            elif parameter.is_floating_point():
                ones = bool((parameter == 1).all())
                parameter.uniform_(0.5, 1.5) if ones else parameter.uniform_(-0.5, 0.5)
    return model


def save(name: str, folder: Path) -> None:
    """``model/``, and of `sequences`: ``logits.safetensors`` and the gradient of their mean loss.

    The gradients are saved as weights of the same model, so they get the names of a checkpoint.
    """
    model = make(name)
    model.save_pretrained(folder / "model")
    logits = [model(tokens[None]).logits[0] for tokens in sequences(VOCABULARY)]
    save_file({str(i): x.detach() for i, x in enumerate(logits)}, folder / "logits.safetensors")
    denominator = sum(LENGTHS) - len(LENGTHS)
    for tokens, x in zip(sequences(VOCABULARY), logits, strict=True):
        (F.cross_entropy(x[:-1], tokens[1:], reduction="sum") / denominator).backward(
            retain_graph=True
        )
    for parameter in model.parameters():
        gradient = parameter.grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    model.save_pretrained(folder / "gradients")


def load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}

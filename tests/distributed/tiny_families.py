"""A random tiny model of every family, as transformers makes it, and what transformers computes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
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


# With a truncated border the second pair of dims would be left alone; here it is slowed in part.
PLAIN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}


def _gpt_oss() -> PreTrainedModel:
    """The window is shorter than most sequences, and a third of gate and up is beyond the limit."""
    config = GptOssConfig(
        **SIZES,
        **HEADS,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=4,
        rope_parameters={**PLAIN_YARN, "truncate": False},
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data *= 6
    return model


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


def _qwen3_yarn() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, rope_parameters=PLAIN_YARN))


def _qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config)


# Values and keys differ in size, and no rank of a latent is that of another.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 512,  # with the rotary part the only ones that vLLM's MLA takes on CPU
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
BIASED = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
# Half of the positions of a sequence lie beyond what the model was first trained on.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 0.5,
    "beta_slow": 0.05,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def _deepseek_v2(**changes: Any) -> PreTrainedModel:
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(**{**SIZES, **LATENT, **experts, **groups, **changes})
    )


def _deepseek_v2_lite() -> PreTrainedModel:
    return _deepseek_v2(q_lora_rank=None, rope_parameters={**YARN})


def _deepseek_v2_in_groups() -> PreTrainedModel:
    # Megatron would score a group by its two best experts.
    limits = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    return _deepseek_v2(**limits, routed_scaling_factor=16.0)


def _deepseek_v3(**changes: Any) -> PreTrainedModel:
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
    method = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM asks for them
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SIZES, **LATENT, **BIASED, **groups, **method, **changes})
    )


def _deepseek_v3_with_mtp() -> PreTrainedModel:
    # Megatron would score a group by its best expert.
    return _deepseek_v3(topk_group=3, rope_parameters={**YARN, "mscale_all_dim": 1.0})


def _moonlight() -> PreTrainedModel:
    return _deepseek_v3(q_lora_rank=None, n_group=1, topk_group=1, num_nextn_predict_layers=0)


def _glm4_moe(**changes: Any) -> PreTrainedModel:
    settings = {**SIZES, **HEADS, **BIASED, "attention_bias": True, "use_qk_norm": True}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**{**settings, **changes}))


TINY: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "llama, llama3 rope, tied": _llama3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3, yarn": _qwen3_yarn,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2_lite,
    "deepseek_v2, in groups": _deepseek_v2_in_groups,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3, MTP": _deepseek_v3_with_mtp,
    "deepseek_v3, Moonlight": _moonlight,
    "glm4_moe, MTP": _glm4_moe,
    "glm4_moe, Air": partial(_glm4_moe, use_qk_norm=False),
}
"""A family, perhaps with what is special about this model of it -> the model."""
WITH_EXPERTS = [name for name in TINY if name.split(",")[0] not in ("llama", "qwen2", "qwen3")]
BF16_ALONE = ("gpt_oss",)
"""vLLM's attention takes sinks in no other dtype on a CPU."""


def make(name: str, scale: float = 1.0) -> PreTrainedModel:
    """In fp32. No norm is 1 and no bias is 0, so that none can be mistaken or left out.

    ``scale``: a factor of the matrices. They are large enough that a mistake shows; smaller ones
    make a model as little sure of its next token as a new one is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TINY[name]().eval()
        for key, parameter in model.state_dict().items():
            if parameter.ndim > 1 and not key.endswith("bias"):
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
    if name.endswith("MTP"):
        add_mtp_layer(folder / "model")
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
    model.save_pretrained(folder / "gradients", state_dict=dict(model.named_parameters()))


def add_mtp_layer(folder: Path) -> None:
    """A layer like the last one and what else published checkpoints have behind it.

    transformers has no class for it; it reads the file and leaves these tensors out.
    """
    tensors = load(folder)
    layers, size = SIZES["num_hidden_layers"], SIZES["hidden_size"]
    last, new = (f"model.layers.{layer}." for layer in (layers - 1, layers))
    found = {
        new + name.removeprefix(last): torch.rand_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{new}{name}.weight"] = torch.rand(size)
    found[f"{new}eh_proj.weight"] = torch.rand(size, 2 * size)
    found[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    found[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | found, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}

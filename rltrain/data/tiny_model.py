"""The tiny model: a random Qwen3-MoE and its tokenizer in an ordinary Hugging Face folder."""

import hashlib
import json
import logging
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from rltrain.config.model import ModelConfig, TinyModel
from rltrain.data.cache import save_atomically
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer

logger = logging.getLogger(__name__)

FORMAT = 2
"""Increase it when the weights of the same configuration change, so that old caches are not
used."""


def random_model_path(model: ModelConfig) -> Path:
    """Cache path of the untrained tiny model. It depends on configuration and seed."""
    return _cached(model, "random", model.tiny.model_dump(exclude={"warm_start"}))


def warm_started_path(model: ModelConfig) -> Path:
    """Cache path of the warm-started tiny model. It also depends on the warm start's
    configuration."""
    return _cached(model, "warm", model.tiny.model_dump())


def build_random_model(model: ModelConfig) -> Path:
    """The folder of the untrained tiny model. Builds the model unless it is cached."""
    path = random_model_path(model)
    if not path.exists():
        save_atomically(path, lambda folder: save_tiny_model(model.tiny, folder))
        logger.info("built the tiny model in %s", path)
    return path


def save_tiny_model(tiny: TinyModel, folder: Path) -> None:
    """Write config, random fp32 weights and tokenizer; the same seed gives the same bytes."""
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        network = Qwen3MoeForCausalLM(tiny_config(tiny))
        _set_experts_apart(network)
    network.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()  # saving takes no time
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _set_experts_apart(network: Qwen3MoeForCausalLM) -> None:
    """Double the weights of the experts, so that the choice of experts matters.

    After a few hundred supervised steps, the experts of a tiny model differ less than those of a
    trained model. Routing replay would then have almost no effect.
    """
    for name, parameter in network.named_parameters():
        if ".experts." in name:
            parameter.mul_(2)


def tiny_config(tiny: TinyModel) -> Qwen3MoeConfig:
    """The configuration in ``config.json`` of the tiny model."""
    tokenizer = tiny_tokenizer()
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=tiny.hidden_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        num_experts=tiny.num_experts,
        num_experts_per_tok=tiny.experts_per_token,
        moe_intermediate_size=tiny.expert_size,
        intermediate_size=tiny.expert_size,  # of a dense layer, and there is none
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=tiny.max_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
        architectures=[Qwen3MoeForCausalLM.__name__],
    )


def _cached(model: ModelConfig, kind: str, content: dict[str, object]) -> Path:
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(model.cache_dir).expanduser() / f"tiny-{kind}-{digest}"

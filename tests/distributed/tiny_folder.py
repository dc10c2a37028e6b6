"""A random tiny Qwen3-MoE as a Hugging Face folder."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def save_tiny_moe(
    folder: Path,
    *,
    num_layers: int,
    num_experts: int,
    k: int,
    vocab: int,
    dense_layers: Sequence[int] = (),
    seed: int = 0,
) -> None:
    """Weights are large enough that experts differ and a changed route shows."""
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=num_layers,
        mlp_only_layers=list(dense_layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=num_experts,
        num_experts_per_tok=k,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)

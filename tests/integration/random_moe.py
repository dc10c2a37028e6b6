"""A small Qwen3-MoE of random weights in fp32, and the routes that an engine captured of it."""

import numpy as np
import torch
from transformers import Qwen3MoeConfig

from rltrain.policy.passes.fetch_routes import fetch_routes
from rltrain.rollout.requests import Rollout
from rltrain.routing.integrity import RouteShape

SHAPE = RouteShape(num_layers=2, moe_layers=(0, 1), num_experts=8, experts_per_token=2)
VOCABULARY = 48


def random_moe(max_positions: int) -> Qwen3MoeConfig:
    """It has no end-of-sequence token, so that responses are as long as they may be."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=SHAPE.num_experts,
        num_experts_per_tok=SHAPE.experts_per_token,
        moe_intermediate_size=64,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
    )
    config.eos_token_id = None
    return config


def routes_of(rollout: Rollout) -> torch.Tensor:
    """Of every row, sorted  # [tokens - 1, L, K]"""
    rows = fetch_routes([rollout.routes], SHAPE.moe_layers)[:-1]
    return torch.from_numpy(rows.astype(np.int64)).sort().values

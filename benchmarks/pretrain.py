"""A small mixture of experts trained for some minutes on the sources of the installed packages.

Random weights do not show the effect of routing replay, because nearly tied random experts
contribute alike. So this model learns to predict the bytes of Python files, with rltrain's policy
worker. Without a balancing loss experts collapse in pre-training. So that loss is on here. In RL it
is off.
"""

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rltrain.algorithms.reduce import loss_weights
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import pack_micro_batches

if TYPE_CHECKING:  # it imports Megatron, which has to be patched before
    from rltrain.policy.worker import PolicyWorker

BALANCING = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
SUFFIXES = {".py", ".md", ".rst"}
HELD_OUT = 32
"""One file in so many is held out, by the hash of its content."""
WARM_UP = 20


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3-MoE over bytes, and of what it reads."""

    layers: int = 24
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    experts: int = 64
    experts_per_token: int = 8
    expert_size: int = 256
    window: int = 512
    tokens_per_update: int = 65_536
    tokens_per_micro_batch: int = 65_536
    """1.2 MB of activations a token at these sizes."""
    lr: float = 1e-3
    router: str = "fp32"
    """The trainer's ``policy.precision.router``; vLLM's multiplies in the model's dtype."""
    corpus_mb: int = 64

    def config(self) -> dict[str, Any]:
        """Its ``config.json``; a token is a byte."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.expert_size,  # of a dense layer, and there is none
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "vocab_size": 256,
            "hidden_act": "silu",
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }


def training_config(shape: Shape, device: str) -> Config:
    """Supervised steps in bf16, on the GPU and on the CPU."""
    return Config.model_validate(
        {
            "algorithm": {"type": "sft"},
            "routing_replay": {"mode": "off"},
            "cluster": {"device": device},
            "optimizer": {
                "lr": shape.lr,
                "min_lr": shape.lr / 20,
                "schedule": "cosine",
                "warmup_steps": WARM_UP,
                "weight_decay": 0.1,
                "beta2": 0.95,
            },
            "policy": {
                "precision": {"params": "bf16", "router": shape.router},
                "max_tokens_per_micro_batch": shape.tokens_per_micro_batch,
                "megatron_args": BALANCING,
            },
            # Of prompts and answers; what is read here comes in windows.
            "data": {"max_prompt_tokens": 1},
            "rollout": {"max_response_tokens": 1},
            "trainer": {"steps": 1_000_000},  # the budget is time: see `pretrain`
        }
    )


def corpus(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Text to train on and text held out: files below ``sys.path``, each content once.  # uint8"""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    seen: set[bytes] = set()
    read = 0
    for file in _files():
        if read >= max_bytes:
            break
        content = file.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            continue
        seen.add(digest)
        parts[digest[0] % HELD_OUT == 0].append(content)
        read += len(content)
    if not all(parts.values()):
        raise ValueError(f"found {read} bytes of {sorted(SUFFIXES)} files below sys.path: too few")
    text, held_out = (
        torch.from_numpy(np.frombuffer(b"\n".join(parts[held]), np.uint8).copy())
        for held in (False, True)
    )
    return text, held_out


def _files() -> Iterator[Path]:
    """In an order that mixes the packages and is the same in every run."""
    here = Path.cwd().resolve()
    roots = {Path(root).resolve() for root in (*sys.path, sysconfig.get_path("stdlib")) if root}
    found = {
        Path(folder) / name
        for root in roots - {here}
        for folder, _, names in os.walk(root)
        for name in names
        if Path(name).suffix in SUFFIXES and (Path(folder) / name).is_file()
    }
    return iter(sorted(found, key=lambda file: hashlib.sha256(str(file).encode()).digest()))


def start_worker(config: Config, folder: Path, model: Path, device: str) -> "PolicyWorker":
    """A policy worker in this process, of a world of one rank."""
    from rltrain.patches.megatron import patch_megatron
    from rltrain.patches.megatron_cpu import patch_megatron_for_cpu

    if device == "cpu":
        patch_megatron_for_cpu()
    patch_megatron()
    torch.manual_seed(0)
    from rltrain.policy.ranks import rendezvous
    from rltrain.policy.worker import PolicyWorker

    own = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    return PolicyWorker(config, 0, rendezvous(folder, "train"), str(model), own)


def pretrain(
    worker: "PolicyWorker", shape: Shape, text: Tensor, held_out: Tensor, seconds: float
) -> dict[str, float]:
    """Update for so many seconds, the learning rate falling over them; prints what it sees.

    Returns:
        Updates, tokens, and the held-out loss before and after, in nats a byte.
    """
    draw = torch.Generator().manual_seed(0)
    rows = max(1, shape.tokens_per_update // shape.window)
    fixed = windows(held_out, torch.linspace(0, len(held_out) - shape.window, rows).long(), shape)
    before = loss = _loss(worker, fixed, shape)
    print(f"held-out loss {before:.3f} nats a byte", flush=True)
    start, updates, reported = time.monotonic(), 0, 0.0
    while (spent := time.monotonic() - start) < seconds:
        starts = torch.randint(len(text) - shape.window, (rows,), generator=draw)
        if updates >= WARM_UP:  # by then the time of an update is known
            worker.learning_rate.total_updates = round(updates * seconds / spent)
        worker.begin_step(windows(text, starts, shape))
        found = worker.update(plan_of(rows, shape.window, shape), {}, routing="native")
        updates += 1
        if found is not None and spent - reported >= seconds / 12:
            reported = spent
            loss = _loss(worker, fixed, shape)
            print(
                f"{spent:5.0f} s, update {updates}: held-out {loss:.3f}, training "
                f"{found.totals['loss']:.3f}, gradient norm {found.grad_norm:.2f}, lr "
                f"{found.lr:.1e}, {updates * rows * shape.window / max(spent, 1e-9):,.0f} tokens/s",
                flush=True,
            )
    after = _loss(worker, fixed, shape)
    print(f"held-out loss {after:.3f} nats a byte after {updates} updates", flush=True)
    return {
        "train_updates": updates,
        "train_tokens": updates * rows * shape.window,
        "held_out_loss_before_nats": before,
        "held_out_loss_after_nats": after,
    }


def windows(text: Tensor, starts: Tensor, shape: Shape) -> Batch:
    """Every token but the first of a window counts alike in the loss."""
    tokens = torch.stack([text[s : s + shape.window] for s in starts.tolist()]).long()
    counted = torch.ones_like(tokens, dtype=torch.bool)
    counted[:, 0] = False
    mask, seq_lens = counted.flatten(), torch.full((len(tokens),), shape.window)
    return Batch(
        tokens=tokens.flatten(),
        seq_lens=seq_lens,
        response_mask=mask,
        loss_mask=mask,
        loss_weights=loss_weights(mask, seq_lens, "token_mean", shape.window),
    )


def plan_of(sequences: int, length: int, shape: Shape) -> list[list[int]]:
    """Micro-batches of equally long sequences."""
    return pack_micro_batches([[length] * sequences], shape.tokens_per_micro_batch)[0]


def _loss(worker: "PolicyWorker", batch: Batch, shape: Shape) -> float:
    worker.begin_step(batch)
    scored = worker.score(plan_of(batch.num_sequences, shape.window, shape), routing="native")
    assert scored is not None and scored.logprobs is not None
    return float(-scored.logprobs[batch.response_mask].mean())

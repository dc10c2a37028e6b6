"""What one engine rank's memory holds, term by term: an estimate. Pure: imports no vLLM."""

from dataclasses import dataclass
from math import ceil

from rltrain.config import Config
from rltrain.config.policy import ParallelConfig
from rltrain.planning.memory_terms import GIB, Term, gib
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.rank_share import rank_parameters
from rltrain.weights.sync.stream import BUCKET_BYTES

MAX_SEQUENCES = 1024
"""vLLM's ``max_num_seqs`` of an offline engine on a card of 70 GiB or more, an A100 aside
(``EngineArgs.get_batch_defaults``), and next, its ``max_num_batched_tokens``."""
MAX_BATCHED_TOKENS = 16384
OUTSIDE = 3 * GIB
"""What CUDA, NCCL and the allocator take, outside of vLLM's share. Assumed."""
IN_FP8 = ("attention", "dense MLP", "shared expert", "experts")


@dataclass(frozen=True)
class EngineMemory:
    terms: list[Term]
    """Inside of ``rollout.gpu_memory_utilization``, the KV cache last."""
    outside: list[Term]
    sequences: int
    """How many of the largest length the KV cache holds."""
    wanted: int
    """How many the run wants at once."""


def engine_memory(config: Config, arch: Architecture, card: int) -> EngineMemory:
    """Of one rank of an engine, on a card of so many bytes."""
    rollout = config.rollout
    width = {"bfloat16": 2, "float32": 4}[rollout.dtype]
    weights = _weights(config, arch, width)
    used = [*weights, _work(config, arch, width)]
    share = int(rollout.gpu_memory_utilization * card)
    left = share - sum(term.nbytes for term in used)
    length = config.data.max_prompt_tokens + rollout.max_response_tokens
    token = kv_bytes_per_token(arch, rollout.tensor_parallel, width)
    requests = config.prompts_per_round * config.algorithm.group_size
    wanted = min(_engine_arg(config, "max_num_seqs"), ceil(requests / rollout.num_engines))
    sequences = max(0, left) // (token * length)
    kv = Term(
        "KV cache",
        f"what gpu_memory_utilization={rollout.gpu_memory_utilization:g} of {gib(card)} leaves: "
        f"{max(0, left) // token:,} tokens x {token:,} bytes, {sequences} sequences of {length:,}",
        max(0, left),
    )
    layer = sum(term.nbytes for term in weights) // arch.num_layers
    outside = [
        Term("weight sync", "one more layer and two buckets", layer + 2 * BUCKET_BYTES),
        Term("CUDA, NCCL, allocator", "assumed", OUTSIDE),
    ]
    return EngineMemory([*used, kv], outside, sequences, wanted)


def kv_bytes_per_token(arch: Architecture, tp: int, width: int) -> int:
    """On one rank. With MLA every rank has the whole latent; a key-value head is never split."""
    if arch.mla:
        return arch.num_layers * (arch.mla.kv_lora_rank + arch.mla.qk_rope_head_dim) * width
    return arch.num_layers * 2 * max(1, arch.num_kv_heads // tp) * arch.head_dim * width


def _weights(config: Config, arch: Architecture, width: int) -> list[Term]:
    tp = config.rollout.tensor_parallel
    alone = ParallelConfig(tp=tp, etp=tp)
    parts: dict[str, int] = {}
    for held in rank_parameters(arch, alone, stage=0):
        parts[held.part] = parts.get(held.part, 0) + held.numel
    parts.pop("MTP", None)  # engines do not draft tokens
    fp8 = config.rollout.quantization == "fp8"
    small = sum(n for part, n in parts.items() if fp8 and part in IN_FP8)
    rest = sum(parts.values()) - small
    terms = [Term("weights", f"{rest:,} x {width}", rest * width)]
    if fp8:
        scales = f"{small:,} x (1 + 4 / 128 / 128) (FP8 and scales)"
        terms.append(Term("FP8 weights", scales, small + small * 4 // 128**2))
    if (replicated := _replicated(arch, tp)) > 0:
        formula = f"{replicated:,} x {width}: " + (
            "a second copy of MLA's up-projection of keys and values"
            if arch.mla
            else "key-value heads that are replicated"
        )
        terms.append(Term("replicated weights", formula, replicated * width))
    return terms


def _replicated(arch: Architecture, tp: int) -> int:
    if arch.mla:
        columns = arch.num_heads * (arch.mla.qk_nope_head_dim + arch.mla.v_head_dim)
        return arch.num_layers * columns * arch.mla.kv_lora_rank // tp
    if tp <= arch.num_kv_heads:
        return 0
    cut = arch.num_kv_heads * arch.head_dim // tp
    return arch.num_layers * 2 * arch.hidden_size * (arch.head_dim - cut)


def _work(config: Config, arch: Architecture, width: int) -> Term:
    """Activations of a forward pass and of sampling, which vLLM profiles at start."""
    tokens, rows = (
        _engine_arg(config, "max_num_batched_tokens"),
        _engine_arg(config, "max_num_seqs"),
    )
    sizes = 3 * arch.expert_size // config.rollout.tensor_parallel
    numbers = arch.experts_per_token * (arch.hidden_size + sizes) + 8 * arch.hidden_size
    formula = f"{tokens:,} tokens x {numbers:,} x {width} + 4 x {rows:,} x {arch.vocab_size:,} x 4"
    return Term("a pass at work", formula, tokens * numbers * width + 16 * rows * arch.vocab_size)


def _engine_arg(config: Config, name: str) -> int:
    defaults = {"max_num_seqs": MAX_SEQUENCES, "max_num_batched_tokens": MAX_BATCHED_TOKENS}
    return int(config.rollout.engine_args.get(name, defaults[name]))

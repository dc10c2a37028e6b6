"""What one policy rank's memory holds while it trains, term by term. Pure: starts nothing.

Parameters, gradients and optimizer state are exact (padding of Megatron's buffers included);
activations and logits are estimates that docs/plan.md compares with measured peaks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

from rltrain.config import Config
from rltrain.config.algorithm import AlgorithmConfig
from rltrain.config.policy import ParallelConfig
from rltrain.parallel.layer_map import Pipeline, route_layers
from rltrain.planning.activations import (
    LayerActivations,
    layer_activations,
    micro_batches_in_flight,
)
from rltrain.planning.memory_terms import Term, total
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.rank_share import MODEL_PARTS, RankParameter, rank_parameters

BLOCK = 2**27
"""Logits that are made at once, or one a token where there are more tokens."""
LOGIT_COPIES = 6
"""Of a block of logits in fp32, at once: the head's, their logarithms of probabilities and these
plus the entropy, the probabilities, and two terms of the gradient (`online_softmax`).
On GPUs, where each is one kernel, they are fewer."""


@dataclass(frozen=True)
class Counts:
    """How many elements a rank holds."""

    parts: dict[str, int]
    """Of the model, by `rltrain.weights.mapping.rank_share.MODEL_PARTS`."""
    dense: int
    """Trained, without experts: in Megatron's buffers, padding included."""
    experts: int
    """The same for experts."""
    frozen: int
    buffers: int


def count(config: Config, arch: Architecture, stage: int) -> Counts:
    """What a rank of a pipeline stage holds, all its model chunks together."""
    parallel = config.policy.parallel
    dense = experts = frozen = buffers = 0
    parts = dict.fromkeys(MODEL_PARTS, 0)
    for chunk in range(parallel.vpp):
        held = list(rank_parameters(arch, parallel, stage, chunk))
        for tensor in held:
            parts[tensor.part] += tensor.numel
        trained = [tensor for tensor in held if _is_trained(tensor, config)]
        of_experts = [tensor for tensor in trained if tensor.part == "experts"]
        others = [tensor for tensor in trained if tensor.part != "experts"]
        tied = arch.tie_embeddings and parallel.pp > 1
        dense += _buffer(others, data_parallel(parallel), own_bucket=tied)
        experts += _buffer(of_experts, expert_data_parallel(parallel))
        buffers += sum(tensor.numel for tensor in held if tensor.kind == "buffer")
        frozen += sum(
            tensor.numel
            for tensor in held
            if tensor.kind != "buffer" and not _is_trained(tensor, config)
        )
    return Counts({k: n for k, n in parts.items() if n}, dense, experts, frozen, buffers)


def data_parallel(parallel: ParallelConfig) -> int:
    """Ranks that shard the optimizer state of all but the experts."""
    return parallel.dp * parallel.cp


def expert_data_parallel(parallel: ParallelConfig) -> int:
    """Ranks that shard the optimizer state of an expert."""
    return parallel.tp * parallel.cp * parallel.dp // (parallel.ep * parallel.etp)


def states(config: Config, counts: Counts, width: int) -> list[Term]:
    """Parameters, gradients and optimizer state; ``width`` is the bytes of a parameter."""
    parallel = config.policy.parallel
    held = counts.dense + counts.experts + counts.frozen
    trained = counts.dense + counts.experts
    dp, edp = data_parallel(parallel), expert_data_parallel(parallel)
    sharded = counts.dense // dp + counts.experts // edp
    moments = 8 if width == 4 else 12
    kept = "Adam's two moments" if width == 4 else "fp32 masters and Adam's two moments"
    dtype = {2: "bf16", 4: "fp32"}[width]
    terms = [
        Term("parameters", f"{held:,} x {width} ({dtype})", held * width + counts.buffers * 4),
        Term("gradients", f"{trained:,} x 4 (fp32)", trained * 4),
        Term(
            "optimizer",
            f"({counts.dense:,} / {dp} + experts {counts.experts:,} / {edp}) x {moments} ({kept})",
            sharded * moments,
        ),
    ]
    if config.algorithm.kl.coef > 0:
        plain = sum(counts.parts.values()) - counts.buffers
        terms.append(Term("reference", f"{plain:,} x {width}", plain * width + counts.buffers * 4))
    return terms


def critic_states(config: Config, arch: Architecture, stage: int, width: int) -> list[Term]:
    """Of a critic rank: the policy's trunk with a value in the head's place, and no MTP layer."""
    trunk = replace(arch, mtp_layers=0, tie_embeddings=False)
    counts = count(config, trunk, stage)
    head = trunk.padded_vocab_size(config.policy.parallel.tp) // config.policy.parallel.tp
    if stage == config.policy.parallel.pp - 1:
        counts = replace(counts, dense=counts.dense - (head - 1) * arch.hidden_size)
    plain = config.model_copy(update={"algorithm": AlgorithmConfig()})
    terms = states(plain, counts, width)
    return [replace(term, name=f"critic's {term.name}") for term in terms]


def passes(config: Config, arch: Architecture, stage: int, width: int) -> list[Term]:
    """What an update needs besides, at its peak.

    Activations that wait for their backward pass, and the logits of the last stage or a layer at
    work, whichever is more.
    """
    policy = config.policy
    slots = policy.max_tokens_per_micro_batch // policy.parallel.cp
    layers = _layers(config, arch, stage)
    flight = micro_batches_in_flight(policy, stage, max_micro_batches(config))
    kept = sum(layer.kept for layer in layers) / policy.parallel.vpp
    terms = [
        Term(
            "activations",
            f"{flight} in flight x {slots:,} tokens x {kept:,.0f} numbers "
            f"(recompute={policy.recompute}) x {width}",
            round(flight * slots * kept * width),
        )
    ]
    if config.routing_replay.mode != "off" and arch.num_experts:
        terms.append(_routes(config, arch, stage, flight, slots))
    work = at_work(layers)
    at_end = []
    if stage == policy.parallel.pp - 1:
        at_end = [*_logits(config, arch, slots, width), *_kept_softmax(config, arch, slots, width)]
    formula = f"{slots:,} x {work:,.0f} numbers x {width}: recomputed, dispatched, gradients"
    in_layer = [Term("a layer at work", formula, round(slots * work * width))]
    return [*terms, *max(in_layer, at_end, key=total)]


def scoring(config: Config, arch: Architecture, stage: int, width: int) -> list[Term]:
    """What a pass without gradients needs in place of `passes`.

    It keeps no activations, and has more tokens per micro-batch.
    """
    policy = config.policy
    slots = policy.scoring_tokens // policy.parallel.cp
    work = max(layer.in_flight for layer in _layers(config, arch, stage))
    work += 2 * arch.hidden_size / policy.parallel.tp
    formula = f"{slots:,} tokens (scored) x {work:,.0f} numbers x {width}"
    in_layer = [Term("a layer at work", formula, round(slots * work * width))]
    at_end = _logits(config, arch, slots, width) if stage == policy.parallel.pp - 1 else []
    terms = max(in_layer, at_end, key=total)
    if config.routing_replay.mode != "off" and arch.num_experts:
        terms = [_routes(config, arch, stage, 1, slots), *terms]
    return terms


def at_work(layers: Sequence[LayerActivations]) -> float:
    """Numbers per token that the backward pass of one layer adds at most to what was kept.

    What later layers kept is freed by then.
    """
    most, freed = 0.0, 0.0
    for layer in reversed(layers):
        most = max(most, layer.recomputed + layer.in_flight - freed)
        freed += layer.kept
    return most


def _logits(config: Config, arch: Architecture, slots: int, width: int) -> list[Term]:
    """Log-probabilities are taken of one micro-batch at a time, a block of the vocabulary at a
    time; a comparison is a byte."""
    tp = config.policy.parallel.tp
    rows = arch.padded_vocab_size(tp) // tp
    block = min(rows, max(1, BLOCK // slots))
    return [
        Term(
            "logits",
            f"{slots:,} tokens x {block:,} of the vocabulary x ({LOGIT_COPIES} x 4 (fp32) + 1)",
            slots * block * (LOGIT_COPIES * 4 + 1),
        ),
        Term(
            "gradient of the head",
            f"{rows:,} rows x {arch.hidden_size:,} x {width}, {slots:,} tokens x the same x 4",
            (rows * width + slots * 4) * arch.hidden_size,
        ),
    ]


def _kept_softmax(config: Config, arch: Architecture, slots: int, width: int) -> list[Term]:
    """What `rltrain.policy.logprobs.logprobs` keeps for the backward pass, at most."""
    tp = config.policy.parallel.tp
    rows = arch.padded_vocab_size(tp) // tp
    gib = config.policy.kept_softmax_gib
    nbytes = min(int(gib * 2**30), slots * rows * width)
    formula = f"kept_softmax_gib={gib:g}, at most {slots:,} tokens x {rows:,} x {width}"
    return [Term("kept probabilities", formula, nbytes)] if nbytes else []


def max_micro_batches(config: Config) -> int:
    """Of one update of one data-parallel rank, if every sequence has the largest length."""
    sequences = sequences_per_update(config) // config.policy.parallel.dp
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    micro_batches = ceil(sequences / (config.policy.max_tokens_per_micro_batch // longest))
    return micro_batches + -micro_batches % config.policy.parallel.micro_batch_multiple


def sequences_per_update(config: Config) -> int:
    group = config.algorithm.group_size if config.algorithm.type == "rl" else 1
    return config.trainer.prompts_per_step * group // config.trainer.mini_batches


def _layers(config: Config, arch: Architecture, stage: int) -> list[LayerActivations]:
    pipeline = Pipeline.of(config.policy.parallel)
    return [
        layer_activations(arch, config.policy, number, position=position)
        for chunk in range(pipeline.chunks)
        for position, number in enumerate(pipeline.chunk_layers(arch.num_layers, stage, chunk))
    ]


def _routes(config: Config, arch: Architecture, stage: int, flight: int, slots: int) -> Term:
    pipeline = Pipeline.of(config.policy.parallel)
    layers = len(route_layers(pipeline, arch.num_layers, arch.moe_layers, stage))
    rows = slots // config.policy.parallel.tp
    width = 1 if arch.num_experts <= 256 else 2
    formula = (
        f"{flight} x {rows:,} rows x {layers} layers x {arch.experts_per_token} experts x {width}"
    )
    return Term("routes", formula, flight * rows * layers * arch.experts_per_token * width)


def _is_trained(held: RankParameter, config: Config) -> bool:
    is_router = held.name.endswith((".mlp.router.weight", ".mlp.router.bias"))
    return held.kind == "trained" and not (config.optimizer.freeze_router and is_router)


def _buffer(held: Iterable[RankParameter], ranks: int, *, own_bucket: bool = False) -> int:
    """Elements of Megatron's buffer: parameters start at multiples of 64, and its buckets end at
    multiples of 128 and of the ranks. A tied embedding has a bucket of its own.

    megatron/core/distributed/param_and_grad_buffer.py of megatron-core 0.16.1.
    """
    buckets: dict[bool, int] = {}
    for tensor in held:
        apart = own_bucket and tensor.name in (
            "embedding.word_embeddings.weight",
            "output_layer.weight",
        )
        buckets[apart] = buckets.get(apart, 0) + tensor.numel + -tensor.numel % 64
    return sum(size + -size % lcm(ranks, 128) for size in buckets.values())

"""How fast a step was and, on GPUs, what its card should give.

Formulas and denominators are in `rltrain.tracking.catalogue`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rltrain.algorithms.sequences import sequence_sum
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.policy import ParallelConfig
from rltrain.planning.engine_memory import IN_FP8, kv_bytes_per_token
from rltrain.planning.placement import Placement
from rltrain.planning.roofline import Card, Work, decoding_seconds, forward_flops, update_flops
from rltrain.tracking.environment import resident_gib
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.rank_share import rank_parameters

WAITING = ("generate", "reward", "drain")
"""Phases in which the policy waits for rollouts."""


def work_of(config: Config, arch: Architecture) -> Work:
    """What the model asks of a card."""
    numbers: Counter[str] = Counter()
    for held in rank_parameters(arch, ParallelConfig(), stage=0):
        numbers[held.part] += held.numel
    experts, embedding = numbers.pop("experts", 0), numbers.pop("embedding")
    numbers.pop("MTP", None)
    if arch.tie_embeddings:
        numbers["head"] += embedding
    chosen = experts * arch.experts_per_token // max(1, arch.num_experts)
    width = {"bfloat16": 2, "float32": 4}[config.rollout.dtype]
    small = IN_FP8 if config.rollout.quantization == "fp8" else ()
    keys, values = (
        (arch.mla.qk_head_dim, arch.mla.v_head_dim) if arch.mla else (arch.head_dim, arch.head_dim)
    )
    channels, windowed = arch.num_heads * (keys + values), len(arch.windowed_layers)
    whole = arch.num_layers - windowed
    tp = config.rollout.tensor_parallel
    return Work(
        active_parameters=numbers.total() + chosen,
        attention_channels=whole * channels,
        engine_bytes=sum(n * (1 if part in small else width) for part, n in numbers.items()),
        engine_expert_bytes=experts * (1 if "experts" in small else width),
        kv_bytes=kv_bytes_per_token(arch, tp, width) * tp * whole // arch.num_layers,
        num_experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
        window=arch.window or 0,
        window_channels=windowed * channels,
    )


@dataclass(frozen=True)
class Speed:
    placement: Placement
    work: Work
    card: Card | None
    """None: nothing is known of it, or the policy does not multiply in bf16."""

    @classmethod
    def of(
        cls, config: Config, arch: Architecture, placement: Placement, card: Card | None
    ) -> Self:
        in_bf16 = config.policy.precision.params != "fp32"
        return cls(placement, work_of(config, arch), card if in_bf16 else None)

    def metrics(
        self, batch: Batch, step: Mapping[str, float], *, scored: bool, updated: bool
    ) -> dict[str, float]:
        """The ``throughput/`` metrics of a step.

        Args:
            batch: what was trained on; ``rollout/`` metrics, where anything was sampled, are of
                all of that, also of what dynamic sampling then left out
            step: its ``rollout/`` and ``time/`` metrics
            scored: whether the old log-probabilities were computed; updated: whether all
                mini-batches were
        """
        tokens = step.get("rollout/num_tokens", batch.num_tokens)
        per_second = tokens / step["time/step"]
        throughput = {
            "throughput/tokens_per_second": per_second,
            "memory/host_rss_gib": resident_gib(),
        }
        sampled = "rollout/num_response_tokens" in step
        if sampled:
            generated = step["rollout/num_response_tokens"] / step["rollout/generate_seconds"]
            throughput["throughput/generated_tokens_per_second"] = generated
            waited = sum(step.get(f"time/{phase}", 0.0) for phase in WAITING)
            throughput["throughput/trainer_idle_fraction"] = waited / step["time/step"]
        if self.placement.num_gpus:
            per_gpu = per_second / self.placement.num_gpus
            throughput["throughput/tokens_per_second_per_gpu"] = per_gpu
        if self.card is None:
            return throughput
        lens = batch.seq_lens.tolist()
        peak = self.card.flops * len(self.placement.policy)
        scoring = forward_flops(self.work, lens) / peak
        update = update_flops(self.work, lens) / peak
        if scored and "time/old_logprobs" in step:
            throughput["throughput/mfu_scoring"] = scoring / step["time/old_logprobs"]
        if updated:
            throughput["throughput/mfu_update"] = update / step["time/update"]
        if sampled and tokens == batch.num_tokens and not step.get("rollout/aborted_groups"):
            decoding = self._decoding_seconds(batch, self.work, self.card)
            bound = tokens / (decoding + scoring + update) / self.placement.num_gpus
            throughput["throughput/generate_over_bound"] = (
                decoding / step["rollout/generate_seconds"]
            )
            throughput["throughput/bound_tokens_per_second_per_gpu"] = bound
        return throughput

    def _decoding_seconds(self, batch: Batch, work: Work, card: Card) -> float:
        responses = sequence_sum(batch.response_mask.double(), batch.seq_lens).long()
        return decoding_seconds(
            work,
            card,
            (batch.seq_lens - responses).tolist(),
            responses.tolist(),
            engines=len(self.placement.engines),
            gpus=sum(map(len, self.placement.engines)),
        )

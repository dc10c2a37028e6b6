"""The dashboard: which charts stand in which section, in order.

Plain data, checked against the catalogue by a test. wandb shows it as custom charts of a finished
run and as a saved workspace of the project, TensorBoard as its custom scalars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.tracking.catalogue_metric import Metric
from rltrain.tracking.metrics import find_metric


@dataclass(frozen=True)
class Panel:
    """A chart of some metrics over steps; a family (``.../layer_{layer}``) is one line a member."""

    title: str
    metrics: tuple[str, ...]
    log_scale: bool = False

    @property
    def members(self) -> list[Metric]:
        """The catalogue's entries of its metrics."""
        return [find_metric(name.replace("{layer}", "0")) for name in self.metrics]


DASHBOARD: dict[str, tuple[Panel, ...]] = {
    "learning": (
        Panel("accuracy", ("eval/accuracy",)),
        Panel("reward", ("reward/mean", "eval/reward_mean")),
        Panel("groups without a gradient", ("group/zero_std_fraction",)),
        Panel("entropy", ("policy/entropy",)),
        Panel("gradient norm", ("policy/grad_norm",)),
        Panel("clipped tokens", ("policy/clip_fraction_low", "policy/clip_fraction_high")),
        Panel("largest and smallest ratio", ("policy/ratio_max", "policy/ratio_min"), True),
        Panel("KL to the old policy and the reference", ("policy/kl", "policy/ref_kl")),
        Panel("loss", ("policy/loss", "sft/loss", "eval/loss")),
        Panel("rounds of dynamic sampling", ("group/rounds",)),
    ),
    "critic": (
        Panel("explained variance", ("value/explained_variance",)),
        Panel("values and returns", ("value/mean", "value/return_mean")),
        Panel("loss of the critic", ("value/loss",)),
        Panel("gradient norm of the critic", ("value/grad_norm",)),
    ),
    "mismatch": (
        Panel("k3, as trained and native", ("mismatch/k3", "mismatch_native/k3"), log_scale=True),
        Panel(
            "median difference on flipped tokens",
            ("mismatch/abs_diff_median_flipped", "mismatch_native/abs_diff_median_flipped"),
            log_scale=True,
        ),
        Panel(
            "multiplicative probability error",
            ("mismatch/mult_prob_error", "mismatch_native/mult_prob_error"),
        ),
        Panel(
            "largest difference",
            ("mismatch/abs_diff_max", "mismatch_native/abs_diff_max"),
            log_scale=True,
        ),
        Panel("mismatch over entropy", ("policy/mismatch_over_entropy",), log_scale=True),
        Panel("effective sample size", ("correction/effective_sample_size",)),
        Panel(
            "rejected responses",
            ("correction/reject_sequence_fraction", "correction/veto_sequence_fraction"),
        ),
    ),
    "routing": (
        Panel("coverage", ("routing/coverage",)),
        Panel(
            "rows that fell back, and loss tokens that cost",
            ("routing/fallback_fraction", "routing/fallback_dropped_fraction"),
        ),
        Panel("overlap", ("routing/overlap", "routing/overlap_min")),
        Panel("overlap per layer", ("routing/overlap/layer_{layer}",)),
        Panel("wide flips per layer", ("routing/wide_flip_fraction/layer_{layer}",)),
        Panel("tokens a flip can reach", ("routing/flipped_token_fraction",)),
        Panel("gate weight that replay keeps", ("routing/gate_mass",)),
        Panel("load of the experts above an even share", ("routing/load_max", "routing/load_mean")),
        Panel("first differing layer", ("routing/first_differing_layer",)),
    ),
    "rollout": (
        Panel("response length", ("rollout/response_length_mean", "rollout/response_length_max")),
        Panel("truncated responses", ("rollout/truncated_fraction",)),
        Panel("failed rewards", ("reward/failed_fraction", "reward/timeout_fraction")),
        Panel("weight version", ("rollout/weight_version",)),
        Panel("steps since the weights were pushed", ("rollout/staleness",)),
    ),
    "performance": (
        Panel("step time", ("time/step",)),
        Panel(
            "phase times",
            ("time/generate", "time/old_logprobs", "time/update", "time/weight_sync", "time/other"),
        ),
        Panel(
            "throughput",
            ("throughput/tokens_per_second", "throughput/generated_tokens_per_second"),
        ),
        Panel(
            "tokens/s per GPU, and at the card's limits",
            (
                "throughput/tokens_per_second_per_gpu",
                "throughput/bound_tokens_per_second_per_gpu",
            ),
            log_scale=True,
        ),
        Panel(
            "shares of the card's limits",
            (
                "throughput/generate_over_bound",
                "throughput/mfu_scoring",
                "throughput/mfu_update",
            ),
        ),
        Panel("busy share of the GPUs", ("gpu/utilization",)),
        Panel("memory of the fullest GPU", ("gpu/memory_gib",)),
        Panel("memory of the host", ("memory/host_rss_gib",)),
    ),
}


def panel_lines(
    panel: Panel, rows: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every metric of the panel that the rows of metrics.jsonl hold."""
    patterns = [metric.pattern for metric in panel.members]
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and any(pattern.fullmatch(name) for pattern in patterns):
                steps, values = lines.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return lines

"""Which charts a report has: titles, captions and the metrics that each draws.

A chart names metrics by regular expressions, so that every evaluation set, reward part and own
statistic of a run gets its line. A chart without a logged metric is left out.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["number", "share", "seconds", "GiB", "tokens"]


@dataclass(frozen=True)
class LineSpec:
    """``pattern`` matches a whole name; ``\\1`` in ``label`` is its first group.

    ``trend`` draws the values faintly below their centred mean. ``spikes`` marks outliers.
    ``sparse`` draws points: the metric is measured in some steps.
    """

    pattern: str
    label: str
    trend: bool = False
    spikes: bool = False
    sparse: bool = False

    def matching(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """The (name, label) of every metric that this line draws, in alphabetical order."""
        matches = [re.fullmatch(self.pattern, name) for name in sorted(names)]
        return [(match.string, match.expand(self.label)) for match in matches if match]


@dataclass(frozen=True)
class ChartSpec:
    """``log`` says whether the vertical axis starts logarithmic, where the values allow it.

    ``bounds`` fixes the axis. ``nonzero`` leaves the chart out while every value is 0.
    """

    title: str
    lines: tuple[LineSpec, ...]
    caption: str = ""
    unit: Unit = "number"
    log: bool = False
    bounds: tuple[float, float] | None = None
    nonzero: bool = False


EVALUATION_SET = "eval/(?!part/)(.+)"
"""Metrics of one of several evaluation sets; ``eval/part/`` are parts of the reward."""

LEARNING = (
    ChartSpec(
        "Accuracy on held-out problems",
        (
            LineSpec("eval/accuracy", "all evaluation problems", sparse=True),
            LineSpec(f"{EVALUATION_SET}/accuracy", r"\1", sparse=True),
        ),
        "Greedy responses to problems that the run never trains on.",
        unit="share",
        bounds=(0, 1),
    ),
    ChartSpec(
        "Mean reward in training",
        (
            LineSpec("reward/mean", "reward", trend=True),
            LineSpec("reward/shaped_mean", "reward less the length penalty"),
        ),
        "Sampled responses of the step.",
    ),
    ChartSpec(
        "Parts of the reward",
        (
            LineSpec("reward/part/(.+)", r"\1"),
            LineSpec("eval/part/(.+)", r"\1, evaluation", sparse=True),
        ),
        "The mean of each part that the reward function returns.",
    ),
    ChartSpec(
        "Mean reward on held-out problems",
        (
            LineSpec("eval/reward_mean", "all evaluation problems", sparse=True),
            LineSpec(f"{EVALUATION_SET}/reward_mean", r"\1", sparse=True),
        ),
        "Greedy responses.",
    ),
    ChartSpec(
        "Supervised loss",
        (
            LineSpec("sft/loss", "training", trend=True),
            LineSpec("eval/loss", "held-out problems", sparse=True),
        ),
        "Mean negative log-probability of a target token.",
    ),
    ChartSpec(
        "Response length",
        (
            LineSpec("rollout/response_length_mean", "mean"),
            LineSpec("rollout/response_length_max", "longest"),
            LineSpec("eval/response_length_mean", "mean, evaluation", sparse=True),
            LineSpec(f"{EVALUATION_SET}/response_length_mean", r"mean, \1", sparse=True),
        ),
        unit="tokens",
    ),
    ChartSpec(
        "Truncated responses and format errors",
        (
            LineSpec("rollout/truncated_fraction", "truncated in training"),
            LineSpec("eval/truncated_fraction", "truncated, evaluation", sparse=True),
            LineSpec(f"{EVALUATION_SET}/truncated_fraction", r"truncated, \1", sparse=True),
            LineSpec("eval/format_error_fraction", "format errors, evaluation", sparse=True),
            LineSpec(f"{EVALUATION_SET}/format_error_fraction", r"format errors, \1", sparse=True),
        ),
        "A truncated response reached the token limit.",
        unit="share",
    ),
    ChartSpec(
        "Groups of responses to one prompt",
        (
            LineSpec("group/zero_std_fraction", "equal rewards, no gradient"),
            LineSpec("group/all_correct_fraction", "all correct"),
            LineSpec("group/all_wrong_fraction", "all wrong"),
            LineSpec("group/kept_fraction", "kept by dynamic sampling"),
        ),
        "Groups whose rewards differ give a gradient.",
        unit="share",
    ),
    ChartSpec(
        "Failed rewards",
        (
            LineSpec("reward/failed_fraction", "raised or crashed"),
            LineSpec("reward/timeout_fraction", "ran out of time"),
            LineSpec("eval/failed_fraction", "evaluation", sparse=True),
            LineSpec(f"{EVALUATION_SET}/failed_fraction", r"\1", sparse=True),
        ),
        unit="share",
        nonzero=True,
    ),
    ChartSpec("Entropy of the policy", (LineSpec("policy/entropy", "mean"),), "Nats per token."),
    ChartSpec(
        "Gradient norm",
        (
            LineSpec("policy/grad_norm", "policy", spikes=True),
            LineSpec("value/grad_norm", "critic", spikes=True),
        ),
        "Before clipping.",
    ),
    ChartSpec(
        "Clipped tokens",
        (
            LineSpec("policy/clip_fraction_high", "above 1 + clip_high"),
            LineSpec("policy/clip_fraction_low", "below 1 - clip_low"),
            LineSpec("policy/dual_clip_fraction", "dual clip"),
            LineSpec("value/clip_fraction", "critic"),
        ),
        unit="share",
    ),
    ChartSpec(
        "KL divergence",
        (
            LineSpec("policy/kl", "to the policy before the step"),
            LineSpec("policy/ref_kl", "to the reference"),
        ),
        "Nats per token.",
    ),
    ChartSpec("Learning rate", (LineSpec("policy/lr", "policy"), LineSpec("value/lr", "critic"))),
    ChartSpec(
        "Critic",
        (
            LineSpec("value/explained_variance", "explained variance"),
            LineSpec("value/loss", "loss"),
        ),
    ),
    ChartSpec(
        "Statistics of your own loss",
        (LineSpec("(?:custom|own)/(.+)", r"\1"),),
    ),
)

MISMATCH = (
    ChartSpec(
        "k3 over all response tokens",
        (
            LineSpec("mismatch/k3", "as trained", spikes=True),
            LineSpec("mismatch_native/k3", "native routing", sparse=True),
        ),
        "KL from the rollout policy to the training policy.",
        log=True,
    ),
    ChartSpec(
        "Median |difference| on flipped tokens",
        (
            LineSpec("mismatch/abs_diff_median_flipped", "as trained", sparse=True),
            LineSpec("mismatch_native/abs_diff_median_flipped", "native routing", sparse=True),
        ),
        "Difference of log-probabilities, where native routing picks other experts.",
        log=True,
    ),
    ChartSpec(
        "Largest |difference|",
        (
            LineSpec("mismatch/abs_diff_max", "largest", spikes=True),
            LineSpec("mismatch/abs_diff_p99", "99 % of the tokens are below", spikes=True),
            LineSpec("mismatch/abs_diff_mean", "mean"),
        ),
        "Difference of log-probabilities, as trained.",
        log=True,
    ),
    ChartSpec(
        "Route coverage",
        (
            LineSpec("routing/coverage", "rows with a captured route"),
            LineSpec("routing/fallback_fraction", "rows without a usable route"),
        ),
        "Coverage is 100 % when no route was lost.",
        unit="share",
        bounds=(0, 1),
    ),
    ChartSpec(
        "Flipped tokens",
        (
            LineSpec("routing/flipped_token_fraction", "flipped response tokens", sparse=True),
            LineSpec(
                "routing/differing_row_fraction", "rows that differ in some layer", sparse=True
            ),
            LineSpec(
                "routing/wide_flip_fraction", "flips wider than rounding explains", sparse=True
            ),
        ),
        unit="share",
    ),
    ChartSpec(
        "Experts that native routing also picks",
        (
            LineSpec("routing/overlap", "overlap, mean of the layers", sparse=True),
            LineSpec("routing/overlap_min", "overlap of the worst layer", sparse=True),
            LineSpec("routing/gate_mass", "gate mass", sparse=True),
        ),
        unit="share",
    ),
    ChartSpec(
        "Load of the experts",
        (
            LineSpec("routing/load_max", "most loaded expert", sparse=True),
            LineSpec("routing/load_mean", "mean deviation", sparse=True),
            LineSpec("routing/load_min", "least loaded expert", sparse=True),
        ),
        "Share x number of experts - 1: 0 is balanced, -1 is an expert without tokens.",
    ),
    ChartSpec(
        "Weights of the correction",
        (
            LineSpec("correction/effective_sample_size", "effective sample size"),
            LineSpec("correction/reject_token_fraction", "rejected tokens"),
            LineSpec("correction/reject_sequence_fraction", "responses with a rejected token"),
            LineSpec("correction/veto_sequence_fraction", "responses with a vetoed token"),
        ),
        unit="share",
    ),
    ChartSpec(
        "Staleness of the weights that sampled",
        (LineSpec("rollout/staleness", "steps"),),
        nonzero=True,
    ),
)

TIME = (
    ChartSpec(
        "Throughput",
        (
            LineSpec("throughput/tokens_per_second", "prompt and response tokens"),
            LineSpec("throughput/generated_tokens_per_second", "generated, while generating"),
        ),
        "Tokens per second, all devices.",
        unit="tokens",
    ),
    ChartSpec(
        "Throughput per GPU",
        (
            LineSpec("throughput/tokens_per_second_per_gpu", "measured"),
            LineSpec("throughput/bound_tokens_per_second_per_gpu", "limit of the card"),
        ),
        "Tokens per second.",
        unit="tokens",
    ),
    ChartSpec(
        "Utilization",
        (
            LineSpec("gpu/utilization", "a kernel runs"),
            LineSpec("throughput/mfu_update", "model FLOPs, update"),
            LineSpec("throughput/mfu_scoring", "model FLOPs, scoring"),
            LineSpec("throughput/generate_over_bound", "decoding against its limit"),
        ),
        unit="share",
    ),
    ChartSpec(
        "Memory",
        (
            LineSpec("memory/host_rss_gib", "host: driver and what it started"),
            LineSpec("gpu/memory_gib", "fullest GPU"),
        ),
        unit="GiB",
    ),
)

STEP_TIME = ChartSpec("Seconds per step", (LineSpec("time/step", "whole step"),), unit="seconds")

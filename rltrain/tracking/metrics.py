"""Every metric a run may log: its formula, denominator and unit.

``METRICS`` is the one table; ``docs/metrics.md`` is generated from it and the tracker refuses a
name that is not in it, so no number is logged that nobody can look up. A name with a ``{field}``
is a family: ``routing/overlap/layer_{layer}`` covers ``routing/overlap/layer_3``.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal, get_args

Section = Literal["learning", "mismatch", "routing", "rollout", "policy", "performance"]
When = Literal["step", "sampled", "evaluation"]
Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Metric:
    """One metric, or one family of them.

    ``when`` is ``sampled`` for what is measured on the first and every
    ``routing_replay.sample_every``-th step, ``evaluation`` for what needs the held-out problems.
    ``denominator`` says what the mean is over; ``-`` where nothing is divided.
    """

    name: str
    formula: str
    denominator: str
    unit: str = "1"
    when: When = "step"
    better: Better = "neither"
    section: Section = field(kw_only=True)

    @property
    def pattern(self) -> re.Pattern[str]:
        literals = (re.escape(part) for part in re.split(r"\{\w+\}", self.name))
        return re.compile(r"\d+".join(literals))

    @property
    def glob(self) -> str:
        """The name for wandb's ``define_metric``, which knows ``*`` at the end only."""
        return re.sub(r"\{.*", "*", self.name)


RESPONSE_TOKENS = "response tokens of the step"
SEQUENCES = "responses of the step"
SCORED = "responses whose reward was computed"
GROUPS = "prompts with a scored response"
HELD_OUT = "held-out problems"
LOSS_TOKENS = "tokens in the loss, mean over the step's updates"
UPDATES = "optimizer updates of the step"
ROWS = "captured rows x layers"


def _mismatch(area: str, whose: str, when: When) -> tuple[Metric, ...]:
    """The mismatch metrics under ``area``; d = clamp(log pi_train - log pi_rollout, -20, 20)."""

    metric = partial(Metric, section="mismatch", when=when, unit="nat", better="lower")
    tokens = f"{RESPONSE_TOKENS}, {whose}"
    return (
        metric(
            f"{area}/k1", "E[-d]: KL(rollout || train), can be negative", tokens, better="neither"
        ),
        metric(f"{area}/k3", "E[exp(d) - d - 1]: the same KL, never negative", tokens),
        metric(f"{area}/abs_diff_mean", "E[|d|]", tokens),
        metric(f"{area}/abs_diff_max", "max |d|", "-"),
        metric(f"{area}/abs_diff_median_flipped", "median |d|", "flipped tokens", when="sampled"),
        metric(f"{area}/mult_prob_error", "E[exp(|d|)]; 1 is no error", tokens, unit="1"),
        metric(f"{area}/num_tokens", "response tokens", "-", unit="tokens", better="neither"),
        metric(
            f"{area}/num_flipped",
            "flipped response tokens",
            "-",
            unit="tokens",
            when="sampled",
            better="neither",
        ),
    )


_learning = partial(Metric, section="learning")
LEARNING = (
    _learning("reward/mean", "mean reward", SCORED, "reward", better="higher"),
    _learning("reward/std", "standard deviation of the reward", SCORED, "reward"),
    _learning(
        "reward/failed_fraction", "rewards that raised or crashed", SEQUENCES, better="lower"
    ),
    _learning("reward/timeout_fraction", "rewards that ran out of time", SEQUENCES, better="lower"),
    _learning(
        "group/zero_std_fraction", "groups of equal rewards: no gradient", GROUPS, better="lower"
    ),
    _learning("group/all_correct_fraction", "groups where every reward is 1 or more", GROUPS),
    _learning("group/all_wrong_fraction", "groups where no reward is above 0", GROUPS),
    _learning(
        "eval/accuracy", "exact answers, greedy", HELD_OUT, when="evaluation", better="higher"
    ),
    _learning(
        "eval/format_error_fraction",
        "responses no answer could be read from",
        HELD_OUT,
        when="evaluation",
        better="lower",
    ),
    _learning(
        "eval/response_length_mean", "mean response length", HELD_OUT, "tokens", when="evaluation"
    ),
    _learning("sft/loss", "mean negative log-probability of the target", "target tokens", "nat"),
    _learning("sft/accuracy", "targets that are the most likely token", "target tokens"),
)

MISMATCH = (
    *_mismatch("mismatch", "scored as trained", "step"),
    *_mismatch("mismatch_native", "the same batch scored with native routing", "sampled"),
)

_routing = partial(Metric, section="routing")
ROUTING = (
    _routing(
        "routing/coverage",
        "rows with a captured route; 1.0 when nothing was lost",
        "sum over samples of (tokens - 1)",
        better="higher",
    ),
    _routing(
        "routing/fallback_fraction",
        "rows of a replayed rollout without a usable route",
        "sum over samples of (tokens - 1)",
        better="lower",
    ),
    _routing(
        "routing/fallback_dropped_fraction",
        "loss tokens taken out because routes before them are missing",
        "loss tokens before that",
        better="lower",
    ),
    _routing(
        "routing/overlap",
        "|native top-k and captured top-k| / K",
        ROWS,
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/overlap_min", "smallest overlap of a layer", "-", when="sampled", better="higher"
    ),
    _routing(
        "routing/overlap/layer_{layer}",
        "the overlap of one layer, by global layer number",
        "captured rows",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/flipped_token_fraction",
        "mismatch/num_flipped / mismatch/num_tokens",
        RESPONSE_TOKENS,
        when="sampled",
    ),
    _routing("routing/bytes_per_token", "bytes of captured routes", "captured rows", "B"),
)

_rollout = partial(Metric, section="rollout")
ROLLOUT = (
    _rollout("rollout/response_length_mean", "mean response length", SEQUENCES, "tokens"),
    _rollout("rollout/response_length_max", "longest response", "-", "tokens"),
    _rollout("rollout/truncated_fraction", "responses cut at the limit", SEQUENCES, better="lower"),
    _rollout("rollout/num_tokens", "prompt and response tokens", "-", "tokens"),
    _rollout("rollout/weight_version", "smallest weight version among the rollouts", "-", "syncs"),
)

_policy = partial(Metric, section="policy")
POLICY = (
    _policy(
        "policy/loss", "the loss that was minimized", "algorithm.aggregation", better="neither"
    ),
    _policy("policy/ratio_mean", "E[pi / pi_old]", LOSS_TOKENS),
    _policy("policy/ratio_max", "max pi / pi_old", "-"),
    _policy("policy/clip_fraction", "tokens whose clipped objective is active", LOSS_TOKENS),
    _policy("policy/kl", "E[r - log r - 1], r = pi / pi_old", LOSS_TOKENS, "nat"),
    _policy("policy/ref_kl", "KL to the reference by algorithm.kl_estimator", LOSS_TOKENS, "nat"),
    _policy("policy/entropy", "E[-sum over v of p(v) log p(v)]", LOSS_TOKENS, "nat"),
    _policy("policy/grad_norm", "global gradient norm before clipping", UPDATES),
    _policy("policy/lr", "learning rate of the last update", "-"),
)


_performance = partial(Metric, section="performance")


def _seconds(phase: str, what: str) -> Metric:
    return _performance(f"time/{phase}", what, "-", "s", better="lower")


PERFORMANCE = (
    _seconds("generate", "sampling the responses"),
    _seconds("reward", "computing the rewards"),
    _seconds("old_logprobs", "log-probabilities before the update, with replay"),
    _seconds("native_logprobs", "the same with native routing, on sampled steps"),
    _seconds("ref_logprobs", "log-probabilities under the reference"),
    _seconds("advantages", "advantages"),
    _seconds("update", "forward, backward and optimizer"),
    _seconds("weight_sync", "handing the weights to the engine"),
    _seconds("eval", "evaluation"),
    _seconds("checkpoint", "saving"),
    _seconds("other", "time/step less all phases"),
    _seconds("step", "the whole step, wall clock"),
    _performance(
        "throughput/tokens_per_second",
        "prompt and response tokens / time/step",
        "time/step",
        "tokens/s",
        better="higher",
    ),
    _performance(
        "throughput/generated_tokens_per_second",
        "response tokens / time/generate",
        "time/generate",
        "tokens/s",
        better="higher",
    ),
    _performance(
        "memory/host_rss_gib",
        "resident memory of the driver and what it started",
        "-",
        "GiB",
    ),
)

METRICS: tuple[Metric, ...] = (*LEARNING, *MISMATCH, *ROUTING, *ROLLOUT, *POLICY, *PERFORMANCE)
SECTIONS: tuple[Section, ...] = get_args(Section)


INTRODUCTION = """\
# Metrics

Generated from `rltrain/tracking/metrics.py` by
`python -m rltrain.tracking.metrics > docs/metrics.md`; a test holds it current.

Names are `area/name`. `E` is the mean over the denominator, always of the global batch. A metric
that has nothing to be computed from in a step is left out of that step, never zero. `sampled`
means on the first and every `routing_replay.sample_every`-th step.

`d = log pi_train - log pi_rollout` of a sampled token, clamped to [-20, 20]. `mismatch/` scores
the batch as it was trained, with routing replay where it is on; `mismatch_native/` scores the same
batch with native routing. A response token is *flipped* when native routing and the captured route
pick different experts where its log-probability can depend on it: in any layer of the row that
predicts it, or in any layer but the last of a row before that one, which attention reads."""


@cache
def find(name: str) -> Metric:
    """The catalogue's entry for a metric's name.

    Raises:
        ValueError: when there is none; names the nearest.
    """
    for metric in METRICS:
        if metric.pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1, cutoff=0.0)
    raise ValueError(
        f"{name!r} is not a known metric; the nearest is {near[0]!r}. "
        "Log that, or add the new one to rltrain/tracking/metrics.py"
    )


def check(metrics: Mapping[str, float]) -> None:
    """Raise ValueError unless every name is in the catalogue and every value is a number."""
    for name, value in metrics.items():
        find(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: expected an int or a float, found {value!r}")


def prefixed(area: str, values: Mapping[str, float]) -> dict[str, float]:
    """``{"k1": x}`` as ``{"mismatch/k1": x}``."""
    return {f"{area}/{name}": value for name, value in values.items()}


def document(metrics: Iterable[Metric] = METRICS) -> str:
    """The text of docs/metrics.md."""
    lines = [INTRODUCTION]
    grouped = {section: [m for m in metrics if m.section == section] for section in SECTIONS}
    for section, rows in grouped.items():
        lines += [
            "",
            f"## {section.capitalize()}",
            "",
            "| name | formula | denominator | unit | when | better |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(metric) for metric in rows),
        ]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    cells = (
        f"`{metric.name}`",
        metric.formula,
        metric.denominator,
        metric.unit,
        metric.when,
        "-" if metric.better == "neither" else metric.better,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())

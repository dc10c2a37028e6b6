"""Every metric a run may log: its formula, denominator and unit.

``METRICS`` is the one table. A name with a ``{field}`` is a family:
``routing/overlap/layer_{layer}`` covers ``routing/overlap/layer_3``.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

Section = Literal["learning", "mismatch", "routing", "rollout", "policy", "performance"]
When = Literal["step", "sampled", "evaluation"]
Better = Literal["higher", "lower", "neither"]
FIELDS = {"layer": r"\d+", "part": r"\d+", "stat": r"\w+"}


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
        parts = re.split(r"\{(\w+)\}", self.name)  # literals, and fields between them
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = (FIELDS[name] for name in parts[1::2])
        return re.compile("".join(parts))

    @property
    def glob(self) -> str:
        """The name for wandb's ``define_metric``, which knows ``*`` at the end only."""
        return re.sub(r"\{.*", "*", self.name)


RESPONSE_TOKENS = "response tokens of the step"
SEQUENCES = "responses of the step"
SCORED = "responses whose reward was computed"
GROUPS = "prompts with a scored response"
SAMPLED_GROUPS = "prompts sampled in the step"
COMPARED = "responses with a token to compare"
CORRECTED = "response tokens of the loss before rejection"
CORRECTED_SEQUENCES = "responses with such a token"
VALUED = "tokens in the loss"
HELD_OUT = "held-out problems"
SCORED_HELD_OUT = "held-out problems whose reward was computed"
VERDICTS = "left out unless data.reward.success_at or the reward function says which these are"
LOSS_TOKENS = "tokens in the loss, mean over the step's updates"
AGGREGATED = "by algorithm.aggregation, mean over the step's updates"
UPDATES = "optimizer updates of the step"
ROWS = "captured rows x layers"


def _mismatch(area: str, whose: str, when: When) -> tuple[Metric, ...]:
    """The mismatch metrics under ``area``; rho = exp(d)."""

    metric = partial(Metric, section="mismatch", when=when, unit="nat", better="lower")
    tokens, sequences = f"{RESPONSE_TOKENS}, {whose}", f"{COMPARED}, {whose}"
    ratio = partial(metric, unit="1", better="neither")
    return (
        metric(
            f"{area}/k1", "E[-d]: KL(rollout || train), can be negative", tokens, better="neither"
        ),
        metric(f"{area}/k3", "E[exp(d) - d - 1]: the same KL, never negative", tokens),
        metric(
            f"{area}/reverse_k3",
            "E[exp(-d) + d - 1]: k3 with the policies exchanged; one token that the trainer finds "
            "improbable rules it",
            tokens,
        ),
        metric(
            f"{area}/js",
            "E[rho d - (1 + rho) log((1 + rho) / 2)] / 2: the Jensen-Shannon divergence",
            tokens,
        ),
        metric(f"{area}/abs_diff_mean", "E[|d|]", tokens),
        metric(f"{area}/abs_diff_std", "standard deviation of |d|", tokens),
        metric(f"{area}/abs_diff_p99", "the smallest |d| that 99 % do not exceed", tokens),
        metric(f"{area}/abs_diff_max", "max |d|", "-"),
        metric(f"{area}/abs_diff_median_flipped", "median |d|", "flipped tokens", when="sampled"),
        metric(f"{area}/mult_prob_error", "E[exp(|d|)]; 1 is no error", tokens, unit="1"),
        ratio(f"{area}/rho_mean", "E[rho]; 1 where the mismatch has no bias", tokens),
        metric(f"{area}/chi2_token", "E[rho^2] - 1", tokens, unit="1"),
        metric(
            f"{area}/chi2_sequence",
            "E[(product of rho)^2] - 1, the log of the product clamped",
            sequences,
            unit="1",
        ),
        metric(f"{area}/prob_diff_mean", "E[|pi_train - pi_rollout|]", tokens, unit="1"),
        metric(f"{area}/prob_diff_std", "standard deviation of the same", tokens, unit="1"),
        metric(f"{area}/prob_diff_max", "max |pi_train - pi_rollout|", "-", unit="1"),
        metric(
            f"{area}/prob_correlation",
            "Pearson's correlation of pi_train and pi_rollout; left out where either is constant",
            tokens,
            unit="1",
            better="higher",
        ),
        ratio(f"{area}/ppl", "E[exp(-mean of log pi_train over the response)]", sequences),
        ratio(f"{area}/rollout_ppl", "E[exp(-mean of log pi_rollout)]", sequences),
        ratio(f"{area}/log_ppl", "E[-mean of log pi_train]", sequences, unit="nat"),
        ratio(f"{area}/rollout_log_ppl", "E[-mean of log pi_rollout]", sequences, unit="nat"),
        ratio(f"{area}/ppl_ratio", "E[exp(-mean of d)]", sequences),
        ratio(f"{area}/log_ppl_diff_mean", "E[-mean of d]", sequences, unit="nat"),
        metric(f"{area}/log_ppl_diff_abs_mean", "E[|mean of d|]", sequences),
        ratio(f"{area}/log_ppl_diff_max", "max of -mean of d", "-", unit="nat"),
        ratio(f"{area}/log_ppl_diff_min", "min of -mean of d", "-", unit="nat"),
        ratio(f"{area}/worst_sequence", "the response of the batch of largest mean |d|", "-"),
        metric(f"{area}/worst_sequence_abs_diff", "its mean |d|", "its response tokens"),
        ratio(f"{area}/num_tokens", "response tokens", "-", unit="tokens"),
        ratio(f"{area}/num_flipped", "flipped response tokens", "-", unit="tokens", when="sampled"),
    )


_learning = partial(Metric, section="learning")
_evaluation = partial(_learning, when="evaluation")
LEARNING = (
    _learning("reward/mean", "mean reward", SCORED, "reward", better="higher"),
    _learning("reward/std", "standard deviation of the reward", SCORED, "reward"),
    _learning(
        "reward/shaped_mean",
        "mean reward less the penalty of algorithm.overlong, where it takes one",
        SCORED,
        "reward",
        better="higher",
    ),
    _learning(
        "reward/failed_fraction", "rewards that raised or crashed", SEQUENCES, better="lower"
    ),
    _learning("reward/timeout_fraction", "rewards that ran out of time", SEQUENCES, better="lower"),
    _learning(
        "group/zero_std_fraction", "groups of equal rewards: no gradient", GROUPS, better="lower"
    ),
    _learning(
        "reward/accuracy",
        f"correct responses; {VERDICTS}",
        SCORED,
        better="higher",
    ),
    _learning(
        "group/all_correct_fraction", f"groups of correct responses alone; {VERDICTS}", GROUPS
    ),
    _learning("group/all_wrong_fraction", f"groups without a correct response; {VERDICTS}", GROUPS),
    _learning("group/rounds", "rounds of generation by dynamic sampling", "-", "rounds"),
    _learning(
        "group/kept_fraction", "groups that dynamic sampling kept", SAMPLED_GROUPS, better="higher"
    ),
    _learning("advantage/mean", "mean advantage", "tokens in the loss"),
    _learning("advantage/std", "standard deviation of the advantage", "tokens in the loss"),
    _learning("advantage/min", "smallest advantage", "-"),
    _learning("advantage/max", "largest advantage", "-"),
    _evaluation(
        "eval/reward_mean", "mean reward, greedy", SCORED_HELD_OUT, "reward", better="higher"
    ),
    _evaluation(
        "eval/accuracy",
        f"correct responses, greedy; {VERDICTS}",
        SCORED_HELD_OUT,
        better="higher",
    ),
    _evaluation("eval/num_scored", SCORED_HELD_OUT, "-", "problems"),
    _evaluation(
        "eval/failed_fraction",
        "rewards that raised, crashed or ran out of time",
        HELD_OUT,
        better="lower",
    ),
    _evaluation(
        "eval/format_error_fraction",
        "responses that are no integer, though the answer is one and is compared as text (exact)",
        "held-out problems with an integer as answer",
        better="lower",
    ),
    _evaluation("eval/truncated_fraction", "responses cut at the limit", HELD_OUT, better="lower"),
    _evaluation("eval/response_length_mean", "mean response length", HELD_OUT, "tokens"),
    _evaluation(
        "eval/loss",
        "mean negative log-probability of the target, in supervised runs",
        "target tokens of the held-out problems",
        "nat",
        better="lower",
    ),
    _learning(
        "sft/loss",
        "mean negative log-probability of the target before each update",
        "target tokens of all mini-batches",
        "nat",
        better="lower",
    ),
)

_correction = partial(Metric, section="mismatch")


def _spread(name: str, what: str, over: str) -> tuple[Metric, ...]:
    return (
        _correction(f"{name}_mean", f"mean {what}", over),
        _correction(f"{name}_std", f"standard deviation of the {what}", over),
        _correction(f"{name}_min", f"smallest {what}", "-"),
        _correction(f"{name}_max", f"largest {what}", "-"),
    )


CORRECTION = (
    *_spread("correction/weight", "weight w of a token in the policy loss", CORRECTED),
    *_spread(
        "correction/sequence_weight", "mean of w over a response's tokens", CORRECTED_SEQUENCES
    ),
    _correction(
        "correction/sequence_weight_max_deviation", "max |mean of w over a response - 1|", "-"
    ),
    _correction(
        "correction/fraction_low", "weights below correction.weight_min before bounds", CORRECTED
    ),
    _correction(
        "correction/fraction_high", "weights above correction.weight_max before bounds", CORRECTED
    ),
    _correction("correction/normalization", "mean weight that all were divided by", CORRECTED),
    _correction(
        "correction/effective_sample_size",
        "E[w]^2 / E[w^2]: 1 where all are equal, 0 where all are 0",
        CORRECTED,
        better="higher",
    ),
    _correction("correction/reject_token_fraction", "rejected tokens", CORRECTED),
    _correction(
        "correction/reject_sequence_fraction",
        "responses with a rejected token",
        CORRECTED_SEQUENCES,
    ),
    _correction(
        "correction/veto_token_fraction", "tokens whose rho is below correction.veto", CORRECTED
    ),
    _correction(
        "correction/veto_sequence_fraction", "responses with such a token", CORRECTED_SEQUENCES
    ),
)

MISMATCH = (
    *_mismatch("mismatch", "scored as trained", "step"),
    *_mismatch("mismatch_native", "the same batch scored with native routing", "sampled"),
    *CORRECTION,
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
    _routing(
        "routing/overlap/part_{part}",
        "the overlap in one quarter of every sequence, counted from 0",
        "captured rows there",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/gate_mass",
        "gate weight of the experts used over that of the native choice",
        ROWS,
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/gate_mass/layer_{layer}",
        "the gate mass of one layer, by global layer number",
        "captured rows",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/wide_flip_fraction",
        "rows with an expert further below the trainer's own choice than rounding moves it",
        "judged rows x layers",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/wide_flip_fraction/layer_{layer}",
        "the same of one layer, by global layer number",
        "judged rows",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/flip_noise/layer_{layer}",
        "scale of the difference between engine and trainer, in the router's logits, from narrow "
        "flips; left out where too few rows were judged",
        "experts next to the native choice",
        when="sampled",
    ),
    _routing(
        "routing/judged_fraction",
        "rows whose sequence has a captured route in every row so far",
        "captured rows",
        when="sampled",
        better="higher",
    ),
    _routing(
        "routing/load_max",
        "max over layers and experts of share * E - 1, of the rollout's routes",
        "captured response rows of a layer",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/load_max/layer_{layer}",
        "the same of one layer, by global layer number",
        "captured response rows",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/load_min",
        "min over layers and experts of share * E - 1; -1 is an expert that nobody uses",
        "captured response rows of a layer",
        when="sampled",
    ),
    _routing(
        "routing/load_mean",
        "E[|share * E - 1|]",
        "experts x layers",
        when="sampled",
        better="lower",
    ),
    _routing(
        "routing/differing_row_fraction",
        "rows that native routing would send elsewhere in some layer",
        "captured rows",
        when="sampled",
    ),
    _routing(
        "routing/first_differing_layer",
        "the lowest layer in which a row differs, by global layer number",
        "differing rows",
        when="sampled",
    ),
    _routing("routing/padded_fraction", "padding rows of an update", "rows that routers see"),
    _routing("routing/bytes_per_token", "bytes of captured routes", "captured rows", "B"),
    _routing("routing/host_bytes", "bytes of the step's routes in the object store", "-", "B"),
)

_rollout = partial(Metric, section="rollout")
ROLLOUT = (
    _rollout("rollout/response_length_mean", "mean response length", SEQUENCES, "tokens"),
    _rollout("rollout/response_length_max", "longest response", "-", "tokens"),
    _rollout("rollout/truncated_fraction", "responses cut at the limit", SEQUENCES, better="lower"),
    _rollout(
        "rollout/aborted_groups",
        "groups that were begun and given up, with rollout.oversample",
        "-",
        "groups",
    ),
    _rollout(
        "rollout/staleness", "steps trained since the engine was last given weights", "-", "steps"
    ),
    _rollout("rollout/num_tokens", "prompt and response tokens sampled", "-", "tokens"),
    _rollout("rollout/num_response_tokens", "response tokens sampled", "-", "tokens"),
    _rollout("rollout/weight_version", "smallest weight version among the rollouts", "-", "syncs"),
)

_policy = partial(Metric, section="policy")
POLICY = (
    _policy("policy/loss", "the loss that was minimized", AGGREGATED),
    _policy("policy/policy_loss", "the loss without KL and entropy", AGGREGATED),
    _policy("policy/ratio_mean", "E[ratio], the ratio as algorithm.loss has it", LOSS_TOKENS),
    _policy("policy/ratio_min", "smallest ratio", "-"),
    _policy("policy/ratio_max", "largest ratio", "-"),
    _policy(
        "policy/clip_fraction", "policy/clip_fraction_low + policy/clip_fraction_high", LOSS_TOKENS
    ),
    _policy("policy/clip_fraction_low", "tokens clipped at 1 - algorithm.clip_low", LOSS_TOKENS),
    _policy("policy/clip_fraction_high", "tokens clipped at 1 + algorithm.clip_high", LOSS_TOKENS),
    _policy(
        "policy/dual_clip_fraction",
        "tokens of negative advantage whose ratio is above algorithm.dual_clip",
        LOSS_TOKENS,
    ),
    _policy("policy/kl", "E[r - log r - 1], r = pi / pi_old", LOSS_TOKENS, "nat"),
    _policy("policy/ref_kl", "KL to the reference by algorithm.kl.estimator", LOSS_TOKENS, "nat"),
    _policy("policy/kl_coef", "coefficient of that KL in the step", "-"),
    _policy(
        "policy/mismatch_over_entropy",
        "mismatch/k3 / policy/entropy",
        "each has its own",
        better="lower",
    ),
    _policy("policy/entropy", "E[-sum over v of p(v) log p(v)]", LOSS_TOKENS, "nat"),
    _policy("policy/entropy_max", "largest entropy of a loss token", "-", "nat"),
    _policy("policy/grad_norm", "global gradient norm before clipping", UPDATES),
    _policy("policy/lr", "learning rate of the last update", "-"),
    _policy(
        "policy/skipped_updates",
        "updates left out because no token was left in the loss",
        "-",
        "updates",
        better="lower",
    ),
    _policy("value/loss", "max((V - R)^2, (clipped V - R)^2) / 2", AGGREGATED),
    _policy("value/clip_fraction", "tokens whose clipped error is the larger", LOSS_TOKENS),
    _policy(
        "value/explained_variance",
        "1 - Var[R - V] / Var[R], V before the update; left out where R is constant",
        VALUED,
        better="higher",
    ),
    _policy("value/mean", "E[V], V before the update", VALUED, "reward"),
    _policy("value/return_mean", "E[R], what V is to learn", VALUED, "reward"),
    _policy("value/grad_norm", "the critic's gradient norm before clipping", UPDATES),
    _policy("value/lr", "the critic's learning rate of the last update", "-"),
    _policy("custom/{stat}", "a statistic of one's own algorithm.loss, by its name", LOSS_TOKENS),
)


_performance = partial(Metric, section="performance")


def _seconds(phase: str, what: str) -> Metric:
    return _performance(f"time/{phase}", what, "-", "s", better="lower")


PERFORMANCE = (
    _seconds("generate", "sampling the responses"),
    _seconds("reward", "computing the rewards that are missing after the last response"),
    _seconds("engine_sleep", "engines that share GPUs: freeing their memory for training"),
    _seconds("onload", "policy and critic back from host memory, where engines share GPUs"),
    _seconds("old_logprobs", "log-probabilities before the update, with replay"),
    _seconds("native_logprobs", "the same with native routing, on sampled steps"),
    _seconds("ref_logprobs", "log-probabilities under the reference"),
    _seconds("values", "the critic's values"),
    _seconds("advantages", "advantages"),
    _seconds("update", "forward, backward and optimizer"),
    _seconds("critic_update", "the same of the critic"),
    _seconds("offload", "policy and critic to host memory, where engines share GPUs"),
    _seconds("engine_wake", "engines that share GPUs: taking their memory again"),
    _seconds("weight_sync", "handing the weights to the engine"),
    _seconds("eval", "evaluation"),
    _seconds("checkpoint", "saving"),
    _seconds("other", "time/step less all phases"),
    _seconds("step", "the whole step, wall clock"),
    _performance(
        "throughput/tokens_per_second",
        "prompt and response (in supervised runs: target) tokens / time/step",
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
        "throughput/tokens_per_second_per_gpu",
        "throughput/tokens_per_second over all GPUs of the run; on GPUs",
        "time/step x GPUs",
        "tokens/s",
        better="higher",
    ),
    _performance(
        "throughput/bound_tokens_per_second_per_gpu",
        "the same of a step that generates, scores once and updates at the card's limits, and does "
        "nothing else; on cards of rltrain/planning/roofline.py",
        "-",
        "tokens/s",
    ),
    _performance(
        "throughput/generate_over_bound",
        "seconds that decoding needs at the card's memory bandwidth and peak / time/generate; left "
        "out where dynamic sampling or over-sampling left responses out",
        "time/generate",
        better="higher",
    ),
    _performance(
        "throughput/mfu_scoring",
        "model FLOPs of one forward pass / (time/old_logprobs x GPUs of the policy x dense bf16 "
        "peak)",
        "time/old_logprobs",
        better="higher",
    ),
    _performance(
        "throughput/mfu_update",
        "model FLOPs of the updates, what is recomputed not counted, / (time/update x GPUs of the "
        "policy x dense bf16 peak)",
        "time/update",
        better="higher",
    ),
    _performance(
        "gpu/utilization",
        "share of a second in which a kernel ran, since the step before, by NVML",
        "seconds x GPUs of the run",
        better="higher",
    ),
    _performance(
        "gpu/memory_gib",
        "most memory in use on one GPU in that time, by NVML",
        "-",
        "GiB",
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

"""Metrics of learning, policy and performance: formula, denominator and unit of each."""

from functools import partial

from rltrain.tracking.catalogue_metric import (
    AGGREGATED,
    GROUPS,
    HELD_OUT,
    LOSS_TOKENS,
    PARTS,
    SAMPLED_GROUPS,
    SCORED,
    SCORED_HELD_OUT,
    SEQUENCES,
    UPDATES,
    VALUED,
    VERDICTS,
    Metric,
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
        "reward/part/{reward_part}", f"mean of {PARTS}", f"{SCORED} and has that part", "reward"
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
    _evaluation(
        "eval/part/{reward_part}",
        f"mean of {PARTS}, greedy",
        f"{SCORED_HELD_OUT} and has that part",
        "reward",
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
    _policy(
        "policy/nonfinite_updates",
        "updates, of the critic too, left out because a loss, gradient norm or log-probability is "
        "NaN or infinite; with trainer.on_nonfinite=skip",
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


def _seconds(phase: str, work: str) -> Metric:
    return _performance(f"time/{phase}", work, "-", "s", better="lower")


PERFORMANCE = (
    _seconds(
        "generate", "waiting for responses; with trainer.max_staleness they may be there already"
    ),
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
    _seconds(
        "drain",
        "before a weight sync, waiting until no engine generates; with trainer.max_staleness",
    ),
    _seconds("weight_sync", "handing the weights to the engine"),
    _seconds("eval", "evaluation"),
    _seconds(
        "checkpoint",
        "saving; with checkpoint.asynchronous what a step waits for it, not what is written beside",
    ),
    _performance(
        "checkpoint/pending",
        "1 if a checkpoint was begun and is not there yet as the step ends; with "
        "checkpoint.asynchronous",
        "-",
    ),
    _performance(
        "checkpoint/skipped",
        "checkpoints of this run so far that were left out because a disk was full; in steps that "
        "are to begin or to end one, with checkpoint.on_full=skip",
        "-",
        better="lower",
    ),
    _seconds("other", "time/step less all phases"),
    _seconds("step", "the whole step, wall clock"),
    _performance(
        "weights/bytes", "bytes of the weights that a weight sync brings to an engine", "-", "bytes"
    ),
    _performance(
        "weights/bytes_between_nodes",
        "bytes of a weight sync that go from one node to another; the fewest possible: each stage "
        "once to every node with an engine and no rank of the stage (docs/weight-sync.md)",
        "-",
        "bytes",
        better="lower",
    ),
    _performance(
        "throughput/tokens_per_second",
        "prompt and response (in supervised runs: target) tokens / time/step",
        "time/step",
        "tokens/s",
        better="higher",
    ),
    _performance(
        "throughput/generated_tokens_per_second",
        "response tokens / rollout/generate_seconds",
        "rollout/generate_seconds",
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
        "throughput/trainer_idle_fraction",
        "(time/generate + time/reward + time/drain) / time/step: the policy waits for rollouts",
        "time/step",
        better="lower",
    ),
    _performance(
        "throughput/generate_over_bound",
        "seconds that decoding needs at the card's memory bandwidth and peak / "
        "rollout/generate_seconds; left out where dynamic sampling or over-sampling left responses "
        "out",
        "rollout/generate_seconds",
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

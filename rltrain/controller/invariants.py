"""What must hold in the first step of every run, where nothing has been learned yet.

The policy that is updated first is the one that was scored, so its ratios are 1; an identical
reference, scored with the same routing, is no distance away; and so on. Each is a few numbers that
the step has anyway. What a run cannot check, it says. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rltrain.algorithms.mismatch import mismatch_metrics
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.noise import Bound
from rltrain.data.packing import mini_batch_sizes
from rltrain.policy.types import Scored, Updated

RATIO_BOUND = {"fp32": 1e-5, "bf16": 0.1}
"""max |pi / pi_old - 1|. The update cuts its micro-batches otherwise than the pass before, so that
kernels sum in another order: noise of the parameters' dtype, of single tokens."""

REFERENCE_KL_BOUND = {"fp32": 1e-9, "bf16": 1e-4}
"""Mean k3 between two copies of one model in two passes alike."""

MISMATCH_BOUND = {"r3": 1.02, "native": 1.1, "dense": 1.05}
"""Mean exp |log pi_train - log pi_rollout|: what NeMo-RL gates its nightly runs with."""


@dataclass(frozen=True)
class Check:
    name: str
    found: str
    expected: str  # empty where nothing has to hold
    state: Literal["pass", "fail", "not checked"]


@dataclass(frozen=True)
class FirstStep:
    """What is known of a run's first step."""

    batch: Batch
    updates: Sequence[Updated]
    metrics: dict[str, float]
    is_fresh: bool  # not resumed, so that the reference is still the policy
    paired: Batch | None  # with ref_logprobs scored by the routing of old_logprobs
    native_losses: Sequence[str]  # of the router, that are on
    precision: Literal["fp32", "bf16"]
    vocab_size: int
    has_experts: bool


def check_first_step(first: FirstStep, config: Config) -> list[Check]:
    return [
        *_ratios(first, config),
        *_reference(first, config),
        _entropy(first),
        _mismatch(first, config),
        _losses(first.native_losses),
    ]


def check_first_supervised_step(
    batch: Batch,
    scored: Scored,
    updates: Sequence[Updated],
    mini_batches: int,
    native_losses: Sequence[str],
    bound: Bound,
) -> list[Check]:
    """The loss of the first update is that of a scoring pass over the same mini-batch.

    Args:
        scored: the whole batch before any update
        bound: of what the log-probability of a token may differ by between two such passes
    """
    first = mini_batch_sizes(batch.num_sequences, mini_batches)[0]
    num_tokens = int(batch.seq_lens[:first].sum())
    mask = batch.response_mask[:num_tokens]
    expected = -float(scored.logprobs[:num_tokens][mask].double().mean())
    found = updates[0].totals["nll"] / updates[0].totals["tokens"]
    holds = abs(found - expected) <= bound.half
    return [
        _check(
            "the first loss is that of a scoring pass",
            holds,
            f"{found:.6f} and {expected:.6f} nat",
            f"at most {bound.half:g} apart",
        ),
        _losses(native_losses),
    ]


def block(checks: Sequence[Check], step: int) -> str:
    """The checks as a table of text, the verdict last."""
    failed = sum(check.state == "fail" for check in checks)
    width = max(len(check.name) for check in checks)
    lines = [
        f"  {check.state.upper():<11}  {check.name:<{width}}  {check.found}"
        + (f" ({check.expected})" if check.expected else "")
        for check in checks
    ]
    verdict = f"{failed} FAILED" if failed else "all hold"
    return "\n".join([f"invariants of step {step}:", *lines, f"  {verdict}"])


def require(checks: Sequence[Check], step: int) -> None:
    """Raise ``RuntimeError``, naming what failed, unless nothing did."""
    if failed := [check.name for check in checks if check.state == "fail"]:
        raise RuntimeError(
            f"step {step} broke what must hold before anything is learned: {'; '.join(failed)}\n"
            f"{block(checks, step)}\nUpdate, scoring and rollout do not compute the same policy, "
            "or a loss of one's own has another ratio than theirs. Look there first; "
            "trainer.invariants=warn goes on regardless"
        )


def _ratios(first: FirstStep, config: Config) -> list[Check]:
    ratio, clipped = "ratio is 1 before the first update", "nothing is clipped in the first update"
    if config.algorithm.bypass_old_logprobs:
        why = "algorithm.bypass_old_logprobs=true: ratios span trainer and engine"
        return [_unchecked(ratio, why), _unchecked(clipped, why)]
    if not first.updates:
        why = "no token of this step is in the loss"
        return [_unchecked(ratio, why), _unchecked(clipped, why)]
    update, bound = first.updates[0], RATIO_BOUND[first.precision]
    off = max(abs(update.maxima["ratio_max"] - 1), abs(1 + update.maxima["ratio_min"]))
    checks = [
        _check(ratio, off <= bound, f"max |ratio - 1| = {off:.1e}", _most(bound, first.precision))
    ]
    stats = [total for name, total in update.totals.items() if name.startswith("stat/clip")]
    reach = min(config.algorithm.clip_low, config.algorithm.clip_high)
    if not stats or reach <= bound:
        why = f"clip range {reach:g} within the noise of {bound:g}" if stats else "no clip"
        return [*checks, _unchecked(clipped, why)]
    return [*checks, _check(clipped, sum(stats) == 0, f"{sum(stats):g} tokens", "0")]


def _reference(first: FirstStep, config: Config) -> list[Check]:
    name = "KL to an identical reference is 0"
    if config.algorithm.kl.coef == 0:
        return [_unchecked(name, "algorithm.kl.coef=0: no reference")]
    if not first.is_fresh or first.paired is None:
        return [_unchecked(name, "the run was resumed, or bypasses the pass to pair it with")]
    bound = REFERENCE_KL_BOUND[first.precision]
    kl = _k3(first.paired)
    checks = [_check(name, kl <= bound, f"mean k3 = {kl:.1e}", _most(bound, first.precision))]
    if first.paired.ref_logprobs is not first.batch.ref_logprobs:
        bias = _k3(first.batch)
        found = f"mean k3 = {bias:.1e}, of the native reference to the replayed policy"
        checks.append(_unchecked("routing bias of the reference", found))
    return checks


def _k3(batch: Batch) -> float:
    old, ref = batch.require("old_logprobs", "ref_logprobs")
    return mismatch_metrics(ref, old, batch.response_mask, batch.seq_lens, area="ref")["ref/k3"]


def _entropy(first: FirstStep) -> Check:
    name, limit = "entropy is in range", math.log(first.vocab_size)
    if not first.updates:
        return _unchecked(name, "no token of this step is in the loss")
    mean = first.metrics["policy/entropy"]
    most = first.metrics["policy/entropy_max"]
    fits = 0 <= mean <= most <= limit * (1 + 1e-5)
    found = f"mean {mean:.3g}, max {most:.3g} nat"
    return _check(name, fits, found, f"0 to log V = {limit:.3g}")


def _mismatch(first: FirstStep, config: Config) -> Check:
    name = "trainer and engine agree"
    if "mismatch/mult_prob_error" not in first.metrics:
        return _unchecked(name, "the pass that measures it was bypassed")
    kind = "r3" if config.routing_replay.mode == "r3" else "native"
    bound = MISMATCH_BOUND[kind if first.has_experts else "dense"]
    error = first.metrics["mismatch/mult_prob_error"]
    return _check(name, error <= bound, f"E[exp |d|] = {error:.5f}", f"at most {bound:g}")


def _losses(native_losses: Sequence[str]) -> Check:
    """Turning one on is allowed; it has to be seen."""
    found = ", ".join(native_losses) or "none"
    return Check("router losses and bias updates", found, "off, or named", "pass")


def _check(name: str, holds: bool, found: str, expected: str) -> Check:
    return Check(name, found, expected, "pass" if holds else "fail")


def _unchecked(name: str, why: str) -> Check:
    return Check(name, why, "", "not checked")


def _most(bound: float, precision: str) -> str:
    return f"at most {bound:g} in {precision}"

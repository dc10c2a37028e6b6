"""What must hold in the first step of every run, where nothing has been learned yet.

The policy that is updated first is the one that was scored, so its ratios are 1; an identical
reference, scored with the same routing, is no distance away; and so on. Each is a few numbers that
the step has anyway. What a run cannot check, it says. Pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rltrain.algorithms.mismatch import mismatch_metrics
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.checks.precision_bounds import (
    Bound,
    Precision,
    bound_for,
    coarsest,
    count_above,
    is_more_than,
)
from rltrain.data.packing import mini_batch_sizes
from rltrain.policy.types import Scored, Updated


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
    scored: Tensor | None  # the trainer's log-probabilities before the updates  # [N]
    is_fresh: bool  # not resumed, so that the reference is still the policy
    paired: Batch | None  # with ref_logprobs scored by the routing of old_logprobs
    native_losses: Sequence[str]  # of the router, that are on
    precision: Precision  # of the trainer
    engine_precision: Precision
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
    first_loss = updates[0].totals["nll"] / updates[0].totals["tokens"]
    holds = abs(first_loss - expected) <= bound.half
    return [
        _check(
            "the first loss is that of a scoring pass",
            holds,
            f"{first_loss:.6f} and {expected:.6f} nat",
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
            " [RL5001]"
        )


def _ratios(first: FirstStep, config: Config) -> list[Check]:
    ratio, clipped = "ratio is 1 before the first update", "nothing is clipped in the first update"
    if config.algorithm.bypass_old_logprobs:
        why = "algorithm.bypass_old_logprobs=true: ratios span trainer and engine"
        return [_unchecked(ratio, why), _unchecked(clipped, why)]
    if not first.updates:
        why = "no token of this step is in the loss"
        return [_unchecked(ratio, why), _unchecked(clipped, why)]
    totals = first.updates[0].totals
    bound = _bound(first, first.precision, replays=config.routing_replay.mode != "off")
    num_tokens = int(totals["tokens"])
    checks = [
        _within(ratio, bound, lambda x: totals[f"ratio_beyond/{x:g}"], num_tokens, "|log ratio|")
    ]
    stats = [total for name, total in totals.items() if name.startswith("stat/clip")]
    low, high = config.algorithm.clip_low, config.algorithm.clip_high
    reach = min(math.inf if low == 1 else -math.log1p(-low), math.log1p(high))
    if not stats or reach <= bound.tail:
        why = f"clip range {reach:g} within the noise of {bound.tail:g}" if stats else "no clip"
        return [*checks, _unchecked(clipped, why)]
    most = f"at most {100 * bound.tail_share:g} % and chance"
    holds = not is_more_than(bound.tail_share, sum(stats), num_tokens)
    return [*checks, _check(clipped, holds, f"{sum(stats):g} of {num_tokens} tokens", most)]


def _reference(first: FirstStep, config: Config) -> list[Check]:
    name = "an identical reference is no distance away"
    if config.algorithm.kl.coef == 0:
        return [_unchecked(name, "algorithm.kl.coef=0: no reference")]
    if not first.is_fresh or first.paired is None:
        return [_unchecked(name, "the run was resumed, or bypasses the pass to pair it with")]
    bound = _bound(first, first.precision, replays=config.routing_replay.mode == "r3")
    distances = _distances(first.paired, *first.paired.require("old_logprobs", "ref_logprobs"))
    checks = [_within(name, bound, count_above(distances), len(distances), "|log ratio|")]
    if first.paired.ref_logprobs is not first.batch.ref_logprobs:
        bias = _k3(first.batch)
        bias_text = f"mean k3 = {bias:.1e}, of the native reference to the replayed policy"
        checks.append(_unchecked("routing bias of the reference", bias_text))
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
    rounding = 1e-5 * limit  # of sums over the vocabulary, and over tokens of one entropy
    fits = -rounding <= mean <= most + rounding <= limit + 2 * rounding
    values = f"mean {mean:.3g}, max {most:.3g} nat"
    return _check(name, fits, values, f"0 to log V = {limit:.3g}")


def _mismatch(first: FirstStep, config: Config) -> Check:
    name = "trainer and engine agree"
    if first.scored is None:
        return _unchecked(name, "the pass that measures it was bypassed")
    (rollout,) = first.batch.require("rollout_logprobs")
    distances = _distances(first.batch, first.scored, rollout)
    precision = coarsest(first.precision, first.engine_precision)
    bound = _bound(first, precision, replays=config.routing_replay.mode == "r3")
    return _within(name, bound, count_above(distances), len(distances), "|d|")


def _bound(first: FirstStep, precision: Precision, *, replays: bool) -> Bound:
    return bound_for(precision, same_experts=replays or not first.has_experts)


def _distances(batch: Batch, logprobs: Tensor, others: Tensor) -> Tensor:
    """Of the response tokens.  # [n]"""
    return (logprobs - others)[batch.response_mask].abs()


def _within(
    name: str, bound: Bound, above: Callable[[float], float], num_tokens: int, quantity: str
) -> Check:
    shares = (f"{100 * above(x) / max(1, num_tokens):.2g} % above {x:g}" for x in bound.distances)
    shares_text = f"{quantity} of {num_tokens} tokens: {', '.join(shares)}"
    return _check(name, bound.holds(above, num_tokens), shares_text, f"{bound}, and chance")


def _losses(native_losses: Sequence[str]) -> Check:
    """Turning one on is allowed; it has to be seen."""
    names = ", ".join(native_losses) or "none"
    return Check("router losses and bias updates", names, "off, or named", "pass")


def _check(name: str, holds: bool, found: str, expected: str) -> Check:
    return Check(name, found, expected, "pass" if holds else "fail")


def _unchecked(name: str, why: str) -> Check:
    return Check(name, why, "", "not checked")

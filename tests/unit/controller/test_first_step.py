"""Each invariant of a first step holds where it should, and fails where its number is broken."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rltrain.algorithms.objective import RATIO_STEPS
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.checks.first_step import (
    Check,
    FirstStep,
    block,
    check_first_step,
    check_first_supervised_step,
    require,
)
from rltrain.controller.checks.precision_bounds import bound_for
from rltrain.policy.types import Scored, Updated

RATIO, CLIPPED = "ratio is 1 before the first update", "nothing is clipped in the first update"
REFERENCE, BIAS = "an identical reference is no distance away", "routing bias of the reference"
ENTROPY, MISMATCH = "entropy is in range", "trainer and engine agree"
TOKENS = 1000


def batch(shift: float = 0.0) -> Batch:
    """One prompt token, and a response whose reference and rollout are ``shift`` away."""
    old = -torch.linspace(0, 4, TOKENS + 1)
    mask = torch.ones(TOKENS + 1, dtype=torch.bool)
    mask[0] = False
    return Batch(
        tokens=torch.zeros(TOKENS + 1, dtype=torch.int64),
        seq_lens=torch.tensor([TOKENS + 1]),
        response_mask=mask,
        old_logprobs=old,
        ref_logprobs=torch.where(mask, old + shift, torch.nan),
        rollout_logprobs=torch.where(mask, old - shift, torch.nan),
    )


def update(beyond: dict[float, int] | None = None, clipped: float = 0.0) -> Updated:
    """Args: how many tokens have a log ratio beyond a distance; those farther are within it too."""
    found = {
        f"ratio_beyond/{x:g}": float(max([n for at, n in (beyond or {}).items() if at >= x] or [0]))
        for x in RATIO_STEPS
    }
    stats = {"stat/clip_fraction_low": 0.0, "stat/clip_fraction_high": clipped}
    return Updated(totals={"tokens": float(TOKENS)} | found | stats, maxima={}, grad_norm=1, lr=1)


ALL = {2.0: TOKENS}
GOOD = FirstStep(
    batch=batch(),
    updates=[update(), update(ALL, clipped=500)],  # only the first is judged
    metrics={"policy/entropy": 0.5, "policy/entropy_max": 1.0},
    scored=batch().old_logprobs,
    is_fresh=True,
    paired=batch(),
    native_losses=[],
    precision="fp32",
    engine_precision="fp32",
    vocab_size=50,
    has_experts=True,
)


def states(first: FirstStep, algorithm: dict[str, Any] | None = None, **run: Any) -> dict[str, str]:
    values = {"algorithm": {"kl": {"coef": 0.1}} | (algorithm or {})}
    rest = {"routing_replay": {"mode": "r3"}}
    config = Config.model_validate(values | rest | run)
    return {check.name: check.state for check in check_first_step(first, config)}


def test_a_sound_step_passes_all() -> None:
    found = states(GOOD)
    for name in (RATIO, CLIPPED, REFERENCE, ENTROPY, MISMATCH):
        assert found[name] == "pass"


BROKEN = [
    ({"updates": [update({1e-4: 700})]}, RATIO),  # more than half are a little off
    ({"updates": [update({2.0: 20})]}, RATIO),  # more than a thousandth are far off
    ({"updates": [update(clipped=20)]}, CLIPPED),
    ({"paired": batch(shift=2e-4)}, REFERENCE),
    ({"scored": batch().old_logprobs + 2e-4}, MISMATCH),
    ({"scored": batch().old_logprobs * 0.7}, MISMATCH),
    ({"scored": torch.full((TOKENS + 1,), torch.nan)}, MISMATCH),
    ({"metrics": GOOD.metrics | {"policy/entropy_max": 4.0}}, ENTROPY),
    ({"metrics": GOOD.metrics | {"policy/entropy": -0.1}}, ENTROPY),
    ({"metrics": GOOD.metrics | {"policy/entropy": 1.1}}, ENTROPY),
    ({"metrics": GOOD.metrics | {"policy/entropy": float("nan")}}, ENTROPY),
]


@pytest.mark.parametrize(("broken", "name"), BROKEN)
def test_a_broken_number_fails_its_check_alone(broken: dict[str, Any], name: str) -> None:
    found = states(replace(GOOD, **broken))
    assert found[name] == "fail"
    assert sum(state == "fail" for state in found.values()) == 1


def test_no_single_token_fails_a_run() -> None:
    """Nor the rounding of an entropy: of a model that is sure of everything, or of nothing."""
    one = {"policy/entropy": -1e-8, "policy/entropy_max": 0.0}
    hopeless = GOOD.batch.old_logprobs.clone()  # type: ignore[union-attr]
    hopeless[5] -= 20
    lone = replace(GOOD, updates=[update({2.0: 1}, clipped=1)], metrics=one, scored=hopeless)
    assert "fail" not in states(lone).values()
    flat = {"policy/entropy": math.log(50) + 1e-6, "policy/entropy_max": math.log(50)}
    assert states(replace(GOOD, metrics=flat))[ENTROPY] == "pass"


R3, OFF = {"routing_replay": {"mode": "r3"}}, {"routing_replay": {"mode": "off"}}
R2 = {"routing_replay": {"mode": "r2"}}


def test_the_bound_is_that_of_precision_and_routing() -> None:
    """An update replays in R2, too; the engine and the reference are scored natively there."""
    noisy = replace(GOOD, precision="bf16", updates=[update({0.1: 40})])
    tail = (RATIO, REFERENCE, MISMATCH)
    assert [states(noisy, **mode)[RATIO] for mode in (R3, R2, OFF)] == ["fail", "fail", "pass"]
    assert states(replace(noisy, has_experts=False), **OFF)[RATIO] == "fail"
    assert states(replace(noisy, precision="fp8"), **R3)[RATIO] == "pass"
    apart = replace(GOOD, precision="bf16", paired=batch(0.02), batch=batch(0.02))
    for mode, state in ((R3, "fail"), (R2, "pass"), (OFF, "pass")):
        assert [states(apart, **mode)[name] for name in tail] == ["pass", state, state]
    tight = {"clip_low": 3e-4, "clip_high": 4e-4}  # GSPO's, within the noise of a token
    assert states(noisy, tight)[CLIPPED] == "not checked"


def test_an_fp8_engine_is_allowed_its_noise_and_the_trainers_update_is_not() -> None:
    """k3 of 1.7e-3, as measured: |d| of 0.058 and E[exp |d|] of 1.06."""
    bf16 = replace(GOOD, precision="bf16", batch=batch(0.058), paired=batch())
    fp8 = replace(bf16, engine_precision="fp8")
    assert [states(first)[MISMATCH] for first in (bf16, fp8)] == ["fail", "pass"]
    assert states(replace(fp8, updates=[update({0.1: 40})]))[RATIO] == "fail"
    assert states(replace(fp8, batch=batch(0.15)))[MISMATCH] == "fail"


def test_the_bias_of_a_native_reference_is_told() -> None:
    """Scored with the policy's routes it is no distance away; as it is used, natively, it is."""
    biased = GOOD.batch.with_fields(ref_logprobs=batch(1e-2).ref_logprobs)
    found = states(replace(GOOD, batch=biased))
    assert (found[REFERENCE], found[BIAS]) == ("pass", "not checked")
    same = batch()
    later = same.with_fields(advantages=torch.zeros(TOKENS + 1))
    assert BIAS not in states(replace(GOOD, batch=later, paired=same))


def test_what_cannot_be_checked_is_said() -> None:
    bypassed = replace(GOOD, paired=None, scored=None)
    found = states(bypassed, {"bypass_old_logprobs": True})
    assert {name for name, state in found.items() if state == "not checked"} == {
        RATIO,
        CLIPPED,
        REFERENCE,
        MISMATCH,
    }
    assert states(replace(GOOD, is_fresh=False))[REFERENCE] == "not checked"
    assert states(replace(GOOD, updates=[]))[RATIO] == "not checked"


@pytest.mark.parametrize(("apart", "state"), [(0.0, "pass"), (5e-5, "pass"), (2e-4, "fail")])
def test_a_supervised_step_starts_from_the_loss_of_a_scoring_pass(apart: float, state: str) -> None:
    """Of its first mini-batch, token by token, whatever the aggregation makes of them."""
    batch = Batch(
        tokens=torch.arange(7),
        seq_lens=torch.tensor([2, 3, 2]),
        response_mask=torch.tensor([0, 1, 0, 1, 1, 0, 1]).bool(),
        loss_weights=torch.tensor([0, 0.9, 0, 0.1, 0.1, 0, 0.4]),
    )
    logprobs = -torch.tensor([9.0, 1, 9, 2, 6, 9, 100])
    totals = {"loss": 7.0, "nll": 9.0 + 3 * apart, "tokens": 3.0}
    updates = [Updated(totals, {}, 1.0, 1.0), Updated({"nll": 0.0, "tokens": 1.0}, {}, 1.0, 1.0)]
    bound = bound_for("fp32", same_experts=True)
    check, losses = check_first_supervised_step(
        batch, Scored(logprobs, None), updates, 2, ["aux=1"], bound
    )
    assert check.state == state
    assert (losses.found, losses.state) == ("aux=1", "pass")


def test_the_block_reads_as_a_verdict() -> None:
    checks = [Check("a", "1", "1", "pass"), Check("bc", "3", "at most 2", "fail")]
    checks.append(Check("d", "no reference", "", "not checked"))
    assert block(checks, 1).splitlines() == [
        "invariants of step 1:",
        "  PASS         a   1 (1)",
        "  FAIL         bc  3 (at most 2)",
        "  NOT CHECKED  d   no reference",
        "  1 FAILED",
    ]
    assert block(checks[:1], 1).endswith("all hold")
    require(checks[:1], 1)
    with pytest.raises(RuntimeError, match=r"(?s)learned: bc\n.*trainer\.invariants=warn"):
        require(checks, 1)

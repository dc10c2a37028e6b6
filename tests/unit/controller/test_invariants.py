"""Each invariant of a first step holds where it should, and fails where its number is broken."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.invariants import Check, FirstStep, block, check_first_step, require
from rltrain.policy.types import Updated

RATIO, CLIPPED = "ratio is 1 before the first update", "nothing is clipped in the first update"
REFERENCE, BIAS = "KL to an identical reference is 0", "routing bias of the reference"
ENTROPY, MISMATCH = "entropy is in range", "trainer and engine agree"


def batch(shift: float = 0.0) -> Batch:
    old = torch.tensor([0.0, -1.0, -2.0])
    return Batch(
        tokens=torch.tensor([1, 2, 3]),
        seq_lens=torch.tensor([3]),
        response_mask=torch.tensor([False, True, True]),
        old_logprobs=old,
        ref_logprobs=old + shift,
    )


def update(ratio_max: float = 1.0, ratio_min: float = 1.0, clipped: float = 0.0) -> Updated:
    return Updated(
        totals={"stat/clip_fraction_low": 0.0, "stat/clip_fraction_high": clipped, "tokens": 2.0},
        maxima={"ratio_max": ratio_max, "ratio_min": -ratio_min},
        grad_norm=1.0,
        lr=1e-4,
    )


GOOD = FirstStep(
    batch=batch(),
    updates=[update(), update(ratio_max=3.0, clipped=5.0)],  # only the first is judged
    metrics={
        "policy/entropy": 0.5,
        "policy/entropy_max": 1.0,
        "mismatch/mult_prob_error": 1.001,
    },
    is_fresh=True,
    paired=batch(),
    native_losses=[],
    precision="fp32",
    vocab_size=50,
    has_experts=True,
)


def states(first: FirstStep, algorithm: dict[str, Any] | None = None) -> dict[str, str]:
    values = {"algorithm": {"kl": {"coef": 0.1}} | (algorithm or {})}
    config = Config.model_validate(values | {"routing_replay": {"mode": "r3"}})
    return {check.name: check.state for check in check_first_step(first, config)}


def test_a_sound_step_passes_all() -> None:
    found = states(GOOD)
    for name in (RATIO, CLIPPED, REFERENCE, ENTROPY, MISMATCH):
        assert found[name] == "pass"


BROKEN = [
    ({"updates": [update(ratio_max=1.0001)]}, RATIO),
    ({"updates": [update(ratio_min=0.9999)]}, RATIO),
    ({"updates": [update(clipped=1.0)]}, CLIPPED),
    ({"paired": batch(shift=1e-3)}, REFERENCE),
    ({"metrics": GOOD.metrics | {"policy/entropy_max": 4.0}}, ENTROPY),
    ({"metrics": GOOD.metrics | {"policy/entropy": -0.1}}, ENTROPY),
    ({"metrics": GOOD.metrics | {"policy/entropy": float("nan")}}, ENTROPY),
    ({"metrics": GOOD.metrics | {"mismatch/mult_prob_error": 1.03}}, MISMATCH),
]


@pytest.mark.parametrize(("broken", "name"), BROKEN)
def test_a_broken_number_fails_its_check_alone(broken: dict[str, Any], name: str) -> None:
    found = states(replace(GOOD, **broken))
    assert found[name] == "fail"
    assert sum(state == "fail" for state in found.values()) == 1


def test_bf16_is_allowed_its_noise() -> None:
    noisy = replace(GOOD, precision="bf16", updates=[update(1.04, 0.97)])
    assert states(noisy)[RATIO] == "pass"
    assert states(replace(noisy, updates=[update(1.3)]))[RATIO] == "fail"
    tight = {"clip_low": 3e-4, "clip_high": 4e-4}  # GSPO's, within the noise of a token
    assert states(noisy, tight)[CLIPPED] == "not checked"


def test_the_bias_of_a_native_reference_is_told() -> None:
    """Scored with the policy's routes it is no distance away; as it is used, natively, it is."""
    found = states(replace(GOOD, batch=batch(shift=1e-2)))
    assert (found[REFERENCE], found[BIAS]) == ("pass", "not checked")
    same = batch()
    later = same.with_fields(advantages=torch.zeros(3))
    assert BIAS not in states(replace(GOOD, batch=later, paired=same))


def test_what_cannot_be_checked_is_said() -> None:
    bypassed = replace(GOOD, paired=None, metrics={"policy/entropy": 0.5, "policy/entropy_max": 1})
    found = states(bypassed, {"bypass_old_logprobs": True})
    assert {name for name, state in found.items() if state == "not checked"} == {
        RATIO,
        CLIPPED,
        REFERENCE,
        MISMATCH,
    }
    assert states(replace(GOOD, is_fresh=False))[REFERENCE] == "not checked"
    assert states(replace(GOOD, updates=[]))[RATIO] == "not checked"


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

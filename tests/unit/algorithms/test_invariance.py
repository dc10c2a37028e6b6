"""Loss, gradient and sums do not depend on how a mini-batch is cut, ordered, padded or shared out.

On tensors: this test does the work of every rank, slot by slot, and adds it up. The tests of
`rltrain.policy` check that real ranks hold these slots.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.correction import correct
from rltrain.algorithms.mismatch import mismatch_metrics
from rltrain.algorithms.objective import Targets, policy_objective, value_objective
from rltrain.config.algorithm import AlgorithmConfig, CorrectionConfig
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import Ragged, ragged
from tests.unit.algorithms.test_losses import mean_over

PAD = -1
Slots = Sequence[Sequence[int]]  # the token in each slot of each micro-batch of each rank


def whole(batch: Ragged, draw: st.DataObject) -> Slots:
    return [range(len(batch.mask))]


def micro_batches(batch: Ragged, draw: st.DataObject) -> Slots:
    """One sequence or more each."""
    cuts = draw.draw(st.lists(st.sampled_from([False, True]), min_size=len(batch.seq_lens)))
    slots: list[list[int]] = [[]]
    for own, cut in zip(spans(batch), cuts, strict=False):
        slots[-1] += own
        slots += [[]] if cut else []
    return [own for own in slots if own]


def reordered(batch: Ragged, draw: st.DataObject) -> Slots:
    return [[t for own in draw.draw(st.permutations(spans(batch))) for t in own]]


def padded(batch: Ragged, draw: st.DataObject) -> Slots:
    """Slots of no token around the sequences, and a micro-batch of nothing else."""
    counts = draw.draw(st.lists(st.integers(0, 2), min_size=9, max_size=9))
    slots = [PAD] * counts[-1]
    for own, count in zip(spans(batch), counts, strict=False):
        slots += own + [PAD] * count
    return [slots, [PAD, PAD]]


def context_parallel(batch: Ragged, draw: st.DataObject) -> Slots:
    """Rank r of 2 holds the chunks r and 3 - r of every sequence's four."""
    ranks: list[list[int]] = [[], []]
    for own in spans(batch):
        chunks = [chunk.tolist() for chunk in np.array_split(own, 4)]
        ranks[0] += chunks[0] + chunks[3]
        ranks[1] += chunks[1] + chunks[2] + [PAD]
    return ranks


def spans(batch: Ragged) -> list[list[int]]:
    ends = np.cumsum(batch.seq_lens).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, batch.seq_lens, strict=True)]


def take(values: torch.Tensor, slots: Sequence[int], pad: float = math.nan) -> torch.Tensor:
    """Of the tokens in the slots; NaN where there is none."""
    index = torch.tensor(slots)
    return torch.where(index == PAD, pad, values[index.clamp_min(0)])


def policy_sums(batch: Ragged, slots: Slots, name: str) -> dict[str, torch.Tensor]:
    config = AlgorithmConfig(
        loss=name,
        dual_clip=1.5 if name == "ppo" else None,
        entropy_coef=0.1,
        kl={"coef": 0.3},  # type: ignore[arg-type]
    )
    logprobs = torch.tensor(batch.logprobs(1), requires_grad=True)
    entropy = torch.tensor(-batch.logprobs(2), requires_grad=True)
    old = torch.tensor(batch.logprobs(1) + batch.noise(3, 0.5))
    weights = torch.tensor(reference.weights(batch, "sequence_mean_token_mean", 7))
    rest = [torch.tensor(x) for x in (batch.noise(4), batch.logprobs(5), abs(batch.noise(6)))]
    log_ratio = (logprobs - old).detach()

    sums: dict[str, torch.Tensor] = {}
    for own in slots:

        def sequence_mean(values: torch.Tensor, own: Sequence[int] = own) -> torch.Tensor:
            masked = take(batch.loss_mask.double(), own, 0.0) != 0
            torch.testing.assert_close(values[masked], take(log_ratio, own)[masked])
            return take(mean_over(batch)(log_ratio), own, 0.0)

        advantages, ref, correction = (take(x, own) for x in rest)
        targets = Targets(take(old, own), advantages, take(weights, own, 0.0), ref, correction)
        loss, found = policy_objective(
            take(logprobs, own),
            take(entropy, own),
            targets,
            sequence_mean=sequence_mean,
            config=config,
            kl_coef=0.3,
        )
        loss.backward()
        for key, value in found.totals.items():
            sums[key] = sums.get(key, torch.zeros(())) + value
        for key, value in found.maxima.items():
            sums[key] = torch.maximum(sums.get(key, torch.tensor(-math.inf)), value)
    assert logprobs.grad is not None and entropy.grad is not None
    return sums | {"gradient": logprobs.grad, "entropy gradient": entropy.grad}


def value_sums(batch: Ragged, slots: Slots) -> dict[str, torch.Tensor]:
    values = torch.tensor(batch.noise(1), requires_grad=True)
    old, returns = torch.tensor(batch.noise(2)), torch.tensor(batch.noise(3))
    weights = torch.tensor(reference.weights(batch, "token_mean", 7))
    sums: dict[str, torch.Tensor] = {}
    for own in slots:
        loss, found = value_objective(
            take(values, own),
            old_values=take(old, own),
            returns=take(returns, own),
            weights=take(weights, own, 0.0),
            clip=0.2,
        )
        loss.backward()
        for key, value in found.totals.items():
            sums[key] = sums.get(key, torch.zeros(())) + value
    assert values.grad is not None
    return sums | {"gradient": values.grad}


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "pg", "value"])
@pytest.mark.parametrize("shared_out", [micro_batches, reordered, padded, context_parallel])
@settings(max_examples=15)
@given(batch=ragged(), draw=st.data())
def test_sums_and_gradients_are_those_of_the_whole(shared_out, name, batch, draw) -> None:
    slots = [own for own in shared_out(batch, draw) if own]
    compute = value_sums if name == "value" else lambda b, s: policy_sums(b, s, name)
    expected, found = compute(batch, whole(batch, draw)), compute(batch, slots)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key],
            value,
            rtol=1e-5,
            atol=1e-7,
            check_dtype=False,
            msg=lambda m, k=key: f"{k}: {m}",
        )


@settings(max_examples=40)
@given(batch=ragged().filter(lambda b: any(b.mask)), draw=st.data())
def test_mismatch_and_correction_do_not_depend_on_the_order(batch, draw) -> None:
    order = draw.draw(st.permutations(range(len(batch.seq_lens))))
    moved, index = batch.select(list(order))
    pair = torch.tensor(batch.logprobs(1)), torch.tensor(batch.logprobs(2))
    there = [x[index] for x in pair]

    metrics = mismatch_metrics(*pair, batch.loss_mask, batch.lens)
    metrics_there = mismatch_metrics(*there, moved.loss_mask, moved.lens)
    worst = int(metrics_there.pop("mismatch/worst_sequence"))
    assert order[worst] == metrics.pop("mismatch/worst_sequence")
    assert metrics_there == pytest.approx(metrics, rel=1e-9, abs=1e-9)

    config = CorrectionConfig(weight="sequence", normalize=True, reject="geometric", veto=0.1)
    found = correct(*pair, batch.loss_mask, batch.lens, config)
    found_there = correct(*there, moved.loss_mask, moved.lens, config)
    torch.testing.assert_close(found_there.weights, found.weights[index])
    assert torch.equal(found_there.mask, found.mask[index])
    assert found_there.metrics == pytest.approx(found.metrics, rel=1e-9, abs=1e-12)

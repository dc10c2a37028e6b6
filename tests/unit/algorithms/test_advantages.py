"""Advantages against the papers' formulas written out in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import ADVANTAGES, find_advantage
from rltrain.algorithms.advantages.advantage_inputs import AdvantageInputs, Advantages
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import RARE, Ragged, ragged, rare

GAMMA, LAM = 0.9, 0.7


def inputs(batch: Ragged, **changes: object) -> AdvantageInputs:
    given = AdvantageInputs(
        rewards=torch.tensor(batch.rewards),
        token_rewards=torch.tensor(batch.token_rewards),
        seq_lens=batch.lens,
        group_ids=torch.tensor(batch.groups),
        mask=batch.loss_mask,
        values=torch.tensor(batch.noise(1)),
        gamma=GAMMA,
        lam=LAM,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def estimate(name: str, batch: Ragged, **changes: object) -> Advantages:
    return find_advantage(name).estimate(inputs(batch, **changes))


def close(found: torch.Tensor | None, expected: np.ndarray) -> None:
    assert found is not None and found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("penalties", [0.0, 0.3], ids=["reward", "reward and penalties"])
@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=ragged())
@rare
def test_equals_the_formula(name: str, penalties: float, batch: Ragged) -> None:
    rewards = batch.token_rewards + penalties * batch.noise(2)
    found = estimate(name, batch, token_rewards=torch.tensor(rewards))
    if name == "gae":
        values = batch.noise(1)
        expected = reference.gae(batch, rewards, values, GAMMA, LAM)
        close(found.returns, np.where(batch.mask, expected + values, 0.0))
        expected = reference.whitened(batch, expected)
    elif name == "reinforce_pp":
        expected = reference.whitened(batch, reference.returns_to_go(batch, rewards, GAMMA))
    else:
        expected = reference.group_advantages(batch, rewards, name)
        if name == "reinforce_pp_baseline":
            expected = reference.whitened(batch, expected)
    close(found.advantages, expected)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(batch=ragged(), garbage=st.sampled_from([math.nan, math.inf, 1e30]))
def test_what_is_off_the_mask_is_not_read_and_gets_zero(
    name: str, batch: Ragged, garbage: float
) -> None:
    def spoiled(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.where(batch.mask, values, garbage))

    found = estimate(
        name,
        batch,
        token_rewards=spoiled(batch.token_rewards),
        values=spoiled(batch.noise(1)),
    )
    expected = estimate(name, batch)
    assert torch.equal(found.advantages, expected.advantages)
    assert (found.advantages[~batch.loss_mask] == 0).all()
    if found.returns is not None and expected.returns is not None:
        assert torch.equal(found.returns, expected.returns)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(batch=ragged(), seed=st.integers(0, 1000))
def test_the_order_of_sequences_does_not_matter(name: str, batch: Ragged, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(batch.seq_lens)).tolist()
    moved, index = batch.select(order)
    values = torch.tensor(batch.noise(1))
    expected = estimate(name, batch, values=values).advantages[index]
    found = estimate(name, moved, values=values[index]).advantages
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "gae"])
@settings(max_examples=25)
@given(
    size=st.integers(1, 8),
    reward=st.floats(-1e3, 1e3),
    lens=st.lists(st.integers(1, 5), min_size=8, max_size=8),
)
@example(size=3, reward=0.1, lens=[2, 1, 3])
def test_equal_rewards_have_nothing_to_teach(
    name: str, size: int, reward: float, lens: list[int]
) -> None:
    """Exactly: no rounding of a mean is blown up by a division by its own size."""
    n = sum(lens[:size])
    batch = Ragged(tuple(lens[:size]), (True,) * n, (0,) * size, (reward,) * size)
    assert (estimate(name, batch, gamma=1.0).advantages == 0).all()


def test_values_that_are_right_leave_no_advantage() -> None:
    """V = R everywhere, gamma 1: every delta is 0, and so is what whitening makes of them."""
    batch = Ragged((3, 2), (False, True, True, True, True), (0, 1), (0.7, 0.7))
    found = estimate(
        "gae", batch, values=torch.full((5,), 0.7, dtype=torch.float64), gamma=1.0, lam=0.95
    )
    assert (found.advantages == 0).all()
    close(found.returns, np.array([0.0, 0.7, 0.7, 0.7, 0.7]))


def test_a_group_is_its_id_wherever_it_lies() -> None:
    batch = Ragged((1, 1, 1, 1), (True,) * 4, (9, 2, 9, 2), (1.0, 0.0, 0.0, 1.0))
    assert estimate("dr_grpo", batch).advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert estimate("rloo", batch).advantages.tolist() == [1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["rewards", "token_rewards", "values"])
def test_a_number_that_is_none_is_refused_by_sequence(name: str, bad: float) -> None:
    batch = RARE["equal rewards"]
    good = getattr(inputs(batch), name)
    place = 1 if name == "rewards" else 3  # of token 1 of sequence 1
    spoiled = good.clone().index_fill_(0, torch.tensor(place), bad)
    with pytest.raises(ValueError, match=rf"^{name}: .*sequence 1 has -?(nan|inf)"):
        inputs(batch, **{name: spoiled})


def test_which_need_a_group_and_which_a_critic() -> None:
    compares = {name for name, entry in ADVANTAGES.items() if entry.compares}
    assert compares == {"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"}
    assert {name for name, entry in ADVANTAGES.items() if entry.needs_values} == {"gae"}

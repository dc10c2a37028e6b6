"""Group advantages against the formula written out in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.advantages import group_advantages, over_tokens


def reference(rewards: list[float], groups: list[int], normalize: bool) -> np.ndarray:
    """arXiv:2402.03300, section 4.1.2, one group at a time."""
    r, g = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    out = np.zeros(len(r))
    for name in set(groups):
        own = r[g == name]
        out[g == name] = own - own.mean()
        if normalize:
            std = own.std(ddof=1) if len(own) > 1 else 0.0
            out[g == name] /= std + 1e-6
    return out


# Rewards as reward functions give them: coarse, so that ties are common.
scored = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, -1.0, 3.0])),
    min_size=1,
    max_size=40,
)


@given(scored, st.booleans())
def test_equals_the_formula(pairs: list[tuple[int, float]], normalize: bool) -> None:
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    found = group_advantages(
        torch.tensor(rewards), torch.tensor(groups), normalize_by_std=normalize
    )
    np.testing.assert_allclose(
        found.numpy(), reference(rewards, groups, normalize), rtol=1e-5, atol=1e-6
    )


@given(st.integers(1, 8), st.floats(-1e3, 1e3))
def test_equal_rewards_have_nothing_to_teach(size: int, reward: float) -> None:
    rewards = torch.full((size,), reward)
    found = group_advantages(rewards, torch.zeros(size, dtype=torch.int64), normalize_by_std=True)
    assert (found == 0).all()


def test_group_ids_need_not_be_contiguous_or_sorted() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([9, 2, 9, 2])
    found = group_advantages(rewards, groups, normalize_by_std=False)
    assert found.tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_place(bad: float) -> None:
    with pytest.raises(ValueError, match="sequence 1 has reward"):
        group_advantages(torch.tensor([0.0, bad]), torch.tensor([0, 0]), normalize_by_std=True)


def test_over_tokens_reaches_masked_tokens_only() -> None:
    mask = torch.tensor([False, True, True, False, True])
    found = over_tokens(torch.tensor([2.0, -3.0]), torch.tensor([3, 2]), mask)
    assert found.tolist() == [0.0, 2.0, 2.0, 0.0, -3.0]

"""What missing rows cost, by the definition."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.config.routing import Fallback
from rltrain.routing.fallback import (
    batch_share,
    check_budget,
    missing_rows,
    sample_shares,
    surviving_tokens,
)

SEQUENCES = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5)
POLICIES = st.sampled_from(["live", "r2", "drop"])


def laid_out(sequences: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    """route_mask [N] and seq_lens [B]."""
    return torch.tensor([m for mask in sequences for m in mask]), torch.tensor(
        [len(s) for s in sequences]
    )


@given(SEQUENCES, POLICIES, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
@example([[True, False, True, True], [True, True]], "drop", 0.5)
@example([[True, True, False, False], [True, True]], "drop", 0.5)  # spills into the next
@example([[False], [True], [False]], "drop", 0.0)  # nothing is owed
@example([[False, False, True], [True, True, False]], "r2", 0.5)
def test_tokens_survive_by_the_rules(
    sequences: list[list[bool]], fallback: Fallback, max_share: float
) -> None:
    route_mask, lens = laid_out(sequences)
    missing = missing_rows(route_mask, lens)
    expected_missing, expected = [], []
    for mask in sequences:
        lost = [not m for m in mask[:-1]] + [False]
        whole = sum(lost) > max_share * (len(mask) - 1)
        expected_missing += lost
        expected += [
            not whole and not (fallback == "drop" and any(lost[:t])) for t in range(len(mask))
        ]
    assert missing.tolist() == expected_missing
    assert surviving_tokens(missing, lens, fallback, max_share).tolist() == expected


@given(SEQUENCES)
def test_shares_are_of_the_rows_that_owe_a_route(sequences: list[list[bool]]) -> None:
    missing = missing_rows(*laid_out(sequences))
    lens = torch.tensor([len(s) for s in sequences])
    lost = [s[:-1].count(False) for s in sequences]
    owed = [len(s) - 1 for s in sequences]
    shares = sample_shares(missing, lens).tolist()
    assert shares == [a / b if b else 0.0 for a, b in zip(lost, owed, strict=True)]
    assert batch_share(missing, lens) == (sum(lost) / sum(owed) if sum(owed) else 0.0)


MISSING = torch.tensor([False] * 4 + [False, True, True, False] + [True, False])
LENS = torch.tensor([4, 4, 2])
NAMES = ["prompt a sample 0", "prompt a sample 1", "prompt b sample 0"]


def test_a_row_that_may_not_fall_back_is_named() -> None:
    with pytest.raises(ValueError, match="prompt a sample 1, row 1: expected a captured route"):
        check_budget(MISSING, LENS, NAMES, "error", 1.0)
    check_budget(torch.zeros(10, dtype=torch.bool), LENS, NAMES, "error", 0.0)


def test_a_step_above_its_budget_names_the_worst_samples() -> None:
    check_budget(MISSING, LENS, NAMES, "live", 3 / 7)
    worst = (
        r"42\.86% of .* in 2 of 3 samples.* Worst: prompt b sample 0 \(100\.0%\), prompt a sample 1"
    )
    with pytest.raises(RuntimeError, match=worst) as error:
        check_budget(MISSING, LENS, NAMES, "live", 0.42)
    assert NAMES[0] not in str(error.value) and "max_batch_fallback=0.42" in str(error.value)

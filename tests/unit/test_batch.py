"""The batch refuses what does not fit, and says which stage is missing."""

import pytest
import torch

from rltrain.batch import Batch


def two_sequences() -> Batch:
    return Batch(
        tokens=torch.tensor([11, 12, 21, 22, 13, 23, 24]),
        seq_lens=torch.tensor([4, 3]),
        response_mask=torch.tensor([False, False, True, True, False, True, True]),
    )


def test_required_fields_come_in_the_order_asked_for() -> None:
    rewards, advantages = torch.tensor([0.0, 1.0]), torch.arange(7.0)
    batch = two_sequences().with_fields(rewards=rewards, advantages=advantages)
    found = batch.require("advantages", "rewards")
    assert len(found) == 2 and found[0] is advantages and found[1] is rewards


def test_every_missing_field_is_named() -> None:
    batch = two_sequences().with_fields(rewards=torch.zeros(2))
    with pytest.raises(ValueError, match="the batch has no old_logprobs, advantages: run"):
        batch.require("rewards", "old_logprobs", "advantages")


def test_select_takes_whole_sequences_in_the_order_given() -> None:
    batch = two_sequences().with_fields(rewards=torch.tensor([0.0, 1.0]))
    swapped = batch.select([1, 0])
    assert swapped.tokens.tolist() == [13, 23, 24, 11, 12, 21, 22]
    assert swapped.seq_lens.tolist() == [3, 4]
    assert swapped.require("rewards")[0].tolist() == [1.0, 0.0]


def test_fields_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards: B=3, but the batch has B=2"):
        two_sequences().with_fields(rewards=torch.zeros(3))
    with pytest.raises(ValueError, match="seq_lens sum to 6, but tokens hold 7"):
        two_sequences().with_fields(seq_lens=torch.tensor([3, 3]))

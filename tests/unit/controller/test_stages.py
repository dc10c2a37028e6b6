"""What the controller makes of the workers' sums."""

import pytest
import torch

from rltrain.controller.stages import overlap_metrics
from rltrain.policy.types import Agreement


def test_overlap_is_a_mean_over_captured_rows() -> None:
    """Two rows of K = 2: three of four experts shared in layer 0, two of four in layer 3."""
    agreement = Agreement(num_rows=2, shared={0: 3, 3: 2}, flipped=torch.zeros(3, dtype=torch.bool))
    assert overlap_metrics(agreement, experts_per_token=2) == {
        "routing/overlap": pytest.approx(0.625),
        "routing/overlap_min": 0.5,
        "routing/overlap/layer_0": 0.75,
        "routing/overlap/layer_3": 0.5,
    }

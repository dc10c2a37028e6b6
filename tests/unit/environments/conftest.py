"""Reward pools over the functions in this folder."""

from pathlib import Path
from typing import Any

import pytest

from rltrain.config.reward import RewardConfig
from rltrain.environments.pool import RewardPool
from tests.unit.environments.pool_case import MakePool


@pytest.fixture(autouse=True)
def import_from_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def pool_of(tmp_path: Path) -> MakePool:
    """A pool of one worker, whose output goes to ``tmp_path``."""

    def make(function: str = "sample_rewards.act_out", **more: Any) -> RewardPool:
        settings = {"timeout_s": 60.0, "max_failed_fraction": 1.0, "num_workers": 1}
        config = RewardConfig.model_validate({"function": function} | settings | more)
        return RewardPool(config, tmp_path)

    return make

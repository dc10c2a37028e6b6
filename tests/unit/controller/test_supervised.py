"""The batches of supervised steps, and what the warm start takes of a run's configuration."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from rltrain.algorithms.reduce import Aggregation
from rltrain.config import Config
from rltrain.controller.cluster.disks import Disks
from rltrain.controller.sft import export, supervised_batch, warm_start_config
from rltrain.controller.step_metrics import supervised_metrics
from rltrain.data.problem import Problem
from rltrain.policy.types import Updated

PROBLEMS = [
    Problem((1, 2, 3), "a", "", target_tokens=(4, 5)),
    Problem((6,), "b", "", target_tokens=(7,)),
    Problem((8, 9), "c", "", target_tokens=(10, 11, 12)),
    Problem((13,), "d", "", target_tokens=(14, 15)),
]


def config(**algorithm: object) -> Config:
    trainer = {"prompts_per_step": 4, "mini_batches": 2}
    return Config.model_validate(
        {
            "algorithm": {"type": "sft"} | algorithm,
            "trainer": trainer,
            "rollout": {"max_response_tokens": 16},
        }
    )


def test_answers_are_in_the_loss_and_prompts_are_not() -> None:
    batch = supervised_batch(PROBLEMS, config())
    assert batch.tokens.tolist() == list(range(1, 16))
    assert batch.seq_lens.tolist() == [5, 2, 5, 3]
    assert batch.tokens[batch.response_mask].tolist() == [4, 5, 7, 10, 11, 12, 14, 15]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 3] * 3 + [1 / 5] * 5),
        ("sequence_mean_token_mean", [1 / 4, 1 / 4, 1 / 2, 1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]),
        ("sequence_mean_token_sum", [1 / 2] * 8),
        ("constant", [1 / (2 * 16)] * 8),
    ],
)
def test_each_mini_batch_has_a_denominator_of_its_own(
    aggregation: Aggregation, weights: list[float]
) -> None:
    batch = supervised_batch(PROBLEMS, config(aggregation=aggregation))
    (found,) = batch.require("loss_weights")
    assert found[batch.response_mask].tolist() == pytest.approx(weights)
    assert not found[~batch.response_mask].any()


def test_the_loss_is_that_of_all_mini_batches() -> None:
    """By token: the first update has three tokens of the eight."""
    updates = [
        Updated({"loss": 1.0, "nll": 3.0, "tokens": 3.0}, {}, 2.0, 0.1),
        Updated({"loss": 2.0, "nll": 21.0, "tokens": 5.0}, {}, 4.0, 0.2),
    ]
    assert supervised_metrics(updates, 3) == {
        "sft/loss": 3.0,
        "policy/loss": 1.5,
        "policy/grad_norm": 3.0,
        "policy/lr": 0.2,
        "policy/skipped_updates": 1.0,
    }
    assert supervised_metrics([], 1) == {"policy/skipped_updates": 1.0}


def test_the_warm_start_is_a_supervised_run_whatever_the_run_is() -> None:
    run = Config.model_validate(
        {
            "algorithm": {"group_size": 4, "kl": {"coef": 0.1}},
            "critic": {"warmup_steps": 2},
            "cluster": {"placement": "colocated", "call_timeout_s": 7.0},
            "data": {"max_prompt_tokens": 2000},
            "model": {"tiny": {"seed": 5, "warm_start": {"steps": 9, "batch_size": 16}}},
            "policy": {
                "parallel": {"tp": 2},
                "recompute": "full",
                "max_tokens_per_micro_batch": 4000,
            },
            "rollout": {"temperature": 0.7, "max_response_tokens": 2000},
            "routing_replay": {"mode": "r3"},
            "trainer": {"mini_batches": 4, "sync_every": 2, "check_weight_sync": True},
        }
    )
    found = warm_start_config(run)
    assert found.algorithm == Config.model_validate({"algorithm": {"type": "sft"}}).algorithm
    assert (found.trainer.steps, found.trainer.prompts_per_step, found.trainer.seed) == (9, 16, 5)
    assert found.trainer.mini_batches == 1
    assert found.policy.parallel.world_size == 1
    assert (found.policy.recompute, found.cluster.call_timeout_s) == ("full", 7.0)
    assert torch.tensor(found.optimizer.lr) == torch.tensor(run.model.tiny.warm_start.lr)


class Exporting:
    """The policy, of which rank 0 writes on this node."""

    nodes: ClassVar = ["127.0.0.1"]

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def export(self, path: str, dtype: str) -> None:
        Path(path).mkdir()
        (Path(path) / "model.safetensors").write_text(dtype)
        if self.error is not None:
            raise self.error


def test_an_export_that_has_no_room_leaves_the_older_one_alone(tmp_path: Path) -> None:
    folder, disks = tmp_path / "model", Disks("127.0.0.1")
    export(Exporting(), disks, folder, 1)  # type: ignore[arg-type]
    (folder / "config.json").write_text("old")
    full = RuntimeError("policy.export: No space left on device")
    for policy, nbytes, said in ((Exporting(full), 1, "No space"), (Exporting(), 2**60, "needed")):
        with pytest.raises(RuntimeError, match=said):
            export(policy, disks, folder, nbytes)  # type: ignore[arg-type]
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert (folder / "config.json").read_text() == "old"
    export(Exporting(), disks, folder, 1)  # type: ignore[arg-type]
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]

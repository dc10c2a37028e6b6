"""The critic's Ray actors, as the controller calls them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.checkpoint_storage import local_storage
from rltrain.controller.cluster.critic_group import CriticGroup
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.controller.cluster.worker_group import UpdateNotFinite
from rltrain.controller.find_checkpoint import examine
from rltrain.controller.restore_checkpoint import restore
from rltrain.controller.save_checkpoint import save
from rltrain.planning.place import on_one_cpu
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = pytest.mark.integration
LENGTHS = (9, 4, 12, 5)


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config(**trainer: Any) -> Config:
    return Config.model_validate(
        {
            "algorithm": {"advantage": "gae"},
            "policy": {"parallel": {"dp": 2}, "threads": 1},
            "critic": {"optimizer": {"lr": 1e-2}},
            "trainer": {"mini_batches": 2, **trainer},
        }
    )


def step() -> Batch:
    """Two mini-batches; no token of the second is in the loss."""
    g, n, first = torch.Generator().manual_seed(0), sum(LENGTHS), sum(LENGTHS[:2])
    in_loss = torch.arange(n) < first
    return Batch(
        tokens=torch.randint(61, (n,), generator=g),
        seq_lens=torch.tensor(LENGTHS),
        response_mask=torch.ones(n, dtype=torch.bool),
        loss_weights=torch.where(in_loss, 1 / first, 0.0),
        returns=torch.ones(n),
        # The critic must not ask for them: there are no such objects.
        rollout_expert_indices=torch.zeros(n, 2, 2, dtype=torch.uint8),
        route_mask=torch.ones(n, dtype=torch.bool),
    )


def test_values_updates_and_checkpoints(started: None, tmp_path: Path) -> None:
    save_tiny_moe(tmp_path / "model", num_layers=2, num_experts=4, k=2, vocab=61)
    critic = CriticGroup(config(), str(tmp_path / "model"), Cluster(on_one_cpu(config())))
    batch = step()
    critic.begin_step(batch)
    values = critic.values()
    assert values.shape == (batch.num_tokens,) and not values.any()

    fields = {"values": values, "returns": batch.returns, "loss_weights": batch.loss_weights}
    [updated] = critic.update(fields)  # the mini-batch with nothing in the loss is left out
    # A first token has no slot; (0 - 1)^2 / 2 for each of the others.
    counted = sum(LENGTHS[:2]) - 2
    assert updated.totals["tokens"] == counted
    assert updated.totals["loss"] == pytest.approx(counted / sum(LENGTHS[:2]) / 2)
    saved = critic.values()
    assert saved[1:9].all() and not saved[[0, 9, 13, 25]].any()
    storage = local_storage(tmp_path, config().checkpoint)
    folder = save(storage, 1, [critic], {})
    assert (folder / "critic").is_dir()
    critic.update(fields)
    assert (critic.values() - saved).abs().max() > 1e-3
    record = examine(storage, folder)
    restore(storage, record, [critic])
    assert record.state == {"step": 1} and torch.equal(critic.values(), saved)

    bad = fields | {"returns": torch.full((batch.num_tokens,), torch.inf)}
    with pytest.raises(UpdateNotFinite, match=r"^critic, mini-batch 0: the loss is inf on ranks? "):
        critic.update(bad)
    critic._config = config(on_nonfinite="skip")
    assert critic.update(bad) == [] and [one.mini_batch for one in critic.unmade] == [0]
    assert torch.equal(critic.values(), saved) and critic.nonfinite_state() == {}

    rows = [3, 2, 1, 0]
    critic.begin_step(batch.select(rows))
    torch.testing.assert_close(critic.values(), saved[batch.token_index(rows)])

    policy = object.__new__(PolicyGroup)  # that no run without one has saved
    policy._config = config()
    with pytest.raises(ValueError, match="saved by a run without a policy"):
        restore(storage, record, [policy, critic])
    with pytest.raises(RuntimeError, match=r"^critic\.values: IndexError"):
        critic._call(lambda worker: worker.values([[99]]))
    critic.shutdown()

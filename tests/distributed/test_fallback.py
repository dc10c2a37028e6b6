"""Rows without a captured route, on a real worker: how they are routed in every pass."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.config import Config
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.test_policy_worker import EXPERTS, LAYERS, VOCAB, K, saved_batch
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = pytest.mark.integration
MISSING = [5, 40]


def test_missing_rows(tmp_path: Path) -> None:
    save_tiny_moe(tmp_path / "model", num_layers=LAYERS, num_experts=EXPERTS, k=K, vocab=VOCAB)
    run_ranks(check, 1, tmp_path)


def check(rank: int, folder: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    cpu = torch.device("cpu")
    config = Config.model_validate({"routing_replay": {"mode": "r3", "fallback": "r2"}})
    worker = PolicyWorker(config, rank, rendezvous(folder, "one"), str(folder / "model"), cpu)
    batch = saved_batch()
    assert batch.route_mask is not None
    mask = batch.route_mask.clone()
    mask[MISSING] = False
    batch = batch.with_fields(route_mask=mask)
    plan = [list(range(batch.num_sequences))]
    before = {layer: router.weight.clone() for layer, router in routers(worker).items()}
    for record in (True, False):
        with torch.no_grad():
            for layer, router in routers(worker).items():
                router.weight.copy_(before[layer])
        worker.begin_step(batch)
        worker.score(plan, routing="rollout", record=record)
        chosen = passed(worker, plan)
        with torch.no_grad():  # an update moves the routers, here by more than usual
            for router in routers(worker).values():
                router.weight.neg_()
        later = passed(worker, plan)
        captured = batch.rollout_expert_indices
        assert torch.equal(later.used[mask], captured[mask]), "rows with a route replay it"
        assert not torch.equal(later.native[MISSING], chosen.used[MISSING])
        if record:  # R2: what the log-probability pass chose, however the routers have changed
            assert torch.equal(later.used[MISSING], chosen.used[MISSING])
        else:  # live: what the routers choose now
            assert torch.equal(later.used[MISSING], later.native[MISSING])
    # A step that trains on few groups may leave a rank without sequences: it takes part in all.
    names = "old_logprobs", "advantages", "loss_weights"
    nothing = batch.select([]).with_fields(rollout_expert_indices=())
    worker.begin_step(nothing)
    scored = worker.score([[]], routing="rollout", measure=True, record=True)
    assert len(scored.logprobs) == scored.agreement.num_rows == 0
    fields = dict(zip(names, nothing.require(*names), strict=True))
    assert worker.update([[]], fields, routing="rollout").totals["tokens"] == 0
    destroy_mesh()


def routers(worker: Any) -> dict[int, Any]:
    return {layer: r for routers in worker.model.routers for layer, r in routers.items()}


def passed(worker: Any, plan: list[list[int]]) -> Any:
    """What the routers do in a pass that replays as an update would."""
    from rltrain.policy.passes.passes import score

    shard = worker._replaying(worker._shard(), "rollout")
    cuts = worker._cut(plan, shard)
    return score(worker.model, cuts, shard.num_tokens, replay=True, record=True).recorded

"""The reference on an interleaved pipeline: it is the policy of its last refresh, also after a
resume by a worker that began with other weights."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.config import Config
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.test_policy_worker import EXPERTS, LAYERS, VOCAB, K, saved_batch
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = pytest.mark.integration


def test_it_stays_what_it_was_refreshed_to(tmp_path: Path) -> None:
    for seed, name in enumerate(("model", "other")):
        sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "k": K, "vocab": VOCAB}
        save_tiny_moe(tmp_path / name, **sizes, seed=seed)
    (tmp_path / "saved").mkdir()
    run_ranks(check, 2, tmp_path)


def check(rank: int, folder: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    batch, cpu = saved_batch(), torch.device("cpu")
    plan = [[0, 1], [2, 3]]
    config = Config.model_validate(
        {"policy": {"parallel": {"pp": 2, "vpp": 2}}, "algorithm": {"kl": {"coef": 0.1}}}
    )

    def started(name: str) -> PolicyWorker:
        worker = PolicyWorker(config, rank, rendezvous(folder, name), str(folder / name), cpu)
        worker.begin_step(batch)
        return worker

    def scored(worker: PolicyWorker, of: str) -> Tensor:
        """By the last stage, on every rank."""
        found = worker.score(plan, routing="native", of=of)
        whole = torch.zeros(batch.num_tokens)
        if found is not None and found.logprobs is not None:
            whole += found.logprobs
        dist.all_reduce(whole)
        return whole

    def move(worker: PolicyWorker) -> None:
        """Each chunk is one layer, or the embedding or the head with it."""
        with torch.no_grad():
            for chunk in worker.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.1)

    worker = started("model")
    first = scored(worker, "reference")
    assert torch.equal(first, scored(worker, "policy"))
    move(worker)
    moved = scored(worker, "policy")
    assert (moved - first).abs().max() > 0.1
    assert torch.equal(scored(worker, "reference"), first)
    worker.refresh_reference()
    move(worker)
    assert torch.equal(scored(worker, "reference"), moved)
    worker.save_reference(str(folder / "saved"))
    destroy_mesh()

    resumed = started("other")
    policy = scored(resumed, "policy")
    assert (scored(resumed, "reference") - moved).abs().max() > 0.1
    resumed.load_reference(str(folder / "saved"))
    assert torch.equal(scored(resumed, "reference"), moved)
    assert torch.equal(scored(resumed, "policy"), policy)
    destroy_mesh()

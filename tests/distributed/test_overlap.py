"""Gradients summed during the backward pass equal gradients summed after it."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.config import Config
from rltrain.data.packing import plan_step
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.test_policy_worker import BUDGET, LENGTHS, saved_batch
from tests.distributed.tiny_folder import save_tiny_moe

if TYPE_CHECKING:
    from rltrain.policy.worker import PolicyWorker

pytestmark = pytest.mark.integration

RANKS = 2
BUDGETS = (BUDGET, BUDGET, 4 * BUDGET, BUDGET)  # more micro-batches, fewer, more again
BUCKET_SIZE = 4000  # numbers, so that there are several


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    save_tiny_moe(folder / "moe", num_layers=2, num_experts=8, k=2, vocab=61)
    run_ranks(run_both, RANKS, folder)
    return folder


@pytest.mark.parametrize("rank", range(RANKS))
def test_updates_are_the_same(folder: Path, rank: int) -> None:
    after, meanwhile = (load_file(folder / f"{o}.{rank}.safetensors") for o in (False, True))
    torch.testing.assert_close(meanwhile, after, rtol=1e-6, atol=1e-6)


# On the ranks


def run_both(rank: int, folder: Path) -> None:
    for overlap in (False, True):
        run_one(rank, folder, overlap)


def run_one(rank: int, folder: Path, overlap: bool) -> None:
    from rltrain.policy.megatron import megatron_model as model
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    config = Config.model_validate(
        {
            "policy": {"parallel": {"dp": 2, "ep": 1}, "overlap_grad_reduce": overlap},
            # Buckets decide in what order the norm is summed, and with the usual eps Adam takes a
            # gradient that is nearly 0 for a whole step, of whatever its last bits say.
            "optimizer": {"lr": 1e-2, "eps": 1e-4},
        }
    )
    small = partial(model.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
    with ExitStack() as stack:
        if overlap:
            stack.enter_context(mock.patch.object(model, "DistributedDataParallelConfig", small))
        file = rendezvous(folder, f"{overlap}")
        worker = PolicyWorker(config, rank, file, str(folder / "moe"), torch.device("cpu"))
    [chunk] = worker.chunks
    assert not overlap or len(chunk.bucket_groups) > 2
    counts = set()
    for step, budget in enumerate(BUDGETS):
        with mock.patch.object(chunk, "finish_grad_sync", checked(chunk, overlap and step > 0)):
            counts.add(update(worker, budget))
    assert len(counts) > 1, "the number of micro-batches was to change"
    weights = {f"{i}": p.detach().clone() for i, p in enumerate(chunk.parameters())}
    save_file(weights, folder / f"{overlap}.{rank}.safetensors")
    destroy_mesh()


def checked(chunk: Any, begun: bool) -> Callable[..., None]:
    """``finish_grad_sync``, but where it starts every sum has begun, or none. In a first update
    Megatron learns what there is to wait for."""
    finish = chunk.finish_grad_sync

    def check(*args: Any, **kwargs: Any) -> None:
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        assert {group.grad_reduce_handle is not None for group in groups} == {begun}
        finish(*args, **kwargs)

    return check


def update(worker: "PolicyWorker", budget: int) -> int:
    """Returns the number of micro-batches."""
    plan = plan_step(list(LENGTHS), 1, worker.mesh.dp_size, budget, 1)
    dp_rank = worker.mesh.dp_rank
    worker.begin_step(saved_batch(2).select(plan.shards[dp_rank]))
    micro_batches = plan.updates[0][dp_rank]
    worker.update(micro_batches, {}, routing="rollout", kl_coef=0.0)
    return len(micro_batches)

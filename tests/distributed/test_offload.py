"""Offload and onload keep every bit: two updates with every part offloaded in between.

Runs on CPU, where host and device memory are the same. The same storages are freed and filled.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.config import Config
from rltrain.data.packing import plan_step
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.test_policy_worker import BUDGET, LENGTHS, saved_batch
from tests.distributed.tiny_folder import save_tiny_moe

if TYPE_CHECKING:  # it imports Megatron, which only the ranks need
    from rltrain.policy.offload import ModelPart
    from rltrain.policy.worker import PolicyWorker

pytestmark = pytest.mark.integration

RANKS = 2
PRECISIONS = ("bf16", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    save_tiny_moe(folder / "moe", num_layers=2, num_experts=8, k=2, vocab=61)
    run_ranks(run_all, RANKS, folder)
    return folder


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_what_was_away_is_the_same(folder: Path, precision: str, rank: int) -> None:
    stayed, moved = (
        load_file(folder / f"{precision}.{name}.{rank}.safetensors") for name in ("stayed", "moved")
    )
    assert stayed.keys() == moved.keys()
    assert not [name for name, value in stayed.items() if not torch.equal(value, moved[name])]
    assert any(name.startswith("moment") for name in stayed)


# On the ranks


def run_all(rank: int, folder: Path) -> None:
    for precision in PRECISIONS:
        for name in ("stayed", "moved"):
            run_one(rank, folder, precision, moves=name == "moved")


def run_one(rank: int, folder: Path, precision: str, *, moves: bool) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    name = f"{precision}.{'moved' if moves else 'stayed'}"
    config = Config.model_validate(
        {
            "policy": {"parallel": {"dp": 2, "ep": 2}, "precision": {"params": precision}},
            "optimizer": {"lr": 1e-2},
            "algorithm": {"kl": {"coef": 0.1}},
        }
    )
    cpu = torch.device("cpu")
    worker = PolicyWorker(config, rank, rendezvous(folder, name), str(folder / "moe"), cpu)
    found: dict[str, Tensor] = {}
    for step in range(2):
        if moves:
            leave_and_return(worker, precision)
        train(worker, found, step)
    weights = [p for chunk in worker.chunks for p in chunk.parameters()]
    found |= {f"parameter {i}": value.detach().clone() for i, value in enumerate(weights)}
    for part in worker.optimizer.chained_optimizers:
        for moments in part.optimizer.state.values():
            for key, value in moments.items():
                found[f"moment {len(found)} {key}"] = value.clone()
        for group in part.optimizer.param_groups:
            for value in group["params"]:
                found[f"master {len(found)}"] = value.detach().clone()
    save_file(found, folder / f"{name}.{rank}.safetensors")
    destroy_mesh()


def train(worker: "PolicyWorker", found: dict[str, Tensor], step: int) -> None:
    batch = saved_batch(2)
    plan = plan_step(list(LENGTHS), 1, worker.mesh.dp_size, BUDGET, 1)
    dp_rank = worker.mesh.dp_rank
    worker.begin_step(batch.select(plan.shards[dp_rank]))
    scoring = plan.scoring[dp_rank]
    scored: Any = worker.score(scoring, routing="native", of="reference")
    found[f"reference {step}"] = scored.logprobs
    worker.update(
        plan.updates[0][dp_rank], {"ref_logprobs": scored.logprobs}, routing="rollout", kl_coef=0.1
    )


def leave_and_return(worker: "PolicyWorker", precision: str) -> None:
    """As around a weight sync: first all but the parameters, which the sync reads, then those."""
    weights = [p for chunk in worker.chunks for p in chunk.parameters()]
    masters = [
        master
        for part in worker.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for master in group["params"]
    ]
    parts: list[ModelPart] = ["gradients", "optimizer", "reference"]
    worker.offload(parts)
    worker.offload(parts)  # away already
    assert all(size(p) for p in weights)
    if precision == "bf16":
        assert not any(size(master) for master in masters)
    for chunk in worker.chunks:
        assert not any(size(b.grad_data) for b in chunk.buffers + chunk.expert_parallel_buffers)
    worker.offload(["parameters"])
    assert worker.reference is not None
    of_reference = [p for chunk in worker.reference.chunks for p in chunk.parameters()]
    assert not any(size(p) for p in weights + masters + of_reference)
    worker.onload(["parameters"])
    assert all(size(p) for p in weights) and not any(size(p) for p in of_reference)
    worker.onload([*parts, "parameters"])
    for chunk in worker.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            assert not buffer.grad_data.any()
    with pytest.raises(ValueError, match=r"expected parts .*, found \['grads'\]"):
        worker.offload(["grads"])  # type: ignore[list-item]


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()

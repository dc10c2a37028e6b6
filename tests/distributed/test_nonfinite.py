"""An update whose loss or gradient norm is not finite is left out by all ranks alike: weights,
optimizer and schedule are as if its mini-batch had never been, and later updates are made.

One rank alone has the token whose weight in the loss is planted.

Not exercised: NCCL, bf16.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import plan_step
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LENGTHS, VOCAB, MINI_BATCHES = (6, 6, 6, 6, 6, 6), 61, 3
LAYOUTS: dict[str, dict[str, int]] = {"one rank": {}, "dp2": {"dp": 2}, "tp2": {"tp": 2}}
PLANTED = {"loss": torch.inf, "gradient norm": 1e25, "": None, "left out": 0.0}
"""By the quantity that is not finite, the weight of one token of the second mini-batch. Without
one, the second mini-batch is trained on, or is not there."""
TOKEN = 3 * 6 + 2  # of the second sequence of the second mini-batch, which is rank 1's in dp2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    save_tiny_moe(folder / "moe", num_layers=2, num_experts=4, k=2, vocab=VOCAB)
    run_ranks(run_layouts, 2, folder, timeout_s=240)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantity", ["loss", "gradient norm"])
def test_all_ranks_leave_the_update_out(folder: Path, layout: str, quantity: str) -> None:
    ranks = range(2 if LAYOUTS[layout] else 1)
    told = [json.loads((folder / f"{layout}.{quantity}.{r}.json").read_text()) for r in ranks]
    for of_rank in told:
        assert of_rank["counted"] == [1, 1, 2] and of_rank["bad state"] == []
    found = [answer for of_rank in told for answer in of_rank["found"] if answer]
    assert found and all(answer["quantity"] == quantity for answer in found)
    if quantity == "loss":
        assert found[0]["ranks"] == {"one rank": [0], "dp2": [1], "tp2": [0, 1]}[layout]
    else:
        assert found[0]["ranks"] == [] and "every gradient is finite" in found[0]["detail"]
    for rank in ranks:
        states = load_file(folder / f"{layout}.{quantity}.{rank}.safetensors")
        before, after, last = (of_update(states, update) for update in range(3))
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert any(not torch.equal(value, last[name]) for name, value in after.items())
        without = load_file(folder / f"{layout}.left out.{rank}.safetensors")
        never = of_update(without, 1)
        assert never.keys() == last.keys()
        assert all(torch.equal(value, last[name]) for name, value in never.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_finite_numbers_is_made(folder: Path, layout: str) -> None:
    told = json.loads((folder / f"{layout}..0.json").read_text())
    assert told["counted"] == [1, 2, 3] and not any(told["found"])


def test_a_weight_that_is_not_finite_is_named(folder: Path) -> None:
    told = [json.loads((folder / f"tp2.broken.{rank}.json").read_text()) for rank in range(2)]
    assert told == [[], ["decoder.final_layernorm.weight", "the optimizer's state"]]


def test_the_first_such_number_of_a_pass_is_found(folder: Path) -> None:
    """By layer and token: in the embedding of one token, and behind all layers."""
    last, first = [
        min(json.loads((folder / f"tp2.{where}.{rank}.json").read_text()) for rank in range(2))
        for where in ("head", "embedding")
    ]
    tokens = batch_of(None).tokens.tolist()
    assert first == [-1, tokens.index(tokens[TOKEN])] and last[0] == 2


def of_update(states: dict[str, Tensor], update: int) -> dict[str, Tensor]:
    return {n.partition("/")[2]: v for n, v in states.items() if n.startswith(f"{update}/")}


def batch_of(weight: float | None) -> Batch:
    g, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    weights = torch.rand(n, generator=g) / 12
    if weight is not None:
        weights[TOKEN] = weight
    return Batch(
        tokens=torch.randint(VOCAB, (n,), generator=g),
        seq_lens=torch.tensor(LENGTHS),
        response_mask=torch.ones(n, dtype=torch.bool),
        loss_weights=weights,
    )


# On the ranks


def run_layouts(rank: int, folder: Path) -> None:
    for layout, parallel in LAYOUTS.items():
        config = Config.model_validate(
            {
                "algorithm": {"type": "sft"},
                "routing_replay": {"mode": "off"},
                "trainer": {"steps": 4, "mini_batches": MINI_BATCHES, "prompts_per_step": 6},
                "policy": {"parallel": parallel},
                "optimizer": {"lr": 1e-2, "schedule": "linear", "weight_decay": 0.1},
            }
        )
        if rank < config.policy.parallel.world_size:
            for quantity in PLANTED:
                run_step(rank, folder, f"{layout}.{quantity}", config, quantity)


def run_step(rank: int, folder: Path, name: str, config: Config, quantity: str) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    path, cpu = str(folder / "moe"), torch.device("cpu")
    worker = PolicyWorker(config, rank, rendezvous(folder, name), path, cpu)
    mesh = worker.mesh
    plan = plan_step(list(LENGTHS), MINI_BATCHES, mesh.dp_size, 12, 1)
    worker.begin_step(batch_of(PLANTED[quantity]).select(plan.shards[mesh.dp_rank]))
    counted, found, states = [], [], {}
    updates = [plan.updates[0], plan.updates[2]] if quantity == "left out" else plan.updates
    for number, cuts in enumerate(updates):
        updated = worker.update(cuts[mesh.dp_rank], {}, routing="native")
        counted.append(worker.learning_rate.update)
        if updated is not None:
            bad = updated.nonfinite
            found.append(bad and {**vars(bad), "value": str(bad.value)})
        states |= {f"{number}/{key}": value for key, value in state_of(worker).items()}
    told = {"counted": counted, "found": found, "bad state": worker.nonfinite_state()}
    (folder / f"{name}.{rank}.json").write_text(json.dumps(told))
    save_file(states, folder / f"{name}.{rank}.safetensors")
    if name == "tp2.":
        if rank == 1:
            weight = worker.chunks[0].module.decoder.final_layernorm.weight
            weight.data[0] = torch.nan
            next(iter(worker.optimizer.chained_optimizers[0].optimizer.state.values()))["exp_avg"][
                0
            ] = torch.inf
        broken = json.dumps(worker.nonfinite_state())
        (folder / f"tp2.broken.{rank}.json").write_text(broken)
        for where in ("head", "embedding"):
            if where == "embedding":
                embedding = worker.chunks[0].module.embedding.word_embeddings.weight
                owner, row = divmod(int(batch_of(None).tokens[TOKEN]), len(embedding))
                if owner == rank:
                    embedding.data[row] = torch.nan
            place = worker.locate(plan.scoring[0], routing="native")
            found_at = [] if place is None else [place.layer, place.token]
            (folder / f"tp2.{where}.{rank}.json").write_text(json.dumps(found_at or [9, 9]))
    destroy_mesh()


def state_of(worker: Any) -> dict[str, Tensor]:
    """All that an update may change on this rank."""
    from rltrain.policy.offload import optimizer_state

    weights = {n: p.detach().clone() for n, p in worker.chunks[0].named_parameters()}
    adam = enumerate(optimizer_state(worker.optimizer))
    return weights | {f"optimizer {number}": value.detach().clone() for number, value in adam}

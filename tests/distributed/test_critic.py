"""The critic on one saved batch: it computes what transformers' trunk and a linear map compute, in
every layout.

The reference is written here from PPO's formula, and runs on transformers in this process, which
has none of the CPU patches. Values are 0 at the start, so the head gets random weights first.

Not exercised: NCCL, bf16.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import pack_micro_batches, plan_step
from rltrain.verification.pass_file import relative_error
from tests.distributed import tiny_families
from tests.distributed.run_ranks import rendezvous, run_ranks

if TYPE_CHECKING:  # it imports Megatron, which only the ranks need
    from rltrain.policy.critic import CriticWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # one fixture runs all cases

LENGTHS = (30, 2, 17, 15, 1)
CLIP = 0.3
HEAD = "value head"
MOE, TIED, MTP = "qwen3_moe", "qwen3", "deepseek_v3, MTP"
"""With experts; dense, its embedding tied; with expert biases, a shared expert and an MTP layer."""


@dataclass(frozen=True)
class Case:
    parallel: dict[str, int]
    model: str = MOE
    budget: int = 32
    recompute: str = "none"
    resumes: str | None = None
    """The case whose checkpoint it goes on from."""


CASES = {
    "one rank": Case({}),
    "small micro-batches": Case({}, budget=30),
    "one large micro-batch": Case({}, budget=128),
    "recomputed": Case({}, recompute="full"),
    "tp2": Case({"tp": 2}),
    "pp2": Case({"pp": 2}),
    "pp2 vpp2": Case({"pp": 2, "vpp": 2}),
    "cp2": Case({"cp": 2}),
    "ep2 over dp2": Case({"dp": 2, "ep": 2}),
    "tp2 pp2": Case({"tp": 2, "pp": 2}),
    "tied, one rank": Case({}, TIED),
    "tied, tp2 pp2": Case({"tp": 2, "pp": 2}, TIED),
    "MTP, one rank": Case({}, MTP),
    "tp2, resumed": Case({"tp": 2}, resumes="tp2"),
    "pp2, resumed from tp2": Case({"pp": 2}, resumes="tp2"),
}
SAVING = {case.resumes for case in CASES.values() if case.resumes}
Found = dict[str, dict[str, Tensor]]


def saved_batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)
    response = torch.rand(n, generator=g) < 0.6
    weights = torch.where(response, 0.5 + torch.rand(n, generator=g), 0.0)
    return Batch(
        tokens=torch.randint(tiny_families.VOCABULARY, (n,), generator=g),
        seq_lens=torch.tensor(LENGTHS),
        response_mask=response,
        loss_weights=weights / weights.sum(),
    )


def write_reference(name: str, folder: Path) -> dict[str, Tensor]:
    """The folder of a model, and what its critic computes on the batch."""
    model = tiny_families.make(name, scale=2.0)
    model.save_pretrained(folder)
    if name == MTP:
        tiny_families.add_mtp_layer(folder)
    batch, g = saved_batch(), torch.Generator().manual_seed(1)
    head = torch.randn(1, model.config.hidden_size, generator=g) / 10
    head.requires_grad_()
    values = torch.cat([_values(model, t, head) for t in batch.tokens.split(list(LENGTHS))])
    v = values.detach().double().numpy()
    old = v + torch.randn(len(v), generator=g).double().numpy() / 2
    returns = v + torch.randn(len(v), generator=g).double().numpy()
    fields = {"values": torch.from_numpy(old).float(), "returns": torch.from_numpy(returns).float()}
    old, returns, w = (
        x.double().numpy() for x in (*fields.values(), *batch.require("loss_weights"))
    )
    first = np.zeros(len(v), dtype=bool)
    first[np.cumsum((0, *LENGTHS))[:-1]] = True
    w = np.where(first, 0, w)  # a token that nothing predicts
    # L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; the clipped term is constant
    # wherever it is the larger one.
    free, bound = (v - returns) ** 2, (np.clip(v, old - CLIP, old + CLIP) - returns) ** 2
    clipped = bound > free
    values.backward(torch.from_numpy(np.where(clipped, 0, w * (v - returns))).float())
    assert 0.1 < clipped[w > 0].mean() < 0.6
    found = {
        "head": head.detach(),
        "values": values.detach(),
        "loss": torch.tensor((w * np.maximum(free, bound) / 2).sum()),
        "tokens": torch.tensor(float((w > 0).sum()), dtype=torch.float64),
        "clipped": torch.tensor(float(clipped[w > 0].sum()), dtype=torch.float64),
        f"gradient/{HEAD}": head.grad,
        **{f"field/{name}": x for name, x in fields.items()},
    }
    for parameter in model.parameters():
        gradient = parameter.grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    # Saved as weights, gradients get the names of a checkpoint.
    model.save_pretrained(folder / "gradients", state_dict=dict(model.named_parameters()))
    gradients = {f"gradient/{n}": x for n, x in tiny_families.load(folder / "gradients").items()}
    gradients.pop("gradient/lm_head.weight", None)  # of nothing here
    squares = [x.double().square().sum() for x in (head.grad, *gradients.values())]
    return found | gradients | {"grad norm": torch.stack(squares).sum().sqrt().float()}


def _values(model: PreTrainedModel, tokens: Tensor, head: Tensor) -> Tensor:
    """V of the prefix before each token of one sequence; 0 before the first.  # [n]"""
    hidden = model.model(tokens[None]).last_hidden_state[0]
    return torch.cat([torch.zeros(1), (hidden @ head.T).squeeze(1)[:-1]])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """What transformers computes, by model, and what the ranks do, by case."""
    folder = tmp_path_factory.mktemp("critic")
    expected = {}
    for model in (MOE, TIED, MTP):
        expected[model] = write_reference(model, folder / model)
        save_file(expected[model], folder / f"{model}.safetensors")
    run_ranks(run_cases, 4, folder, timeout_s=540)
    return expected, {name: load_file(folder / f"{name}.found.safetensors") for name in CASES}


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.resumes])
def test_equals_transformers(results: tuple[Found, Found], case: str) -> None:
    expected, found = results[0][CASES[case].model], results[1][case]
    gradients = {name for name in expected if name.startswith("gradient/")}
    assert {name for name in found if name.startswith("gradient/")} == gradients
    assert len(gradients) > 20
    names = gradients | {"values", "loss", "tokens", "clipped", "grad norm"}
    errors = {name: relative_error(found[name], expected[name]) for name in names}
    assert not {name: error for name, error in errors.items() if not error < 1e-4}
    assert not found["values at the start"].any()


@pytest.mark.parametrize("case", [c for c in CASES if "one rank" not in c])
def test_updates_like_one_rank(results: tuple[Found, Found], case: str) -> None:
    """Two updates: parameters, gradient norm and what is scored then."""
    alone = {MOE: "one rank", TIED: "tied, one rank"}[CASES[case].model]
    expected, found = results[1][alone], results[1][case]
    names = set(expected) & set(found)
    assert {"second grad norm", "values after", f"second/{HEAD}"} <= names
    errors = {name: relative_error(found[name], expected[name]) for name in names}
    assert not {name: error for name, error in errors.items() if not error < 1e-4}


def test_goes_on_bitwise_after_a_checkpoint(results: tuple[Found, Found]) -> None:
    whole, resumed = results[1]["tp2"], results[1]["tp2, resumed"]
    names = {n for n in whole if n.startswith("second/") or n == "values after"}
    assert not [name for name in names if not torch.equal(whole[name], resumed[name])]


# On the ranks


def run_cases(rank: int, folder: Path) -> None:
    for name, case in CASES.items():
        config = _config(case)
        if rank < config.policy.parallel.world_size:
            worker = _worker(rank, folder, name, case, config)
            found = _run_case(folder, name, case, worker)
            if rank == 0:
                save_file(found, folder / f"{name}.found.safetensors")
            _leave()


def _config(case: Case, **model: str) -> Config:
    # Clipping would scale the gradients that are compared with transformers'.
    optimizer = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0}
    return Config.model_validate(
        {
            "model": model,
            "policy": {"parallel": case.parallel, "recompute": case.recompute},
            "critic": {"value_clip": CLIP, "optimizer": optimizer, "warmup_steps": 2},
            "trainer": {"steps": 5, "mini_batches": 2},
        }
    )


def _worker(rank: int, folder: Path, name: str, case: Case, config: Config) -> "CriticWorker":
    from rltrain.policy.critic import CriticWorker

    path, cpu = str(folder / case.model), torch.device("cpu")
    return CriticWorker(config, rank, rendezvous(folder, name), path, cpu)


def _leave() -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh

    destroy_mesh()


def _run_case(folder: Path, name: str, case: Case, worker: "CriticWorker") -> dict[str, Tensor]:
    from rltrain.verification.observation import whole_gradients

    reference, batch, mesh = (
        load_file(folder / f"{case.model}.safetensors"),
        saved_batch(),
        worker.mesh,
    )
    multiple_of = worker.config.policy.parallel.micro_batch_multiple
    plan = plan_step(list(LENGTHS), 1, mesh.dp_size, case.budget, multiple_of)
    if mesh.dp_size > 1:
        alone = [
            len(pack_micro_batches([[LENGTHS[i] for i in rows]], case.budget)[0])
            for rows in plan.shards
        ]
        assert len(set(alone)) > 1, f"meant to differ, found {alone}"
    rows = plan.shards[mesh.dp_rank]
    shard, index = batch.select(rows), batch.token_index(rows)
    worker.begin_step(shard)
    fields = {n: reference[f"field/{n}"][index] for n in ("values", "returns")}

    def values() -> Tensor:
        own = worker.values(plan.scoring[mesh.dp_rank])
        whole = torch.zeros(batch.num_tokens)
        if own is not None:
            whole[index] = own
        return _summed(whole)

    def update() -> dict[str, Tensor]:
        updated = worker.update(plan.updates[0][mesh.dp_rank], fields)
        totals = {} if updated is None else updated.totals
        assert updated is None or updated.lr == worker.config.critic.optimizer.lr
        names = ("loss", "tokens", "clipped")
        sums = [totals.get(n, 0.0) for n in names]
        norm = torch.tensor(0.0 if updated is None else updated.grad_norm)
        torch.distributed.all_reduce(norm, op=torch.distributed.ReduceOp.MAX)
        summed = _summed(torch.tensor(sums, dtype=torch.float64))
        return dict(zip(names, summed, strict=True)) | {"grad norm": norm}

    found: dict[str, Tensor] = {}
    _check_parts(worker)
    # Its schedule has the steps that it takes alone, too.
    assert worker.learning_rate.total_updates == 5 * 2
    if case.resumes is None:
        found["values at the start"] = values()
        _set_head(worker, reference["head"])
        found["values"] = values()
        found |= update()
        gradients = whole_gradients(worker.chunks, worker.arch, mesh)
        found |= {f"gradient/{n}": x for n, x in gradients.items()}
        found[f"gradient/{HEAD}"] = _head(worker, "main_grad")
        found |= _parameters(worker, "first/")
    else:
        worker.load(str(folder / f"{case.resumes}.checkpoint"))
    if name in SAVING:
        if mesh.rank == 0:
            (folder / f"{name}.checkpoint").mkdir()
        torch.distributed.barrier()
        worker.save(str(folder / f"{name}.checkpoint"))
    found["second grad norm"] = update()["grad norm"]
    found |= _parameters(worker, "second/")
    found["values after"] = values()
    if name == "pp2":
        _check_imported_weights(folder, worker)
    return {n: x.contiguous() for n, x in found.items()}


def _check_parts(worker: "CriticWorker") -> None:
    """No router can replay, and none is asked to; nothing predicts further tokens."""
    from rltrain.policy.megatron.megatron_model import decoder_routers

    routers = [r for chunk in worker.chunks for r in decoder_routers(chunk).values()]
    assert all(router.router_replay is None for router in routers)
    assert worker.model.route_layers == []
    assert bool(routers) == (worker.arch.num_experts > 0)
    names = [name for chunk in worker.chunks for name, _ in chunk.named_parameters()]
    assert not [name for name in names if "mtp" in name]


def _check_imported_weights(folder: Path, worker: "CriticWorker") -> None:
    """A critic's trunk comes from a checkpoint of the policy's, too; its head stays as it is."""
    from rltrain.policy import model_checkpoint as checkpoint
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.weights.families import read_architecture
    from rltrain.weights.huggingface.load import load_huggingface

    path, arch = folder / MOE, read_architecture(folder / MOE)
    options = {"device": worker.device, "routing_replay": False, "ddp": False}
    policy = build_model(arch, worker.config.policy, worker.mesh, **options)
    load_huggingface(path, policy, arch, worker.mesh)
    if worker.mesh.rank == 0:
        (folder / "imported").mkdir()
    torch.distributed.barrier()
    checkpoint.save_weights(str(folder / "imported"), policy, worker.mesh)
    before = _parameters(worker, "")
    checkpoint.load_weights(str(folder / "imported"), worker.chunks, worker.mesh)
    after = _parameters(worker, "")
    load_huggingface(path, worker.chunks, worker.arch, worker.mesh)
    expected = _parameters(worker, "")
    assert all(torch.equal(after[name], x) for name, x in expected.items())
    changed = {name for name, x in before.items() if not torch.equal(after[name], x)}
    assert changed == set(before) - {HEAD}


def _parameters(worker: "CriticWorker", prefix: str) -> dict[str, Tensor]:
    from rltrain.weights.sync.sender import full_tensors

    named = full_tensors(worker.chunks, worker.arch, worker.mesh, torch.float32)
    found = {f"{prefix}{name}": value.clone() for name, value in named}
    return found | {f"{prefix}{HEAD}": _head(worker, "data")}


def _head(worker: "CriticWorker", attribute: str) -> Tensor:
    """The output rank's answer, on every rank."""
    mesh, hidden = worker.mesh, worker.arch.hidden_size
    own = torch.zeros(1, hidden)
    if mesh.is_last_stage and not (mesh.tp_rank or mesh.dp_rank or mesh.cp_rank):
        own = getattr(worker.chunks[-1].module.output_layer.weight, attribute).clone()
    return _summed(own)


def _set_head(worker: "CriticWorker", head: Tensor) -> None:
    if worker.mesh.is_last_stage:
        with torch.no_grad():
            worker.chunks[-1].module.output_layer.weight.copy_(head)
    worker.optimizer.reload_model_params()


def _summed(values: Any) -> Tensor:
    torch.distributed.all_reduce(values)
    return values

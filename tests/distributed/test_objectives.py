"""Every objective on the policy worker: loss and gradient do not depend on how a mini-batch is cut.

Four algorithms have every loss, aggregation and kind of KL between them. On one rank, the loss and
its gradient in the log-probabilities are those of the formulas in numpy. Every other budget,
order and layout must give the numbers of one rank. Loss tokens lie on both sides of the
borders of context-parallel chunks, one sequence has none, and one has two tokens in all.

Not exercised: NCCL, and layouts of several kinds at once, which test_policy_worker.py has.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.algorithms.reduce import loss_weights
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.cluster.worker_group import _add
from rltrain.controller.step_metrics import update_metrics
from rltrain.data.packing import StepPlan, plan_step
from rltrain.policy.types import Updated
from rltrain.routing.align import last_rows
from rltrain.verification.pass_file import relative_error
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny_folder import save_tiny_moe
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import Ragged

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # one fixture runs all cases

LENGTHS, PROMPT, MASKED = (30, 2, 17, 16, 9), 3, 3
LAYERS, EXPERTS, K, VOCAB, MAX_RESPONSE = 2, 8, 2, 61, 40
KL_COEF = 0.3
"""What the step says; another one is configured, where an adaptive one starts."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {
        "aggregation": "sequence_mean_token_mean",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "entropy_coef": 0.1,
        "kl": {"coef": 0.05, "estimator": "k3_k2"},
    },
    "cispo": {
        "aggregation": "constant",
        "clip_low": 0.3,
        "correction": {"weight": "token", "outside": "mask"},
    },
    "ppo": {
        "aggregation": "sequence_mean_token_sum",
        "clip_high": 0.3,
        "dual_clip": 1.3,
        "kl": {"coef": 0.05, "estimator": "k2"},
    },
    "pg": {"aggregation": "token_mean"},
}


@dataclass(frozen=True)
class Cut:
    """How a mini-batch reaches the model."""

    parallel: dict[str, int] = field(default_factory=dict)
    budget: int = 32
    order: tuple[int, ...] = tuple(range(len(LENGTHS)))


ONE_RANK = "one rank"
CUTS = {
    ONE_RANK: Cut(),
    "all at once": Cut(budget=sum(LENGTHS)),
    "another order": Cut(order=(4, 3, 2, 1, 0), budget=40),
    "dp2 ep2": Cut({"dp": 2, "ep": 2}),
    "cp2": Cut({"cp": 2}),
    "pp2": Cut({"pp": 2}),
    "tp2": Cut({"tp": 2}),
}


def saved_batch() -> Batch:
    """``old_logprobs`` are relative to the policy's, whose ratios are to lie around the clips."""
    g = torch.Generator().manual_seed(1)
    lens = torch.tensor(LENGTHS)
    n = int(lens.sum())
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    response = position >= torch.minimum(lens - 1, torch.tensor(PROMPT)).repeat_interleave(lens)
    response &= torch.rand(n, generator=g) < 0.8
    response[LENGTHS[0] + 1] = True  # all that the shortest one has
    loss_mask = response & (torch.arange(len(lens)).repeat_interleave(lens) != MASKED)
    return Batch(
        tokens=torch.randint(VOCAB, (n,), generator=g),
        seq_lens=lens,
        response_mask=response,
        loss_mask=loss_mask,
        old_logprobs=0.3 * torch.randn(n, generator=g),
        advantages=torch.randn(n, generator=g),
        correction_weights=(2 * torch.rand(n, generator=g)).where(position % 5 != 0, 0.0),
        rollout_expert_indices=torch.rand(n, LAYERS, EXPERTS, generator=g)
        .topk(K)
        .indices.to(torch.uint8),
        route_mask=~last_rows(lens),
    )


@dataclass(frozen=True)
class Result:
    """What one cut made of one algorithm."""

    tensors: dict[str, Tensor]
    updated: Updated  # of all ranks

    @property
    def numbers(self) -> dict[str, float]:
        updated = self.updated
        sums = updated.totals | updated.maxima | {"grad norm": updated.grad_norm}
        return sums | update_metrics([updated], 1)


Results = dict[tuple[str, str], Result]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("objectives")
    save_tiny_moe(folder / "moe", num_layers=LAYERS, num_experts=EXPERTS, k=K, vocab=VOCAB)
    run_ranks(run_cuts, 2, folder, timeout_s=540)

    def read(name: str) -> Result:
        told = [json.loads(f.read_text()) for f in sorted(folder.glob(f"{name}.*.json"))]
        tensors = load_file(folder / f"{name}.safetensors")
        return Result(tensors, _add([Updated(**updated) for updated in told]))

    return {(name, cut): read(f"{name}, {cut}") for name in ALGORITHMS for cut in CUTS}


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != ONE_RANK])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_equals_one_rank(results: Results, name: str, cut: str) -> None:
    expected, found = results[name, ONE_RANK], results[name, cut]
    assert found.tensors.keys() == expected.tensors.keys()
    assert found.numbers.keys() == expected.numbers.keys()
    errors = {key: relative_error(found.tensors[key], x) for key, x in expected.tensors.items()}
    errors |= {
        key: abs(found.numbers[key] - x) / max(abs(x), 1e-8) for key, x in expected.numbers.items()
    }
    assert not {key: error for key, error in errors.items() if not error < 1e-4}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_equals_the_formula(results: Results, name: str) -> None:
    found, config, batch = results[name, ONE_RANK], settings(name).algorithm, saved_batch()
    assert batch.loss_mask is not None and batch.advantages is not None
    ragged = Ragged(LENGTHS, tuple(batch.loss_mask.tolist()), (0,) * 5, (0.0,) * 5)
    scored = {key: found.tensors[key].double().numpy() for key in SCORED}
    logprobs, old, ref, entropy = (scored[key] for key in SCORED)
    advantages = batch.advantages.double().numpy()
    token = reference.token_losses(name, ragged, logprobs, old, advantages, config)
    weights = reference.weights(ragged, config.aggregation, MAX_RESPONSE)
    correction = np.ones(len(weights))
    if config.correction.active:
        assert batch.correction_weights is not None
        correction = batch.correction_weights.double().numpy()
    policy = float(np.sum(weights * correction * token["loss"]))
    loss = policy - config.entropy_coef * float(np.sum(weights * entropy))
    slope = weights * correction * token["slope"]
    if config.kl.coef:
        pairs = zip(logprobs, ref, strict=True)
        kl = np.array([reference.kl(p, r, config.kl.estimator) for p, r in pairs])
        loss += KL_COEF * float(np.sum(weights * kl[:, 0]))
        slope += KL_COEF * weights * kl[:, 1]
    assert found.numbers["loss"] == pytest.approx(loss, rel=1e-5)
    assert found.numbers["policy_loss"] == pytest.approx(policy, rel=1e-5)
    assert found.numbers["tokens"] == batch.loss_mask.sum()
    np.testing.assert_allclose(found.tensors["slope"].numpy(), slope, rtol=1e-4, atol=1e-7)
    for stat, metric in (("low", "clip_fraction_low"), ("high", "clip_fraction_high")):
        if name != "pg":
            assert 0 < found.numbers[f"stat/{metric}"] == token[stat].sum()
    if name == "ppo":
        assert 0 < found.numbers["stat/dual_clip_fraction"] == token["dual"].sum()


# On the ranks

SCORED = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")


def settings(name: str, parallel: dict[str, int] | None = None) -> Config:
    return Config.model_validate(
        {
            "algorithm": ALGORITHMS[name] | {"loss": name, "advantage": "gae"},
            "trainer": {"steps": 5, "mini_batches": 2},
            "critic": {"warmup_steps": 2},
            "optimizer": {"lr": 1e-2, "eps": 1e-4},
            "policy": {"parallel": parallel or {}},
        }
    )


def run_cuts(rank: int, folder: Path) -> None:
    """One worker for all cuts and algorithms of a layout: building it takes most of the time."""
    for number, parallel in enumerate(_layouts()):
        cuts = {name: cut for name, cut in CUTS.items() if cut.parallel == parallel}
        if rank < settings("gspo", parallel).policy.parallel.world_size:
            _run_layout(rank, folder, parallel, cuts, str(number))


def _layouts() -> Iterator[dict[str, int]]:
    seen: list[dict[str, int]] = []
    for cut in CUTS.values():
        if cut.parallel not in seen:
            seen.append(cut.parallel)
            yield cut.parallel


def _run_layout(
    rank: int, folder: Path, parallel: dict[str, int], cuts: dict[str, Cut], world: str
) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.optimizer import build_optimizer
    from rltrain.policy.worker import PolicyWorker

    cpu, config = torch.device("cpu"), settings("gspo", parallel)  # whose KL makes a reference
    worker = PolicyWorker(config, rank, rendezvous(folder, world), str(folder / "moe"), cpu)
    # Steps of the critic alone are not in the policy's schedule.
    assert worker.learning_rate.total_updates == (5 - 2) * 2
    optimizer = config.optimizer, config.policy.precision, cpu
    for name in ALGORITHMS:
        worker.config = settings(name, parallel)
        for cut_name, cut in cuts.items():
            assert worker.reference is not None
            for chunk, first in zip(worker.chunks, worker.reference.chunks, strict=True):
                chunk.module.load_state_dict(first.state_dict())
            made = build_optimizer(worker.chunks, *optimizer, total_updates=1)
            worker.optimizer, worker.learning_rate = made
            found, updated = _run_case(worker, cut)
            case = f"{name}, {cut_name}"
            if rank == 0:
                save_file(found, folder / f"{case}.safetensors")
            if updated is not None:
                (folder / f"{case}.{rank}.json").write_text(json.dumps(asdict(updated)))
    destroy_mesh()


def _run_case(worker: Any, cut: Cut) -> tuple[dict[str, Tensor], Updated | None]:
    """One update, and what it computed in the order of the saved batch."""
    from rltrain.verification.observation import whole_gradients
    from rltrain.weights.sync.sender import full_tensors

    mesh, algorithm, saved = worker.mesh, worker.config.algorithm, saved_batch()
    assert saved.loss_mask is not None and saved.old_logprobs is not None
    weights = loss_weights(saved.loss_mask, saved.seq_lens, algorithm.aggregation, MAX_RESPONSE)
    batch = saved.with_fields(loss_weights=weights)
    if not algorithm.correction.active:
        batch = batch.with_fields(correction_weights=None)
    lens = [LENGTHS[i] for i in cut.order]
    plan = plan_step(lens, 1, mesh.dp_size, cut.budget)
    rows = [cut.order[i] for i in plan.shards[mesh.dp_rank]]  # of the saved batch
    worker.begin_step(batch.select(rows))

    def whole(values: Tensor | None) -> Tensor:
        """Of this rank's shard, put where the batch has it."""
        found = torch.zeros(batch.num_tokens)
        if values is not None:
            found[batch.token_index(rows)] = values
        dist.all_reduce(found)
        return found

    def score(routing: str, of: str) -> Tensor:
        told = worker.score(plan.scoring[mesh.dp_rank], routing=routing, of=of)
        return whole(None if told is None else told.logprobs)

    logprobs, ref_logprobs = score("rollout", "policy"), score("native", "reference")
    found = {"logprobs": logprobs, "old_logprobs": logprobs + saved.old_logprobs}
    found["ref_logprobs"] = ref_logprobs
    given = {"old_logprobs": found["old_logprobs"]}
    if algorithm.kl.coef:
        given["ref_logprobs"] = ref_logprobs
    shard = batch.with_fields(**given).select(rows)
    fields = {name: getattr(shard, name) for name in given}
    updated, watched = _watched_update(worker, plan, fields)
    found |= {name: whole(values) for name, values in watched.items()}
    for key, value in whole_gradients(worker.chunks, worker.arch, mesh).items():
        found[f"gradient/{key}"] = value
    for key, value in full_tensors(worker.chunks, worker.arch, mesh, torch.float32):
        found[f"parameter/{key}"] = value.clone()
    return found, updated


def _watched_update(
    worker: Any, plan: StepPlan, fields: dict[str, Tensor]
) -> tuple[Updated | None, dict[str, Tensor | None]]:
    """`PolicyWorker.update`, with what the objective was given and the gradient it returned."""
    from rltrain.policy.passes.passes import ModelOnMesh

    kept: list[tuple[Tensor, Tensor]] = []

    class Watched(ModelOnMesh):
        def outputs(self, output: Tensor, target_ids: Tensor) -> tuple[Tensor, ...]:
            logprobs, entropy = super().outputs(output, target_ids)
            logprobs.retain_grad()
            kept.append((logprobs, entropy.detach()))
            return logprobs, entropy

    mesh, model = worker.mesh, worker.model
    cuts = plan.updates[0][mesh.dp_rank]
    worker.model = Watched(model.chunks, model.arch, mesh, model.policy, model.temperature)
    updated = worker.update(cuts, fields, routing="rollout", kl_coef=KL_COEF)
    worker.model = model
    scale = mesh.dp_size * mesh.cp_size  # by which Megatron divides once gradients are summed
    slope, entropy = torch.zeros(2, worker.shard.num_tokens)
    for mb, (logprobs, found) in zip(worker._cut(cuts, worker.shard), kept, strict=False):
        assert logprobs.grad is not None
        mb.scatter(logprobs.grad / scale, mb.layout.targets, slope)
        mb.scatter(found, mb.layout.targets, entropy)
    speaks = mesh.is_last_stage and mesh.tp_rank == 0
    return updated, {"slope": slope if speaks else None, "entropy": entropy if speaks else None}

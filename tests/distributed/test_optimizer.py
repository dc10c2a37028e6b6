"""Two steps of two updates, a checkpoint and two more steps, against a hand-written Adam on
transformers' gradients, update by update.

Warm-up and a cosine lie before and behind the checkpoint, some updates are clipped and some not,
routers have a rate of their own and norms no weight decay. A worker that resumes starts with other
weights, so all state that it has afterwards is from the checkpoint. That was saved with other
settings of the optimizer, and the worker goes on with its own.

Not exercised: bf16 and its fp32 masters, NCCL.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import plan_step
from rltrain.verification.pass_file import relative_error
from rltrain.weights.huggingface.manifest import entries_of
from tests.distributed.run_ranks import asked_for, rendezvous, run_ranks
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # one fixture runs all cases

LENGTHS, BUDGET, VOCAB, LAYERS = (14, 2, 9, 16, 3, 11, 7, 16), 18, 61, 4
STEPS, SAVED_AFTER, MINI_BATCHES = 4, 2, 2
PEAK, FLOOR, ROUTER_PEAK, WARMUP = 1e-2, 2e-3, 4e-3, 3
BETA1, BETA2, EPS, DECAY, CLIP = 0.8, 0.95, 1e-4, 0.3, 1.0


@dataclass(frozen=True)
class Case:
    parallel: dict[str, int] = field(default_factory=dict)
    resumes: str | None = None
    """The case whose checkpoint it goes on from."""
    frozen: bool = False
    """Whether routers stay as they are."""

    @property
    def steps(self) -> range:
        return range(SAVED_AFTER if self.resumes else 0, SAVED_AFTER if self.frozen else STEPS)


CASES = {
    "one rank": Case(),
    "one rank, resumed": Case(resumes="one rank"),
    "pp2 vpp2": Case({"pp": 2, "vpp": 2}),
    "pp2 vpp2, resumed": Case({"pp": 2, "vpp": 2}, resumes="pp2 vpp2"),
    "dp2 ep2, resumed from pp2 vpp2": Case({"dp": 2, "ep": 2}, resumes="pp2 vpp2"),
    "dp2 ep2, routers frozen": Case({"dp": 2, "ep": 2}, frozen=True),
}
SAVING = {case.resumes for case in CASES.values()}


def batch_of(step: int) -> Batch:
    """The second mini-batch of each step has a gradient too small to be clipped."""
    g = torch.Generator().manual_seed(step)
    n, half = sum(LENGTHS), sum(LENGTHS[: len(LENGTHS) // 2])
    weights = torch.rand(n, generator=g) / half
    weights[half:] /= 50
    return Batch(
        tokens=torch.randint(VOCAB, (n,), generator=g),
        seq_lens=torch.tensor(LENGTHS),
        response_mask=torch.ones(n, dtype=torch.bool),
        loss_weights=weights,
    )


# By hand


def rate(update: int, peak: float) -> float:
    """Up in equal parts, then down half a cosine to its end."""
    if update < WARMUP:
        return peak * (update + 1) / WARMUP
    done = (update - WARMUP) / (STEPS * MINI_BATCHES - WARMUP)
    return FLOOR + (peak - FLOOR) * (1 + math.cos(math.pi * done)) / 2


def gradients(model: PreTrainedModel, batch: Batch, sequences: range) -> dict[str, Tensor]:
    """Of minus the weighted log-probabilities of some sequences, 0 for what took no part."""
    model.zero_grad()
    (weights,) = batch.require("loss_weights")
    loss = torch.zeros(())
    for i in sequences:
        span = batch.token_index([i])
        tokens, counts = batch.tokens[span], weights[span]
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        loss = loss - (counts[1:] * logprobs.gather(1, tokens[1:, None]).squeeze(1)).sum()
    loss.backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).double()
        for name, p in model.named_parameters()
    }


@dataclass
class Expected:
    """What each update is to leave behind."""

    parameters: list[dict[str, Tensor]] = field(default_factory=list)  # by Hugging Face name
    grad_norm: list[float] = field(default_factory=list)


def adam(folder: Path, steps: int, *, frozen: bool) -> Expected:
    """AdamW (arXiv:1711.05101) on clipped gradients, in float64."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "moe")
    learned = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not (frozen and name.endswith("mlp.gate.weight"))
    }
    exact = {name: p.detach().double() for name, p in learned.items()}
    first = {name: torch.zeros_like(p) for name, p in exact.items()}
    second = {name: torch.zeros_like(p) for name, p in exact.items()}
    found = Expected()
    half = len(LENGTHS) // MINI_BATCHES
    for update in range(steps * MINI_BATCHES):
        step, part = divmod(update, MINI_BATCHES)
        grads = gradients(model, batch_of(step), range(part * half, (part + 1) * half))
        norm = math.sqrt(sum(float(grads[name].square().sum()) for name in learned))
        for name, p in exact.items():
            g = grads[name] * min(1.0, CLIP / norm)
            lr = rate(update, ROUTER_PEAK if name.endswith("mlp.gate.weight") else PEAK)
            first[name] = BETA1 * first[name] + (1 - BETA1) * g
            second[name] = BETA2 * second[name] + (1 - BETA2) * g * g
            mean = first[name] / (1 - BETA1 ** (update + 1))
            square = second[name] / (1 - BETA2 ** (update + 1))
            p *= 1 - lr * (DECAY if p.ndim > 1 else 0.0)
            p -= lr * mean / (square.sqrt() + EPS)
            learned[name].data.copy_(p)
        # Saved, they get the names of a checkpoint.
        model.save_pretrained(folder / "by hand")
        found.parameters.append(load_file(folder / "by hand" / "model.safetensors"))
        found.grad_norm.append(norm)
    return found


@dataclass(frozen=True)
class Results:
    start: dict[str, Tensor]
    expected: dict[bool, Expected]  # by whether routers are frozen
    found: dict[str, dict[str, Tensor]]  # by case
    folder: Path


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("optimizer")
    asked = asked_for(request, CASES)
    names = [n for n in CASES if n in asked or n in {CASES[name].resumes for name in asked}]
    sizes: dict[str, Any] = {"num_layers": LAYERS, "num_experts": 8, "k": 2, "vocab": VOCAB}
    save_tiny_moe(folder / "moe", **sizes)
    save_tiny_moe(folder / "other", **sizes, seed=1)
    run_ranks(run_cases, 2, folder, names, timeout_s=540)
    return Results(
        load_file(folder / "moe" / "model.safetensors"),
        {f: adam(folder, SAVED_AFTER if f else STEPS, frozen=f) for f in (False, True)},
        {name: load_file(folder / f"{name}.safetensors") for name in names},
        folder,
    )


@pytest.mark.parametrize("case", CASES)
def test_every_update_is_the_one_made_by_hand(results: Results, case: str) -> None:
    found, expected = results.found[case], results.expected[CASES[case].frozen]
    for step in CASES[case].steps:
        for update in range(step * MINI_BATCHES, (step + 1) * MINI_BATCHES):
            assert found[f"{update}/lr"] == pytest.approx(rate(update, PEAK), rel=1e-6)
            norm = pytest.approx(expected.grad_norm[update], rel=1e-4)
            assert found[f"{update}/grad norm"] == norm
            wrong = {}
            for parameter, value in expected.parameters[update].items():
                moved = value - results.start[parameter]
                error = relative_error(found[f"{update}/{parameter}"], value, scale=moved)
                if not error < 1e-3:
                    wrong[parameter] = error
            assert not wrong, f"update {update}"


def test_every_rank_hashes_what_it_wrote(results: Results) -> None:
    saved = results.folder / "pp2 vpp2.checkpoint"
    ranks = [
        json.loads((results.folder / f"pp2 vpp2.{rank}.json").read_text()) for rank in range(2)
    ]
    assert ranks[0].keys() >= {".metadata", "common.pt", "metadata.json"}
    assert ranks[1] and not ranks[0].keys() & ranks[1].keys()
    assert ranks[0] | ranks[1] == entries_of(saved, [path.name for path in saved.iterdir()])


def test_all_that_it_is_to_hold_takes_part(results: Results) -> None:
    expected, frozen = results.expected[False], results.expected[True]
    assert any(norm > 2 * CLIP for norm in expected.grad_norm)
    assert any(norm < CLIP / 2 for norm in expected.grad_norm)
    router = "model.layers.2.mlp.gate.weight"
    assert torch.equal(frozen.parameters[-1][router], results.start[router])
    for name, value in expected.parameters[-1].items():
        assert (value - results.start[name]).abs().max() > 1e-3, name


# On the ranks


def run_cases(rank: int, folder: Path, names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        config = Config.model_validate(
            {
                "algorithm": {"type": "sft"},
                "routing_replay": {"mode": "off"},
                "trainer": {"steps": STEPS, "mini_batches": MINI_BATCHES},
                "policy": {"parallel": case.parallel},
                "optimizer": {
                    "lr": PEAK,
                    "min_lr": FLOOR,
                    "schedule": "cosine",
                    "warmup_steps": WARMUP,
                    "weight_decay": DECAY,
                    "beta1": BETA1,
                    "beta2": BETA2,
                    "eps": EPS,
                    "clip_grad": CLIP,
                    **({"freeze_router": True} if case.frozen else {"router_lr": ROUTER_PEAK}),
                },
            }
        )
        if rank < config.policy.parallel.world_size:
            found = _run_case(rank, folder, name, config)
            if rank == 0:
                save_file(found, folder / f"{name}.safetensors")


def _run_case(rank: int, folder: Path, name: str, config: Config) -> dict[str, Tensor]:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    case = CASES[name]
    model = str(folder / ("other" if case.resumes else "moe"))
    worker = PolicyWorker(config, rank, rendezvous(folder, name), model, torch.device("cpu"))
    if case.resumes:
        worker.load(str(folder / f"{case.resumes}.checkpoint"))
    found: dict[str, Tensor] = {}
    for step in case.steps:
        if name in SAVING and step == SAVED_AFTER:
            with other_settings(worker):
                entries = worker.save(str(folder / f"{name}.checkpoint"))
            (folder / f"{name}.{rank}.json").write_text(json.dumps(entries))
        for number, told in enumerate(_step(worker, batch_of(step))):
            update = step * MINI_BATCHES + number
            found |= {f"{update}/{key}": value for key, value in told.items()}
    destroy_mesh()
    return found


@contextmanager
def other_settings(worker: Any) -> Iterator[None]:
    """As if the run that saves had another configuration."""
    other = {"max_lr": 1.0, "min_lr": 0.5, "betas": (0.1, 0.2), "eps": 1.0, "weight_decay": 9.0}
    own = [{key: group[key] for key in other} for group in worker.optimizer.param_groups]
    for group in worker.optimizer.param_groups:
        group.update(other)
    yield
    for group, settings in zip(worker.optimizer.param_groups, own, strict=True):
        group.update(settings)


def _step(worker: Any, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """What each update tells and leaves."""
    from rltrain.weights.sync.sender import full_tensors

    mesh = worker.mesh
    multiple_of = worker.config.policy.parallel.micro_batch_multiple
    plan = plan_step(list(LENGTHS), MINI_BATCHES, mesh.dp_size, BUDGET, multiple_of)
    assert all(len(cuts[0]) > 1 for cuts in plan.updates), "meant to have several micro-batches"
    worker.begin_step(batch.select(plan.shards[mesh.dp_rank]))
    for cuts in plan.updates:
        updated = worker.update(cuts[mesh.dp_rank], {}, routing="native")
        told = torch.zeros(2) if updated is None else torch.tensor([updated.lr, updated.grad_norm])
        torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
        named = full_tensors(worker.chunks, worker.arch, mesh, torch.float32)
        yield {
            "lr": told[0].clone(),
            "grad norm": told[1].clone(),
            **{key: value.clone() for key, value in named},
        }

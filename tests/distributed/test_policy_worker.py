"""The policy worker on one saved batch of rollouts: every layout does what one rank does.

Tokens, routes, advantages and old log-probabilities are fixed. The routes are drawn at random, so
they are not what the routers would choose: a layout that gave a router another token's routes, or
none, could not agree with one rank. Lengths are chosen so that data-parallel ranks alone would need
different numbers of micro-batches.

Not exercised: NCCL.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import pack_micro_batches, plan_step
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.routing.align import last_rows
from rltrain.verification.pass_file import relative_error
from rltrain.weights.sync.broadcast import BroadcastGroup, SenderLink
from rltrain.weights.sync.links import BroadcastReceiver
from tests.distributed.run_ranks import asked_for, rendezvous, run_ranks
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # one fixture runs all cases

LENGTHS = (30, 2, 17, 16)
BUDGET = 32
LAYERS, EXPERTS, K, VOCAB = 4, 8, 2, 61


@dataclass(frozen=True)
class Case:
    parallel: dict[str, int]
    routing: str = "rollout"
    recompute: str = "none"
    model: str = "moe"

    @property
    def moe_layers(self) -> list[int]:
        return [n for n in range(LAYERS) if n not in MODELS[self.model]]


MODELS: dict[str, list[int]] = {"moe": [], "dense first": [0]}
"""Layers without a router."""
ONE = {"rollout": "one rank, R3", "recorded": "one rank, R2", "native": "one rank, off"}
CASES = {
    ONE["rollout"]: Case({}),
    ONE["recorded"]: Case({}, routing="recorded"),
    ONE["native"]: Case({}, routing="native"),
    "dense first, one rank, R3": Case({}, model="dense first"),
    "dense first, one rank, R2": Case({}, routing="recorded", model="dense first"),
    "R3, recomputed": Case({}, recompute="full"),
    "R3, ep2 over dp2": Case({"dp": 2, "ep": 2}),
    "R3, tp2 ep2 over dp2": Case({"tp": 2, "dp": 2, "ep": 2}),
    "R2, tp2 ep2 over dp2": Case({"tp": 2, "dp": 2, "ep": 2}, routing="recorded"),
    "R3, tp2, recomputed": Case({"tp": 2}, recompute="full"),
    "R3, pp2, recomputed": Case({"pp": 2}, recompute="full"),
    "R3, pp2 uneven": Case({"pp": 2, "first_stage_layers": 1}),
    "R3, pp2 vpp2, recomputed": Case({"pp": 2, "vpp": 2}, recompute="full"),
    "R2, pp2 vpp2": Case({"pp": 2, "vpp": 2}, routing="recorded"),
    "R3, tp2 pp2": Case({"tp": 2, "pp": 2}),
    "R3, pp2 over dp2 ep2": Case({"pp": 2, "dp": 2, "ep": 2}),
    "R3, cp2": Case({"cp": 2}),
    "R2, cp2": Case({"cp": 2}, routing="recorded"),
    "R3, cp2 tp2": Case({"cp": 2, "tp": 2}),
    "R3, cp2 pp2": Case({"cp": 2, "pp": 2}),
    "R3, cp2 ep2": Case({"cp": 2, "ep": 2}),
    "R3, tp2 etp2 ep2 dp2": Case({"tp": 2, "etp": 2, "ep": 2, "dp": 2}),
    # Its first stage has no router at all.
    "dense first, R3, pp2 uneven": Case({"pp": 2, "first_stage_layers": 1}, model="dense first"),
    "dense first, R2, pp2 uneven": Case(
        {"pp": 2, "first_stage_layers": 1}, routing="recorded", model="dense first"
    ),
    "dense first, R3, pp2 vpp2": Case({"pp": 2, "vpp": 2}, model="dense first"),
    "dense first, R2, pp2 vpp2": Case(
        {"pp": 2, "vpp": 2}, routing="recorded", model="dense first", recompute="full"
    ),
}


def one_rank(case: Case) -> str:
    return ONE[case.routing] if case.model == "moe" else f"{case.model}, {ONE[case.routing]}"


REFERENCES = {one_rank(case) for case in CASES.values()}


def saved_batch(layers: int = LAYERS) -> Batch:
    g = torch.Generator().manual_seed(0)
    lens = torch.tensor(LENGTHS)
    n = int(lens.sum())
    response = torch.rand(n, generator=g) < 0.6
    routes = torch.rand(n, layers, EXPERTS, generator=g).topk(K).indices.to(torch.uint8)
    weights = response / response.sum()
    return Batch(
        tokens=torch.randint(VOCAB, (n,), generator=g),
        seq_lens=lens,
        response_mask=response,
        old_logprobs=-4 + 0.1 * torch.randn(n, generator=g),
        advantages=torch.randn(n, generator=g),
        loss_weights=weights,
        rollout_expert_indices=routes,
        route_mask=~last_rows(lens),
    )


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("policy")
    asked = asked_for(request, CASES)
    names = [n for n in CASES if n in asked or n in {one_rank(CASES[name]) for name in asked}]
    for model, dense in MODELS.items():
        sizes: dict[str, Any] = {"num_layers": LAYERS, "num_experts": EXPERTS, "k": K}
        save_tiny_moe(folder / model, **sizes, vocab=VOCAB, dense_layers=dense)
    run_ranks(run_cases, 4, folder, names, timeout_s=540)
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name in names:
        for file in folder.glob(f"{name}.*.safetensors"):
            found[name] |= load_file(file)
    return found


@pytest.mark.parametrize("case", [name for name in CASES if name not in REFERENCES])
def test_equals_one_rank(results: dict[str, dict[str, Tensor]], case: str) -> None:
    expected, found = dict(results[one_rank(CASES[case])]), dict(results[case])
    assert found.keys() == expected.keys()
    for name in {"runners-up", "wide flips"} & found.keys():  # a deficit may lie at a bin's edge
        moved = (expected.pop(name) - found.pop(name)).abs().sum()
        assert moved <= 4, name
    errors = {name: relative_error(found[name], x) for name, x in expected.items()}
    assert not {name: error for name, error in errors.items() if not error < 1e-4}


def test_there_are_wide_flips_to_agree_about(results: dict[str, dict[str, Tensor]]) -> None:
    """The routes of this batch are random: most rows have one, and others have none."""
    found = results[ONE["rollout"]]
    assert 0.1 < found["wide flips"].mean() < 0.9
    assert found["uses"].sum() == LAYERS * K * (sum(LENGTHS) - len(LENGTHS))
    assert (found["runners-up"].sum(1) == 4 * (sum(LENGTHS) - len(LENGTHS))).all()


def test_routes_decide_what_is_computed(results: dict[str, dict[str, Tensor]]) -> None:
    """If replay silently did nothing, R3 would compute what native routing computes."""
    r3, native = results[ONE["rollout"]], results[ONE["native"]]
    moved = (r3["scored"] - native["scored"]).abs().max()
    assert moved > 0.1
    gradients = [name for name in r3 if name.startswith("gradient/") and ".experts." in name]
    assert gradients and all(relative_error(r3[n], native[n]) > 1e-2 for n in gradients)


def test_r2_repeats_its_own_scoring_pass(results: dict[str, dict[str, Tensor]]) -> None:
    """Recorded before the update and replayed in it, with the same weights: native all the way."""
    r2, native = results[ONE["recorded"]], results[ONE["native"]]
    assert torch.equal(r2["scored"], native["scored"])
    assert relative_error(r2["loss"], native["loss"]) < 1e-6


@pytest.mark.parametrize("case", [ONE["rollout"]])
def test_perturbed_routes_move_the_logprobs_after_them_only(
    results: dict[str, dict[str, Tensor]], case: str
) -> None:
    """One row of one layer changes: log-probabilities of later tokens of that sample follow."""
    found = results[case]
    moved = (found["scored"] - found["scored with row 10 rerouted"]).abs() > 1e-6
    assert not moved[:11].any(), "row 10 yields the log-probability of token 11, none before"
    assert moved[11], "the token that row 10 predicts"
    assert not moved[LENGTHS[0] :].any(), "other samples"


# On the ranks


def run_cases(rank: int, folder: Path, names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        values = {"policy": {"parallel": case.parallel, "recompute": case.recompute}}
        if name in ONE.values():
            values["rollout"] = {"quantization": "fp8"}  # changes what is sent, and nothing else
        config = Config.model_validate(values | {"optimizer": {"lr": 1e-2, "eps": 1e-4}})
        if rank < config.policy.parallel.world_size:
            _run_case(rank, folder, name, case, config)


def _run_case(rank: int, folder: Path, name: str, case: Case, config: Config) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker
    from rltrain.verification.observation import whole_gradients
    from rltrain.weights.sync.sender import full_tensors

    cpu = torch.device("cpu")
    worker = PolicyWorker(config, rank, rendezvous(folder, name), str(folder / case.model), cpu)
    mesh, batch = worker.mesh, saved_batch(len(case.moe_layers))
    multiple_of = config.policy.parallel.micro_batch_multiple
    plan = plan_step(list(LENGTHS), 1, mesh.dp_size, BUDGET, multiple_of)
    if mesh.dp_size > 1:
        alone = [
            len(pack_micro_batches([[LENGTHS[i] for i in rows]], BUDGET)[0]) for rows in plan.shards
        ]
        assert len(set(alone)) > 1, f"meant to differ, found {alone}"
    rows = plan.shards[mesh.dp_rank]
    beyond = batch.with_fields(tokens=torch.where(batch.tokens == batch.tokens[0], VOCAB, 0))
    with pytest.raises(ValueError, match=rf"expected ids from 0 to {VOCAB - 1}, .* found {VOCAB}"):
        worker.begin_step(beyond)
    worker.begin_step(batch.select(rows))
    found: dict[str, Tensor] = {}

    index = torch.cat([torch.arange(s, s + n) for s, n in _spans(rows)])

    def score(routing: str, **options: bool) -> Tensor:
        scored = worker.score(plan.scoring[mesh.dp_rank], routing=routing, **options)
        whole = torch.zeros(batch.num_tokens)
        if scored is not None and scored.logprobs is not None:
            whole[index] = scored.logprobs
        torch.distributed.all_reduce(whole)
        if options.get("measure"):
            found.update(_flips(worker, scored, index, batch.num_tokens))
        return whole

    native = case.routing != "rollout"
    found["scored"] = score(
        "native" if native else "rollout", record=case.routing == "recorded", measure=not native
    )
    if not native:
        routes = batch.rollout_expert_indices.clone()
        routes[10, 1] = torch.tensor([e for e in range(EXPERTS) if e not in routes[10, 1]][:K])
        worker.begin_step(batch.with_fields(rollout_expert_indices=routes).select(rows))
        found["scored with row 10 rerouted"] = score("rollout")
        worker.begin_step(batch.select(rows))
    updated = worker.update(plan.updates[0][mesh.dp_rank], {}, routing=case.routing)
    names = ("loss", "tokens", "ratio", "entropy", "kl")
    totals = {} if updated is None else updated.totals
    sums = torch.tensor([totals.get(name, 0.0) for name in names], dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    norm = torch.tensor(0.0 if updated is None else updated.grad_norm)
    torch.distributed.all_reduce(norm, op=torch.distributed.ReduceOp.MAX)
    found |= {"grad norm": norm, **dict(zip(names, sums, strict=True))}
    chunks, arch = worker.chunks, worker.arch
    for key, value in whole_gradients(chunks, arch, mesh).items():
        found[f"gradient/{key}"] = value
    for key, value in full_tensors(chunks, arch, mesh, torch.float32):
        found[f"parameter/{key}"] = value.clone()
    if rank == 0:
        save_file(found, folder / f"{name}.{rank}.safetensors")
    if config.rollout.quantization == "fp8":
        sent = received(worker)
        worker.export_for_engine(str(folder / f"{name}.engine"))
        exported = load_file(folder / f"{name}.engine" / "model.safetensors")
        assert exported.keys() == sent.keys()
        assert sum(t.dtype == torch.float8_e4m3fn for t in sent.values()) > EXPERTS
        assert all(
            torch.equal(exported[n].view(torch.uint8), t.view(torch.uint8)) for n, t in sent.items()
        )
    destroy_mesh()


def received(worker: Any) -> dict[str, Tensor]:
    """What an engine gets of a weight sync by broadcast."""
    sent: dict[str, Tensor] = {}
    meeting, cpu = Rendezvous.local(2), torch.device("cpu")
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(BroadcastGroup, meeting, 1, cpu, 60.0, 60.0)
        worker.join_receivers(SenderLink(meeting, None), [0])
        receiver = BroadcastReceiver({0: joining.result()}, cpu)
        worker.begin_weight_stream("bfloat16", "broadcast", ["cpu"])
        bucket = worker.next_weight_bucket()
        while bucket is not None:
            reading = threads.submit(receiver.read, bucket)
            bucket = worker.next_weight_bucket()
            sent |= dict(reading.result())
        worker.end_weight_stream()
    return sent


def _flips(worker: Any, scored: Any, index: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """What all ranks found out about the routes, added up. Collective."""
    found = {
        "runners-up": torch.zeros(LAYERS, 256),
        "uses": torch.zeros(LAYERS, EXPERTS),
        "wide flips": torch.zeros(num_tokens, LAYERS, K),
    }
    wide = worker.wide_flips(dict.fromkeys(range(LAYERS), WIDE_BIN))
    if scored is not None:
        for layer, flips in scored.agreement.flips.items():
            found["runners-up"][layer] = flips.runners_up
            found["uses"][layer] = flips.uses
        found["wide flips"][index[wide.rows], wide.layers, wide.columns] = 1.0
    for values in found.values():
        torch.distributed.all_reduce(values)
    return found


WIDE_BIN = 80


def _spans(rows: list[int]) -> list[tuple[int, int]]:
    return [(sum(LENGTHS[:r]), LENGTHS[r]) for r in rows]

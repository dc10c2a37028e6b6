"""Whether a layout computes what one rank computes: the ranks' side of `rltrain verify`.

The reference is one rank that runs one sequence at a time, in one chunk, without recomputation. A
layout makes three passes forward and backward, and each is compared with the reference:

- with native routing;
- on the routes that the reference recorded;
- on perturbed routes, where some rows route natively. This pass agrees only if every router
  replays the right rows, in recomputation too.

The reference computes in fp32. For a layout in bf16 its weights are rounded to bf16, and the error
is the root mean square: the largest error of bf16 depends on chance.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.batch import Batch
from rltrain.data.packing import plan_step
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.policy.megatron.megatron_model import build_model
from rltrain.policy.megatron.mesh import Mesh, destroy_mesh, init_mesh
from rltrain.policy.megatron.transformer_options import params_dtype
from rltrain.policy.passes.micro_batch import MicroBatch, cut
from rltrain.policy.passes.passes import ModelOnMesh, score
from rltrain.policy.ranks import rendezvous
from rltrain.routing.align import last_rows
from rltrain.routing.codec import decode, encode
from rltrain.verification.layout_case import MAX_TOKENS, LayoutCase
from rltrain.verification.layout_row import NATIVE, PERTURBED, RECORDED, Row, result_file
from rltrain.verification.observation import Observed, observe
from rltrain.verification.pass_file import relative_error
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.seeded import fill_seeded


def run_reference(rank: int, folder: Path, cases: list[LayoutCase], device: str) -> None:
    """On one rank: what every model of ``cases`` computes, one file each."""
    rank_device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    for case in cases:
        init = rendezvous(folder, f"reference of {case.name}")
        with _model_on_mesh(
            case.alone, rank, init, rank_device, weights=_dtype(case, rank_device)
        ) as model:
            save_file(_reference(case, model, rank_device), _reference_file(folder, case))


def run_cases(rank: int, folder: Path, cases: list[LayoutCase], device: str) -> None:
    """On every rank of one world size: case after case, a JSON file for each that ended."""
    rank_device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    for case in cases:
        with _model_on_mesh(case, rank, rendezvous(folder, case.name), rank_device) as model:
            row = _compare_with_reference(folder, case, model, rank_device)
        if rank == 0:
            file = result_file(folder, case)
            file.with_suffix(".partial").write_text(json.dumps(asdict(row)))
            os.replace(file.with_suffix(".partial"), file)


def _reference(case: LayoutCase, model: ModelOnMesh, device: torch.device) -> dict[str, Tensor]:
    arch, batch = model.arch, _batch(case)
    plan = [[i] for i in range(batch.num_sequences)]
    native = observe(model, batch, _cut(model.mesh, batch, plan, device), replay=False)
    cuts = _cut(model.mesh, batch, plan, device)
    scores = score(model, cuts, batch.num_tokens, replay=False, record=True)
    assert scores.recorded is not None
    recorded = scores.recorded.native
    routes, mask = perturb(decode(recorded), batch.seq_lens, arch.num_experts)
    replayed = batch.with_fields(replay_expert_indices=_encoded(routes, arch), replay_mask=mask)
    perturbed = observe(model, replayed, _cut(model.mesh, replayed, plan, device), replay=True)
    return {
        "routes": recorded,
        "perturbed routes": routes,
        "perturbed mask": mask,
        **_named_tensors(NATIVE, native),
        **_named_tensors(PERTURBED, perturbed),
    }


def perturb(routes: Tensor, seq_lens: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Other experts in about half of the rows; about a tenth of the rows route natively.

    Args:
        routes: int64  # [N, L, K]

    Returns:
        the routes, distinct within a row  # [N, L, K]
        rows that must use them; never the last of a sequence, which has no route  # [N]
    """
    generator = torch.Generator().manual_seed(0)
    n, num_layers, k = routes.shape
    other = torch.rand(n, num_layers, num_experts, generator=generator).topk(k).indices
    changed = torch.rand(n, num_layers, 1, generator=generator) < 0.5
    live = torch.rand(n, generator=generator) < 0.1
    return torch.where(changed, other, routes), ~live & ~last_rows(seq_lens)


def _compare_with_reference(
    folder: Path, case: LayoutCase, model: ModelOnMesh, device: torch.device
) -> Row:
    started = time.monotonic()
    mesh, batch = model.mesh, _batch(case)
    reference = load_file(_reference_file(folder, case))
    multiple_of = case.parallel.micro_batch_multiple
    plan = plan_step(list(case.seq_lens), 1, mesh.dp_size, MAX_TOKENS, multiple_of)
    rows = plan.shards[mesh.dp_rank]
    shard, index = batch.select(rows), batch.token_index(rows)
    layers = [case.arch.moe_layers.index(layer) for layer in model.route_layers]

    def micro_batches(routes: str | None = None, mask: Tensor | None = None) -> list[MicroBatch]:
        replayed = shard
        if routes is not None:
            assert mask is not None
            replayed = shard.with_fields(
                replay_expert_indices=_encoded(reference[routes].long() & 0xFFFF, case.arch)[index][
                    :, layers
                ],
                replay_mask=mask[index],
            )
        return _cut(mesh, replayed, plan.updates[0][mesh.dp_rank], device)

    scores = score(model, micro_batches(), shard.num_tokens, replay=False, record=True)
    assert scores.recorded is not None
    wrong = int((scores.recorded.native != reference["routes"][index][:, layers]).sum())
    errors = {}
    worst = {}
    for name, routes, mask in (
        (NATIVE, None, None),
        (RECORDED, "routes", ~last_rows(batch.seq_lens)),
        (PERTURBED, "perturbed routes", reference["perturbed mask"]),
    ):
        actual = observe(model, shard, micro_batches(routes, mask), replay=routes is not None)
        expected = PERTURBED if name == PERTURBED else NATIVE
        error = relative_error if case.params == "fp32" else rms_error
        errors[name], worst[name] = _largest_errors(
            actual, reference, expected, index, device, error
        )
    num_micro_batches = len(plan.updates[0][mesh.dp_rank])
    reruns = sum(n for chunk in range(len(model.chunks)) for n in model.reruns(chunk).values())
    return Row(
        **errors,
        worst_gradient=worst[PERTURBED],
        wrong_records=int(_over_ranks(float(wrong), device)),
        num_forwards=num_micro_batches * len(model.route_layers),
        num_reruns=num_micro_batches * reruns,
        seconds=time.monotonic() - started,
    )


@contextmanager
def _model_on_mesh(
    case: LayoutCase,
    rank: int,
    init: Rendezvous,
    device: torch.device,
    *,
    weights: torch.dtype | None = None,
) -> Iterator[ModelOnMesh]:
    """The case's model in a process group that ends with the context.

    Args:
        weights: the dtype that values are rounded to, by default that of the parameters
    """
    mesh = init_mesh(case.parallel, rank, case.parallel.world_size, init, device)
    chunks = build_model(case.arch, case.policy, mesh, device=device, routing_replay=True)
    fill_seeded(chunks, case.arch, mesh, weights or _dtype(case, device))
    try:
        yield ModelOnMesh(chunks, case.arch, mesh, case.policy, temperature=1.0)
    finally:
        destroy_mesh()


def _batch(case: LayoutCase) -> Batch:
    """Random tokens; every prediction is in the loss, with a positive or negative weight."""
    generator = torch.Generator().manual_seed(0)
    n = sum(case.seq_lens)
    return Batch(
        tokens=torch.randint(case.arch.vocab_size, (n,), generator=generator),
        seq_lens=torch.tensor(case.seq_lens),
        response_mask=torch.ones(n, dtype=torch.bool),
        loss_weights=torch.randn(n, generator=generator) / n,
    )


def _cut(mesh: Mesh, shard: Batch, plan: list[list[int]], device: torch.device) -> list[MicroBatch]:
    return cut(shard, plan, mesh.token_grid, device)


def _encoded(routes: Tensor, arch: Architecture) -> Tensor:
    return torch.from_numpy(encode(routes.numpy(), arch.num_experts))


def _named_tensors(name: str, actual: Observed) -> dict[str, Tensor]:
    assert actual.logits is not None
    gradients = {f"{name}/gradient/{key}": value for key, value in actual.gradients.items()}
    loss = torch.tensor(actual.loss, dtype=torch.float64)
    return {f"{name}/logits": actual.logits, f"{name}/loss": loss, **gradients}


def _dtype(case: LayoutCase, device: torch.device) -> torch.dtype:
    return params_dtype(case.policy.precision, device)


def rms_error(actual: Tensor, expected: Tensor, *, scale: Tensor | None = None) -> float:
    """Root mean square of the error over that of ``scale``, by default ``expected``.

    An empty tensor, as of a rank without sequences, has error 0.
    """
    if not actual.numel():
        return 0.0
    off = (actual.double() - expected.double()).square().mean().sqrt()
    size = (expected if scale is None else scale).double().square().mean().sqrt()
    return float(off / size) if size else float(off)


def _largest_errors(
    actual: Observed,
    reference: dict[str, Tensor],
    name: str,
    index: Tensor,
    device: torch.device,
    error: Callable[..., float],
) -> tuple[dict[str, float], str]:
    """The largest errors over all ranks, and which parameter's gradient is worst."""
    logits = 0.0
    if actual.logits is not None:
        expected = reference[f"{name}/logits"]
        logits = error(actual.logits, expected[index], scale=expected)
    prefix = f"{name}/gradient/"
    names = {key.removeprefix(prefix) for key in reference if key.startswith(prefix)}
    assert names == actual.gradients.keys(), names ^ actual.gradients.keys()
    gradients = {
        key: error(value, reference[prefix + key]) for key, value in actual.gradients.items()
    }
    loss = error(torch.tensor(actual.loss, dtype=torch.float64), reference[f"{name}/loss"])
    worst = max(gradients, key=lambda key: gradients[key])
    errors = {"logits": logits, "loss": loss, "gradient": gradients[worst]}
    return {key: _over_ranks(value, device) for key, value in errors.items()}, worst


def _over_ranks(value: float, device: torch.device) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _reference_file(folder: Path, case: LayoutCase) -> Path:
    return folder / f"{case.alone.name}.safetensors"

"""One forward and backward pass of some tokens on one layout, with native or saved routes."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config.policy import PolicyConfig
from rltrain.data.packing import plan_step
from rltrain.policy.megatron.megatron_model import build_model
from rltrain.policy.megatron.mesh import init_mesh
from rltrain.policy.passes.micro_batch import MicroBatch, cut
from rltrain.policy.passes.passes import ModelOnMesh, Recorded, Recorder
from rltrain.policy.ranks import rendezvous
from rltrain.routing.codec import decode, encode
from rltrain.verification.observation import observe
from rltrain.verification.pass_file import Pass
from rltrain.verification.routes_file import Routes
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.load import load_huggingface
from rltrain.weights.mapping.seeded import fill_seeded


@dataclass(frozen=True)
class Task:
    """A pass to make and where its results go."""

    arch: Architecture
    weights: Path | None
    """A Hugging Face folder; None: `rltrain.weights.mapping.seeded`."""
    policy: PolicyConfig
    tokens: tuple[tuple[int, ...], ...]
    replay: Path | None
    """Routes to replay; None: the routers choose."""
    routes_out: Path | None
    pass_out: Path
    about: str


def run_task(rank: int, folder: Path, task: Task, device: str) -> None:
    """On every rank; rank 0 writes the files.

    Raises:
        RuntimeError: the routers used other experts than those of the saved routes.
    """
    rank_device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    parallel = task.policy.parallel
    mesh = init_mesh(
        parallel, rank, parallel.world_size, rendezvous(folder, "offline"), rank_device
    )
    chunks = build_model(task.arch, task.policy, mesh, device=rank_device, routing_replay=True)
    if task.weights is None:
        fill_seeded(chunks, task.arch, mesh)
    else:
        load_huggingface(task.weights, chunks, task.arch, mesh)
    _run_pass(ModelOnMesh(chunks, task.arch, mesh, task.policy, temperature=1.0), task, rank_device)


def _run_pass(model: ModelOnMesh, task: Task, device: torch.device) -> None:
    batch = _batch(task.tokens)
    replayed = Routes.load(task.replay) if task.replay is not None else None
    shard, index, micro_batches = _shard(model, batch, replayed, device)
    recorder = Recorder(model, shard.num_tokens)
    observed = observe(model, shard, micro_batches, replay=replayed is not None, recorder=recorder)
    routes = _recorded_routes(model, batch, index, recorder.gathered(), device)
    logprobs = torch.zeros(batch.num_tokens)
    if observed.logprobs is not None and model.mesh.is_output_rank:
        logprobs[index] = observed.logprobs
    logprobs = _sum_over_ranks(logprobs, device)
    if model.mesh.rank:
        return
    if replayed is not None:
        _check_replayed(routes, replayed)
    if task.routes_out is not None:
        routes.save(task.routes_out)
    Pass(
        tokens=batch.tokens,
        seq_lens=batch.seq_lens,
        logprobs=logprobs,
        loss=torch.tensor(observed.loss, dtype=torch.float64),
        gradients=observed.gradients,
        about=task.about,
    ).save(task.pass_out)


def _shard(
    model: ModelOnMesh, batch: Batch, routes: Routes | None, device: torch.device
) -> tuple[Batch, Tensor, list[MicroBatch]]:
    """This data-parallel rank's sequences, where their tokens lie in the batch, and their cuts."""
    mesh, policy = model.mesh, model.policy
    multiple_of = policy.parallel.micro_batch_multiple
    budget = policy.max_tokens_per_micro_batch
    plan = plan_step(batch.seq_lens.tolist(), 1, mesh.dp_size, budget, multiple_of)
    rows = plan.shards[mesh.dp_rank]
    shard, index = batch.select(rows), batch.token_index(rows)
    if routes is not None:
        layers = [routes.layers.index(layer) for layer in model.route_layers]
        shard = shard.with_fields(
            replay_expert_indices=routes.ids[index][:, layers], replay_mask=routes.route_mask[index]
        )
    return shard, index, cut(shard, plan.updates[0][mesh.dp_rank], mesh.token_grid, device)


def _batch(tokens: tuple[tuple[int, ...], ...]) -> Batch:
    """The loss is the mean over all tokens but the first of each sequence."""
    seq_lens = torch.tensor([len(sequence) for sequence in tokens])
    n = int(seq_lens.sum())
    weights = torch.full((n,), 1.0 / (n - len(tokens)))
    weights[seq_lens.cumsum(0) - seq_lens] = 0.0
    return Batch(
        tokens=torch.tensor([token for sequence in tokens for token in sequence]),
        seq_lens=seq_lens,
        response_mask=weights > 0,
        loss_weights=weights,
    )


def _recorded_routes(
    model: ModelOnMesh, batch: Batch, index: Tensor, recorded: Recorded, device: torch.device
) -> Routes:
    """What all ranks recorded. Collective.

    Args:
        index: where the tokens of this rank's shard lie in the batch
    """
    arch = model.arch
    used = torch.zeros(
        batch.num_tokens, len(arch.moe_layers), arch.experts_per_token, dtype=torch.int64
    )
    margins = torch.zeros(used.shape[:2])
    if model.mesh.is_output_rank:
        layers = torch.tensor([arch.moe_layers.index(layer) for layer in model.route_layers])
        rows_and_layers = index.unsqueeze(1), layers.long()
        used[rows_and_layers], margins[rows_and_layers] = decode(recorded.used), recorded.margin
    ids = _sum_over_ranks(used, device).numpy()
    return Routes(
        ids=torch.from_numpy(encode(ids, arch.num_experts)),
        route_mask=torch.ones(batch.num_tokens, dtype=torch.bool),
        seq_lens=batch.seq_lens,
        tokens=batch.tokens,
        layers=arch.moe_layers,
        num_experts=arch.num_experts,
        weight_version=0,
        producer=f"Megatron {version('megatron-core')}",
        margins=_sum_over_ranks(margins, device),
    )


def _check_replayed(used: Routes, replayed: Routes) -> None:
    mask = replayed.route_mask
    wrong = (used.ids != replayed.ids)[mask].any(-1).nonzero()
    if len(wrong):
        token, layer = int(mask.nonzero()[wrong[0, 0]]), replayed.layers[int(wrong[0, 1])]
        raise RuntimeError(
            f"the routers used other experts than the routes have in {len(wrong)} rows and layers, "
            f"the first at token {token}, layer {layer}: replay is broken"
        )


def _sum_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Over all ranks, on the CPU."""
    values = values.to(device)
    dist.all_reduce(values)
    return values.cpu()

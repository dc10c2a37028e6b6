"""The deferred head against the head within the model: the same gradients, each counted once.

Reference is Megatron's own forward pass to all logits, with torch's cross entropy on them. Tied
embeddings get their gradient from two places, on two pipeline stages from two ranks.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.batch import Batch
from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.pass_file import relative_error
from rltrain.weights.mapping.seeded import fill_seeded
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import ARCH, LENGTHS, Layout, forward_backward, sequences

pytestmark = pytest.mark.integration
PARALLEL = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2, "first_stage_layers": 1}}
CASES = [(layout, tied, params) for layout in PARALLEL for tied in (False, True)
         for params in ("fp32", "bf16")]  # fmt: skip
TOLERANCE = {"fp32": 1e-5, "bf16": 6e-2}  # hidden states and their gradients are rounded
ROWS = 7
"""Of the head in a block: more than one block on every rank, the last one smaller."""
KEPT_BYTES = 2 * ROWS * 32 * 4
"""Two blocks' probabilities in fp32, so that others are made again."""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("head")
    run_ranks(compare, 2, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize(("layout", "tied", "params"), CASES)
def test_gradients_are_those_of_a_head_in_the_model(
    errors: dict[str, dict[str, float]], layout: str, tied: bool, params: str
) -> None:
    found = errors[f"{layout} {tied} {params}"]
    assert {"model.embed_tokens.weight", "model.norm.weight"} < found.keys()
    assert ("lm_head.weight" in found) is not tied
    assert {n: e for n, e in found.items() if not e < TOLERANCE[params]} == {}


# On the ranks


def compare(rank: int, folder: Path) -> None:
    for layout, tied, params in CASES:
        parallel = ParallelConfig(**PARALLEL[layout])
        if rank < parallel.world_size:
            found = _errors(rank, folder, parallel, tied, params)
            if rank == 0:
                (folder / f"{layout} {tied} {params}.json").write_text(json.dumps(found))


def _errors(
    rank: int, folder: Path, parallel: ParallelConfig, tied: bool, params: str
) -> dict[str, float]:
    from rltrain.policy.logprobs import logprobs
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.passes import passes
    from rltrain.policy.passes.micro_batch import cut
    from rltrain.verification.observation import observe, whole_gradients

    cpu, arch = torch.device("cpu"), replace(ARCH, tie_embeddings=tied)
    policy = PolicyConfig.model_validate(
        {
            "parallel": parallel,
            "precision": {"params": params},
            "kept_softmax_gib": KEPT_BYTES / 2**30,
        }
    )
    name = f"{parallel.tp} {parallel.pp} {tied} {params}"
    mesh = init_mesh(parallel, rank, parallel.world_size, rendezvous(folder, name), cpu)
    chunks: list[Any] = build_model(arch, policy, mesh, device=cpu, routing_replay=True)
    fill_seeded(chunks, arch, mesh)
    batch = _batch()
    layout = Layout(parallel)
    # The same micro-batches on both sides: in bf16 others round, and route, in another way.
    each = layout.sequences_per_micro_batch
    plan = [list(range(i, i + each)) for i in range(0, len(LENGTHS), each)]
    micro_batches = cut(batch, plan, mesh.token_grid, cpu)
    in_blocks = partial(logprobs.logprobs_of_hidden, block=ROWS * 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "logprobs_of_hidden", in_blocks)
        model = passes.ModelOnMesh(chunks, arch, mesh, policy)
        ours = observe(model, batch, micro_batches, replay=False)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    _, loss = forward_backward(chunks, layout, mesh)
    if mesh.is_last_stage:
        assert abs(float(loss) - ours.loss) < 1e-3
    theirs = whole_gradients(chunks, arch, mesh)
    destroy_mesh()
    return {key: relative_error(ours.gradients[key], value) for key, value in theirs.items()}


def _batch() -> Batch:
    """The loss of `forward_backward`: the mean over all next tokens."""
    lens = torch.tensor(LENGTHS)
    weights = torch.full((int(lens.sum()),), 1.0 / (sum(LENGTHS) - len(LENGTHS)))
    weights[lens.cumsum(0) - lens] = 0.0
    return Batch(
        tokens=torch.cat(sequences(ARCH.vocab_size)),
        seq_lens=lens,
        response_mask=weights > 0,
        loss_weights=weights,
    )

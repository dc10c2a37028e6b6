"""Every layout computes what one rank computes: logits, loss, gradients, and an optimizer step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.config.optimizer import OptimizerConfig
from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.pass_file import relative_error
from rltrain.weights.mapping.seeded import fill_seeded
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import ARCH, LENGTHS, Layout, forward_backward

REFERENCE = "one sequence at a time"
LAYOUTS = {
    REFERENCE: Layout(sequences_per_micro_batch=1),
    "packed": Layout(sequences_per_micro_batch=8),
    "dp2": Layout(ParallelConfig(dp=2)),
    "tp2": Layout(ParallelConfig(tp=2)),
    "dp2 ep2": Layout(ParallelConfig(dp=2, ep=2), sequences_per_micro_batch=4),
    "tp2 ep2": Layout(ParallelConfig(tp=2, ep=2)),
    "tp2 dp2 ep2": Layout(ParallelConfig(tp=2, dp=2, ep=2)),
}
# Clipping is on, so a wrong norm gives a wrong step. eps is above the noise of tiny gradients.
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-4)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(run_layouts, 4, folder)
    found: dict[str, dict[str, Tensor]] = {name: {} for name in LAYOUTS}
    for name in LAYOUTS:
        for file in folder.glob(f"{name}.*.safetensors"):
            found[name] |= load_file(file)
    return found


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != REFERENCE])
def test_equals_one_rank(results: dict[str, dict[str, Tensor]], layout: str) -> None:
    expected, found = results[REFERENCE], results[layout]
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], x) for name, x in expected.items()}
    wrong = {name: error for name, error in errors.items() if not error < 1e-4}
    assert not wrong


def test_something_was_compared(results: dict[str, dict[str, Tensor]]) -> None:
    names = results[REFERENCE].keys()
    assert {f"update 0/logits/{i}" for i in range(len(LENGTHS))} <= names
    experts = [n for n in names if n.startswith("update 1/gradient/model.layers.2.mlp.experts.")]
    assert len(experts) == 3 * ARCH.num_experts
    first, second = (results[REFERENCE][f"update {i}/loss"] for i in (0, 1))
    assert second < first - 0.01


# On the ranks


def run_layouts(rank: int, folder: Path) -> None:
    for name, layout in LAYOUTS.items():
        if rank < layout.parallel.world_size:
            _run_layout(rank, folder, name, layout)


def _run_layout(rank: int, folder: Path, name: str, layout: Layout) -> None:
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.optimizer import build_optimizer, take_step
    from rltrain.verification.observation import whole_gradients
    from rltrain.weights.sync.sender import full_tensors

    cpu = torch.device("cpu")
    policy = PolicyConfig(parallel=layout.parallel)
    init = rendezvous(folder, name)
    mesh = init_mesh(layout.parallel, rank, layout.parallel.world_size, init, cpu)
    chunks = build_model(ARCH, policy, mesh, device=cpu, routing_replay=False)
    fill_seeded(chunks, ARCH, mesh)
    optimizer, learning_rate = build_optimizer(chunks, OPTIMIZER, policy.precision, cpu)
    found: dict[str, Tensor] = {}
    for update in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        logits, found[f"update {update}/loss"] = forward_backward(chunks, layout, mesh)
        found |= {f"update {update}/logits/{i}": x for i, x in logits.items()}
        gradients = whole_gradients(chunks, ARCH, mesh)
        found |= {f"update {update}/gradient/{n}": x for n, x in gradients.items()}
        learning_rate.step()
        found[f"update {update}/norm"] = torch.tensor(take_step(optimizer, chunks))
        weights = full_tensors(chunks, ARCH, mesh, torch.float32)
        found |= {f"update {update}/weight/{n}": x.clone() for n, x in weights}
    save_file(found, folder / f"{name}.{rank}.safetensors")
    destroy_mesh()

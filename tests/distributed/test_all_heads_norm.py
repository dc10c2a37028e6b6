"""The norm over all heads, cut over two ranks: how it counts in a step and lies in a checkpoint.

Logits and gradients are compared with transformers in `test_families` (olmoe).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.config.optimizer import OptimizerConfig
from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.layout_models import QWEN3_LIKE
from rltrain.weights.mapping.seeded import fill_seeded
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import Layout, forward_backward

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
CPU = torch.device("cpu")
ARCH = replace(
    QWEN3_LIKE,
    family="llama",
    num_layers=2,
    qk_norm="all",
    num_experts=0,
    experts_per_token=0,
    expert_size=0,
    moe_layers=(),
)
NORM = "decoder.layers.0.self_attention.q_layernorm"
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("norm")
    (folder / "checkpoint").mkdir()
    run_ranks(run, 2, folder)
    return {file.stem: load_file(file) for file in folder.glob("*.safetensors")}


def test_a_step_on_two_ranks_is_that_on_one(results: dict[str, dict[str, Tensor]]) -> None:
    """The gradient norm counts every rank's share once, and clipping goes by it."""
    for name, expected in results["one"].items():
        torch.testing.assert_close(results["two"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_a_checkpoint_of_two_ranks_is_read_by_one(results: dict[str, dict[str, Tensor]]) -> None:
    found = results["resharded"]
    assert all(torch.equal(x, results["two"][name]) for name, x in found.items())


def test_bfloat16_is_normed_in_fp32(results: dict[str, dict[str, Tensor]]) -> None:
    """As transformers' OlmoeRMSNorm does it, but for what two orders of a sum round differently."""
    found = results["bf16"]
    x = found["x"].float().flatten(1)
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + ARCH.norm_eps)
    expected = found["weight"] * normed.to(torch.bfloat16)
    assert (found["normed"].flatten(1) != expected).float().mean() < 0.01


# On the ranks


def run(rank: int, folder: Path) -> None:
    from rltrain.policy import model_checkpoint as checkpoint
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.optimizer import build_optimizer, take_step
    from rltrain.weights.sync.sender import full_tensors

    def in_layout(name: str, tp: int) -> None:
        parallel = ParallelConfig(tp=tp)
        mesh = init_mesh(parallel, rank, tp, rendezvous(folder, name), CPU)
        policy = PolicyConfig(parallel=parallel)
        chunks = build(mesh, policy)
        fill_seeded(chunks, ARCH, mesh)
        optimizer, rate = build_optimizer(chunks, OPTIMIZER, policy.precision, CPU)
        found = {}
        if name == "resharded":
            checkpoint.load_model(str(folder / "checkpoint"), chunks, optimizer, rate, mesh)
        else:
            chunks[0].zero_grad_buffer()
            forward_backward(chunks, Layout(parallel), mesh)
            rate.step()
            found["gradient norm"] = torch.tensor(take_step(optimizer, chunks))
        if name == "two":
            checkpoint.save_model(str(folder / "checkpoint"), chunks, optimizer, rate, mesh)
        found |= {n: x.clone() for n, x in full_tensors(chunks, ARCH, mesh, torch.float32)}
        if name == "one":
            save_file(in_bfloat16(chunks[0].module), folder / "bf16.safetensors")
        if rank == 0:
            save_file(found, folder / f"{name}.safetensors")
        destroy_mesh()

    in_layout("two", 2)
    if rank == 0:
        in_layout("one", 1)
        in_layout("resharded", 1)


def build(mesh: Any, policy: PolicyConfig) -> list[Any]:
    from rltrain.policy.megatron.megatron_model import build_model

    return build_model(ARCH, policy, mesh, device=CPU, routing_replay=False)


def in_bfloat16(model: torch.nn.Module) -> dict[str, Tensor]:
    norm = model.get_submodule(NORM).to(torch.bfloat16)
    x = 30 * torch.randn(5, ARCH.num_heads, ARCH.head_dim, generator=torch.Generator())
    x = x.to(torch.bfloat16)
    with torch.no_grad():
        return {"x": x, "weight": norm.weight.data, "normed": norm(x)}

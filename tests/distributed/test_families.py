"""Every family against transformers, on one rank and two: forward, backward, import, export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.weights.families import FAMILIES, read_architecture
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import Layout, forward_backward, sequences
from tests.distributed.tiny_families import SIZES, TINY, VOCABULARY, load, save

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
CPU = torch.device("cpu")
LAYOUTS = {
    "one rank": ParallelConfig(),
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "pp2": ParallelConfig(pp=2),
}
Measured = dict[str, dict[str, Any]]
TOLERANCE = 1e-4  # of the largest entry


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in TINY:
        save(name, folder / name)
    run_ranks(run_layouts, 2, folder, timeout_s=900)
    return folder


def run_layouts(rank: int, root: Path) -> None:
    for name in TINY:
        for layout, parallel in LAYOUTS.items():
            if rank < parallel.world_size:
                run_one(rank, root, name, layout)


def run_one(rank: int, root: Path, name: str, layout: str) -> None:
    """Load, one pass, gradients; export where there is one rank."""
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.verification.observation import whole_gradients
    from rltrain.weights.huggingface.export import write_huggingface
    from rltrain.weights.huggingface.load import load_huggingface
    from rltrain.weights.sync.sender import full_tensors

    parallel, folder = LAYOUTS[layout], root / name
    arch = read_architecture(folder / "model")
    # Dense models have no experts to share out.
    if arch.num_experts == 0:
        parallel = parallel.model_copy(update={"ep": 1})
    init = rendezvous(root, f"{name}.{layout}")
    mesh = init_mesh(parallel, rank, parallel.world_size, init, CPU)
    policy = PolicyConfig(parallel=parallel)
    chunks = build_model(arch, policy, mesh, device=CPU, routing_replay=False)
    load_huggingface(folder / "model", chunks, arch, mesh)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    logits, _ = forward_backward(chunks, Layout(parallel), mesh)
    gradients = whole_gradients(chunks, arch, mesh)
    if logits and mesh.tp_rank == 0:
        save_file({str(i): x for i, x in logits.items()}, folder / f"{layout}.logits.safetensors")
    if rank == 0:
        save_file(gradients, folder / f"{layout}.gradients.safetensors")
    if parallel.world_size == 1:
        tensors = full_tensors(chunks, arch, mesh, torch.float32)
        write_huggingface(folder / "exported", folder / "model", tensors, arch, torch.float32)
        if arch.mtp_layers:
            arch = read_architecture(folder / "model", "skip")
            chunks = build_model(arch, policy, mesh, device=CPU, routing_replay=False, ddp=False)
            load_huggingface(folder / "model", chunks, arch, mesh)
            tensors = full_tensors(chunks, arch, mesh, torch.float32)
            target = folder / "without MTP"
            write_huggingface(target, folder / "model", tensors, arch, torch.float32)
    destroy_mesh()


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest entry, by name."""
    assert found.keys() == expected.keys()
    return {
        key: float((found[key] - x).abs().max() / x.abs().max().clamp(min=1e-8))
        for key, x in expected.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(
    root: Path, name: str, layout: str, measured: Measured
) -> None:
    expected = load_file(root / name / "logits.safetensors")
    found = load_file(root / name / f"{layout}.logits.safetensors")
    error = max(errors(found, expected).values())
    measured[name][f"logits {layout}"] = error
    assert error < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TINY)
def test_gradients_are_those_of_transformers(
    root: Path, name: str, layout: str, measured: Measured
) -> None:
    expected = load(root / name / "gradients")
    found = load_file(root / name / f"{layout}.gradients.safetensors")
    error = max(errors(found, expected).values())
    measured[name][f"gradients {layout}"] = error
    assert error < TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_import_then_export_is_bitwise_and_loads_in_transformers(
    root: Path, name: str, measured: Measured
) -> None:
    original, exported = (load(root / name / folder) for folder in ("model", "exported"))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[n], x) for n, x in original.items())
    loaded: Any
    loaded, info = AutoModelForCausalLM.from_pretrained(
        root / name / "exported", dtype="auto", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys"))
    behind = f"model.layers.{loaded.config.num_hidden_layers}."  # transformers has no MTP layers
    assert all(name.startswith(behind) for name in info["unexpected_keys"])
    expected = load_file(root / name / "logits.safetensors")
    with torch.no_grad():
        found = [loaded.eval()(tokens[None]).logits[0] for tokens in sequences(VOCABULARY)]
    by_number = {str(i): logits for i, logits in enumerate(found)}
    assert max(errors(by_number, expected).values()) < 1e-5  # other kernels without gradients
    measured[name]["export"] = "bitwise"


@pytest.mark.parametrize("name", [name for name in TINY if name.endswith("MTP")])
def test_skipped_mtp_layers_are_in_no_export(root: Path, name: str) -> None:
    original, exported = (load(root / name / folder) for folder in ("model", "without MTP"))
    left_out = {n for n in original if n.startswith(f"model.layers.{SIZES['num_hidden_layers']}.")}
    assert left_out and exported.keys() == original.keys() - left_out
    assert all(torch.equal(x, original[n]) for n, x in exported.items())
    for folder, layers in (("exported", 1), ("without MTP", 0)):
        config = json.loads((root / name / folder / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == layers


def test_every_family_is_tried() -> None:
    assert {name.split(",")[0] for name in TINY} == FAMILIES.keys()

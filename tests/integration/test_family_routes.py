"""Every family with experts in the engine and in the policy: the same routes, and replay of others.

The engine samples in fp32 and in bf16. One Megatron rank, in fp32, reads what was sampled, natively
and on the routes of the bf16 engine.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.routes_difference import Difference, compare_routes
from rltrain.verification.routes_file import Routes
from rltrain.weights.families import read_architecture
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny_families import BF16_ALONE, WITH_EXPERTS, make
from tests.integration.family_engine import PROMPT_TOKENS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
# Of routing scores. Sums in another order make 1e-6; bf16 keeps 8 bits of numbers of about 1.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.1}
SCALE = 0.15
MOST_FLIPS = {"float32": 1e-3, "bfloat16": 0.05}
Measured = dict[str, dict[str, Any]]
SAMPLED = {
    "float32": [name for name in WITH_EXPERTS if name not in BF16_ALONE],
    "bfloat16": WITH_EXPERTS,
}
QUICK = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""The families of `make test`: softmax, sinks with biases, and groups with sigmoid scores."""
PASSES = {"float32": None, "bfloat16": None, "replayed": "bfloat16"}


def of(names: Sequence[str], *more: str) -> list[Any]:
    """The parameters of a test."""
    return [pytest.param(n, *more, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family of the chosen tests."""
    folder = tmp_path_factory.mktemp("routes")
    here = [item for item in request.session.items if item.path == request.path]
    for name in {
        item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)
    }:
        make(name, SCALE).save_pretrained(folder / name / "made")
    run_ranks(export_models, 1, folder, timeout_s=600)
    command = [sys.executable, "-m", "tests.integration.family_engine"]
    for dtype, names in SAMPLED.items():
        folders = [str(folder / name) for name in made_of(folder, names)]
        subprocess.run([*command, dtype, "1.0", *folders], check=True, timeout=600)
    run_ranks(make_passes, 1, folder, timeout_s=600)
    return folder


def made_of(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if (folder / name).is_dir()]


def export_models(rank: int, root: Path) -> None:
    """``model/``, which the engines start from, is what rltrain exports of what was made."""
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.policy.megatron.mesh import init_mesh
    from rltrain.weights.huggingface.export import write_huggingface
    from rltrain.weights.huggingface.load import load_huggingface
    from rltrain.weights.sync.sender import full_tensors

    cpu = torch.device("cpu")
    mesh = init_mesh(ParallelConfig(), rank, 1, rendezvous(root, "export"), cpu)
    for name in made_of(root, WITH_EXPERTS):
        made = root / name / "made"
        arch = read_architecture(made)
        chunks = build_model(
            arch, PolicyConfig(), mesh, device=cpu, routing_replay=False, ddp=False
        )
        load_huggingface(made, chunks, arch, mesh)
        tensors = full_tensors(chunks, arch, mesh, torch.float32)
        write_huggingface(root / name / "model", made, tensors, arch, torch.float32)


def make_passes(rank: int, root: Path) -> None:
    """``PASS.pass.safetensors`` and ``PASS.recorded.safetensors`` of every family."""
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.verification.offline_pass import Task, run_task

    for name in made_of(root, WITH_EXPERTS):
        folder = root / name
        for made, replayed in PASSES.items():
            if name not in SAMPLED[replayed or made]:
                continue
            tokens = Routes.load(folder / f"{replayed or made}.routes.safetensors")
            samples = tokens.tokens.split(tokens.seq_lens.tolist())
            task = Task(
                arch=read_architecture(folder / "model"),
                weights=folder / "model",
                policy=PolicyConfig(),
                tokens=tuple(tuple(sample.tolist()) for sample in samples),
                replay=folder / f"{replayed}.routes.safetensors" if replayed else None,
                routes_out=folder / f"{made}.recorded.safetensors",
                pass_out=folder / f"{made}.pass.safetensors",
                about=f"{name}, {made}",
            )
            (scratch := folder / f"{made}.ranks").mkdir()
            run_task(rank, scratch, task, "cpu")
            destroy_mesh()


@dataclass(frozen=True)
class Mismatch:
    """Of the log-probabilities of sampled tokens, policy less engine."""

    mean: float
    largest: float
    k3: float


def differences(folder: Path, made: str, dtype: str) -> Tensor:
    """Of every sampled token's log-probability, policy less engine."""
    from rltrain.verification.pass_file import Pass

    found = Pass.load(folder / f"{made}.pass.safetensors")
    expected = load_file(folder / f"{dtype}.logprobs.safetensors")["logprobs"]
    length = int(found.seq_lens[0])
    sampled = torch.arange(len(expected)) % length >= PROMPT_TOKENS
    return (found.logprobs - expected)[sampled].double()


def k3(difference: Tensor) -> Tensor:
    return difference.exp() - 1 - difference


def mismatch(difference: Tensor) -> Mismatch:
    mean, largest = difference.abs().mean(), difference.abs().max()
    return Mismatch(float(mean), float(largest), float(k3(difference).mean()))


def routes_apart(folder: Path, dtype: str) -> Difference:
    engine = Routes.load(folder / f"{dtype}.routes.safetensors")
    policy = Routes.load(folder / f"{dtype}.recorded.safetensors")
    return compare_routes(engine, policy, NEAR_TIE[dtype])


@pytest.mark.parametrize(("name", "dtype"), [pair for d in SAMPLED for pair in of(SAMPLED[d], d)])
def test_only_near_ties_are_routed_otherwise(
    root: Path, name: str, dtype: str, measured: Measured
) -> None:
    apart = routes_apart(root / name, dtype)
    rows = len(apart.layers) * apart.num_rows
    differing = sum(layer.differing for layer in apart.layers)
    measured[name][f"flips {dtype}"] = differing / rows
    assert apart.unexplained == 0
    assert differing < rows * MOST_FLIPS[dtype]


@pytest.mark.parametrize("name", of(WITH_EXPERTS))
def test_log_probabilities_agree_once_routes_do(root: Path, name: str, measured: Measured) -> None:
    native = differences(root / name, "bfloat16", "bfloat16")
    replayed = differences(root / name, "replayed", "bfloat16")
    for kind, found in (("native", native), ("replayed", replayed)):
        measured[name][f"mismatch {kind}"] = asdict(mismatch(found))
    assert mismatch(replayed).mean < 4e-3 and mismatch(replayed).largest < 2e-2
    # Where no flip matters both are rounding, and which one is larger is the processor's matter.
    more = k3(replayed) - k3(native)
    assert more.mean() <= 2 * more.std() / len(more) ** 0.5


@pytest.mark.parametrize("name", of(SAMPLED["float32"]))
def test_in_fp32_log_probabilities_agree(root: Path, name: str, measured: Measured) -> None:
    found = mismatch(differences(root / name, "float32", "float32"))
    measured[name]["mismatch float32"] = asdict(found)
    assert found.mean < 5e-7 and found.largest < 3e-6

"""Hugging Face folder to checkpoint and back, from any layout, through kills, without a model's
memory. Megatron reads in two layouts what one process without Megatron wrote, and the reverse."""

import ctypes
import json
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.convert import Memory, Silent, Size, make_model
from rltrain.cli.app import main
from rltrain.config import Config
from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.layout_models import MODELS
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters, read_architecture
from rltrain.weights.huggingface.export import export_checkpoint, write_safetensors
from rltrain.weights.huggingface.import_checkpoint import import_huggingface
from rltrain.weights.huggingface.manifest import check_manifest, write_manifest
from rltrain.weights.huggingface.stored_model import StoredModel
from rltrain.weights.mapping.mtp import with_mtp_copies
from rltrain.weights.mapping.seeded import seeded_tensor
from tests.distributed.run_ranks import rendezvous, run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
CPU = torch.device("cpu")
SEEDED = "deepseek mtp"
NAMES = ("qwen3", "qwen2_moe", "mixtral", "qwen3_moe", "gpt_oss", SEEDED)
"""Dense and tied; biases, a shared expert and a dense layer; other names; the usual; all experts as
one tensor, transposed; latent attention, an expert bias and layers that predict further tokens."""
SAVED = ("qwen3", SEEDED)
"""Megatron keeps all layers of a dense model as one tensor, and those of the other apart."""
LAYOUTS = {"tp2 ep2": ParallelConfig(tp=2, ep=2), "pp2": ParallelConfig(pp=2)}
MAX_FILE = 100_000  # several files each


def arch_of(root: Path, name: str) -> Architecture:
    return MODELS[name] if name == SEEDED else read_architecture(root / name / "model")


def save_model(root: Path, name: str) -> None:
    """bf16 but for the dense one, and for the fp32 buffer of the seeded one."""
    folder = root / name / "model"
    if name == SEEDED:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"dtype": "bfloat16"}')
        tensors = {
            t.name: seeded_tensor(t) if p.rule.kind == "buffer" else seeded_tensor(t).bfloat16()
            for p in model_parameters(MODELS[name])
            for t in p.tensors
        }
        write_safetensors(folder, with_mtp_copies(tensors.items(), MODELS[name]), 10**9)
        return
    from tests.distributed.tiny_families import make  # transformers, which no child process needs

    model = make(name)
    (model if name == "qwen3" else model.bfloat16()).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model, imported and exported; then what two ranks make of it in two layouts."""
    from rltrain.policy.megatron.checkpoint_probe import stored_model

    folder = tmp_path_factory.mktemp("convert")
    for name in NAMES:
        save_model(folder, name)
        model, arch = folder / name, arch_of(folder, name)
        stored = stored_model(arch)
        (model / "stored.json").write_text(stored.to_json())
        run = Silent()
        import_huggingface(model / "model", model / "imported", arch, stored, run, MAX_FILE)
        config = model / "imported" / "huggingface"
        export_checkpoint(
            model / "imported", config, model / "exported", arch, stored, run, MAX_FILE
        )
    run_ranks(compare_and_save, 2, folder, timeout_s=600)
    return folder


def stored_of(root: Path, name: str) -> StoredModel:
    return StoredModel.from_json((root / name / "stored.json").read_text())


def compare_and_save(rank: int, root: Path) -> None:
    """On two ranks, in both layouts: the imported weights are those of the Hugging Face folder.

    Then a checkpoint as a run would save it, with the optimizer's state.
    """
    from rltrain.config.optimizer import OptimizerConfig
    from rltrain.policy import model_checkpoint as checkpoint
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.optimizer import build_optimizer
    from rltrain.weights.huggingface.load import load_huggingface

    for name in NAMES:
        for layout, parallel in LAYOUTS.items():
            arch = arch_of(root, name)
            if arch.num_experts == 0:
                parallel = parallel.model_copy(update={"ep": 1})
            mesh = init_mesh(parallel, rank, 2, rendezvous(root, f"{name}.{layout}"), CPU)
            policy = PolicyConfig(parallel=parallel)
            expected, found = (
                build_model(arch, policy, mesh, device=CPU, routing_replay=False) for _ in range(2)
            )
            load_huggingface(root / name / "model", expected, arch, mesh)
            checkpoint.load_weights(str(root / name / "imported" / "policy"), found, mesh)
            for a, b in zip(expected, found, strict=True):
                assert_same(dict(b.state_dict()), dict(a.state_dict()))
            if name in SAVED:
                folder = root / name / layout / "policy"
                if rank == 0:
                    folder.mkdir(parents=True)
                torch.distributed.barrier()
                optimizer, rate = build_optimizer(found, OptimizerConfig(), policy.precision, CPU)
                checkpoint.save_model(str(folder), found, optimizer, rate, mesh)
            destroy_mesh()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor is not None:
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", NAMES)
def test_import_then_export_is_bitwise(root: Path, name: str) -> None:
    model, exported = root / name / "model", root / name / "exported"
    assert len(list(exported.glob("model-*-of-*.safetensors"))) > 1
    assert_same(load(exported), load(model))
    for file in ("config.json", "tokenizer.json"):
        if (model / file).exists():
            assert (exported / file).read_bytes() == (model / file).read_bytes()
    assert not list((root / name).glob(".*"))
    check_manifest(root / name / "imported")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SAVED)
def test_a_run_s_checkpoint_of_any_layout_exports(root: Path, name: str, layout: str) -> None:
    """With the vocabulary's padding cut off again; fp32, as the run had it, and bf16 if asked."""
    checkpoint, model = root / name / layout, root / name / "model"
    write_manifest(checkpoint)
    expected = load(model)
    for dtype in (None, torch.bfloat16):
        out = root / name / f"{layout}.{dtype}"
        stored, arch = stored_of(root, name), arch_of(root, name)
        export_checkpoint(checkpoint, model, out, arch, stored, Silent(), MAX_FILE, dtype)
        wanted = {
            n: t.to(dtype or torch.float32) if "e_score" not in n else t
            for n, t in expected.items()
        }
        assert_same(load(out), wanted)
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == str(dtype or torch.float32).removeprefix("torch.")


# What is interrupted


def in_child(fn: Callable[..., None], *args: object) -> int | None:
    """Exit code of ``fn`` in a process of its own."""
    child = multiprocessing.get_context("forkserver").Process(target=fn, args=args)
    child.start()
    child.join(60)
    return child.exitcode


class KilledAfter:
    """Kills this process when so many bytes are written."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def advance(self, elements: int, nbytes: int) -> None:
        self.left -= nbytes
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def convert(root: Path, what: str, out: Path, progress: object) -> None:
    name = "qwen3_moe"
    model, arch, stored = root / name, arch_of(root, name), stored_of(root, name)
    if what == "import":
        import_huggingface(model / "model", out, arch, stored, progress, MAX_FILE)
    else:
        config = model / "imported" / "huggingface"
        export_checkpoint(model / "imported", config, out, arch, stored, progress, MAX_FILE)


def killed(root: Path, what: str, out: Path) -> None:
    convert(root, what, out, KilledAfter(500_000))


@pytest.mark.parametrize("what", ["import", "export"])
def test_killed_in_the_middle_it_starts_again_and_writes_the_same_bytes(
    root: Path, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "out"
    assert in_child(killed, root, what, out) == -signal.SIGKILL
    assert files_of(tmp_path / ".out.partial") and not out.exists()
    convert(root, what, out, Silent())
    assert list(tmp_path.iterdir()) == [out]
    assert files_of(out) == files_of(root / "qwen3_moe" / f"{what}ed")
    with pytest.raises(ValueError, match="exists already"):
        convert(root, what, out, Silent())


def files_of(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder): file.read_bytes() for file in files}


class Touched:
    """Another process writes ``file`` while it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def advance(self, elements: int, nbytes: int) -> None:
        os.utime(self.file)


def test_a_source_that_changes_meanwhile_is_refused(root: Path, tmp_path: Path) -> None:
    source = next((root / "qwen3_moe" / "model").glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"model changed while it was read"):
        convert(root, "import", tmp_path / "out", Touched(source))
    assert not list(tmp_path.iterdir())


# The commands


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """A disk that is full, as far as a file can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_commands(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, imported = root / "qwen3_moe" / "model", tmp_path / "imported"
    with files_no_larger_than(250_000):
        assert main(["import", str(source), str(imported)]) == 1
    error = capsys.readouterr().err
    assert "File too large" in error and "run the same command again" in error
    assert not list(tmp_path.iterdir())
    assert main(["import", str(source), str(imported)]) == 0
    assert "import  0.00 GB" in capsys.readouterr().err
    assert main(["import", str(source), str(imported)]) == 2
    assert "exists already" in capsys.readouterr().err

    out = tmp_path / "out"
    with files_no_larger_than(250_000):
        assert main(["export", str(imported), str(out)]) == 1
    assert "File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [imported]
    assert main(["export", str(imported), str(out), "--dtype", "float32"]) == 0
    assert_same(load(out), {n: t.float() for n, t in load(source).items()})
    assert main(["export", str(imported), str(tmp_path / "no"), "--step", "3"]) == 2
    assert "has no steps" in capsys.readouterr().err
    part = imported / "policy" / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert main(["export", str(imported), str(tmp_path / "no")]) == 2
    assert "its content is not what manifest.json says" in capsys.readouterr().err
    assert not list(tmp_path.glob("*no*"))


def worker_starts(rank: int, root: Path) -> None:
    """A policy worker that is told of imported weights has those, and no others."""
    from rltrain.policy.worker import PolicyWorker

    path = root / "qwen3_moe"
    # Its own folder has other weights, so that reading them would show.
    model = {"path": str(path / "other"), "weights": str(path / "imported")}
    config = Config.model_validate(
        {"model": model, "algorithm": {"type": "sft"}, "routing_replay": {"mode": "off"}}
    )
    worker = PolicyWorker(config, rank, rendezvous(root, "worker"), model["path"], CPU)
    worker.export(str(root / "from worker"), "bfloat16")


def test_a_run_starts_from_imported_weights(root: Path) -> None:
    path = root / "qwen3_moe"
    shutil.copytree(path / "model", path / "other")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load(path / "model").items()}
    write_safetensors(path / "other", iter(zeros.items()), 10**9)
    run_ranks(worker_starts, 1, root)
    assert_same(load(root / "from worker"), load(path / "model"))


# Memory


M_MMAP_THRESHOLD = -3  # of malloc.h
MMAP_THRESHOLD = 128 * 1024


def return_freed_memory() -> None:
    """From here on this process's memory is what it holds.

    By default glibc keeps freed blocks of up to 32 MiB for later allocations. How much it keeps
    differs from run to run, and with files this small it is more than what is held.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) == 1


def stay_small(root: Path, out: Path) -> None:
    """Both ways, anonymous memory grows by less than twice the size of a file."""
    return_freed_memory()
    arch = read_architecture(root / "source")
    stored = StoredModel.from_json((root / "stored.json").read_text())
    total = sum(file.stat().st_size for file in (root / "source").iterdir())
    max_file = total // 10
    torch.set_num_threads(1)
    peaks = []
    for what in ("import", "export"):
        with Memory() as memory:
            if what == "import":
                import_huggingface(root / "source", out / "in", arch, stored, Silent(), max_file)
            else:
                config = out / "in" / "huggingface"
                export_checkpoint(out / "in", config, out / "out", arch, stored, Silent(), max_file)
        peaks.append(memory.peak)
    assert max(peaks) < 2 * max_file, (peaks, max_file)


def test_memory_is_that_of_a_file(tmp_path: Path) -> None:
    """150 MB in files of 15; the largest parameter, the embedding, has 8 MB."""
    from rltrain.policy.megatron.checkpoint_probe import stored_model

    size = Size(layers=4, hidden=512, experts=16, expert_size=768, vocab_size=8192, shard_mib=16)
    arch = make_model(tmp_path / "source", size)
    (tmp_path / "stored.json").write_text(stored_model(arch).to_json())
    assert in_child(stay_small, tmp_path, tmp_path) == 0

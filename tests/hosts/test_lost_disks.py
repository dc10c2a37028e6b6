"""Checkpoints where no two hosts share a disk: ranks on B and C, the controller on A.

Supervised runs, since the disks see no difference. Not exercised: disks that are full.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hosts.stage import RUN, Run, Stage

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

OPTIONS = ("+recipe=sft_tiny", "policy.parallel.pp=2", "cluster.cpus_per_rank=2")
OPTIONS += ("trainer.eval_every=0", "tracking.backends=[]", "checkpoint.every=2")
OPTIONS += ("policy.threads=1", "checkpoint.keep=3")


def started(three: Stage, folder: Path, *more: str, steps: int) -> Run:
    address = f"cluster.address={three.address}"
    return three.start(*OPTIONS, address, f"trainer.steps={steps}", *more, folder=folder)


def files(three: Stage, folder: Path) -> list[list[str]]:
    """By host, the files of tensors in the checkpoints of a run."""
    found = []
    for host in three.hosts:
        at = host.path(folder / "checkpoints")
        found.append(sorted(str(path.relative_to(at)) for path in at.glob("step_*/*/*.distcp")))
    return found


def killed_after(three: Stage, run: Run, step: int) -> None:
    """Its command alone: the nodes find out by themselves."""
    run.wait_for_step(step)
    head = three.hosts[0]
    for pid, line in head.processes().items():
        if "rltrain.main" in line:
            subprocess.run(head.command(["kill", "-9", str(pid)]), check=True, timeout=60)
    run.process.wait(60)


def model_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model/model.safetensors")


def test_a_killed_run_goes_on_bitwise_on_local_disks_and_names_a_lost_one(
    real_hosts: None, three: Stage
) -> None:
    straight = started(three, Path("/tmp/straight"), steps=6).wait()
    killed_after(three, started(three, RUN, steps=1000), 3)
    on_a, on_b, on_c = files(three, RUN)
    assert on_a == [] and on_b and on_c and not set(on_b) & set(on_c)
    resumed = started(three, RUN, "trainer.resume=auto", steps=6).wait()
    assert "resumed after step 2" in resumed.output
    expected, found = model_of(straight), model_of(resumed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    saved = RUN / "checkpoints/step_000006"
    manifest = json.loads(three.hosts[0].path(saved / "manifest.json").read_text())
    for host, mine in zip(three.hosts, files(three, RUN), strict=True):
        listed = {name for name, entry in manifest.items() if entry.get("place") == host.address}
        shards = {f"{saved.name}/{name}" for name in listed if name.endswith(".distcp")}
        assert shards == {name for name in mine if name.startswith(saved.name)}

    # Ranks of another layout read what others wrote; then files on a disk are gone.
    moved = ("trainer.resume=auto", "policy.parallel.pp=1", "policy.parallel.dp=2")
    started(three, RUN, *moved, steps=8).wait()
    having = [any("step_000008" in name for name in mine) for mine in files(three, RUN)]
    lost = three.hosts[having.index(True)]
    shutil.rmtree(lost.path(RUN / "checkpoints/step_000008/policy"))
    older = started(three, RUN, "trainer.resume=auto", steps=9).wait()
    where = rf"step_000008( on {re.escape(lost.address)})?"  # the controller's has no name
    assert re.search(rf"{where}: its manifest and its files differ: missing", older.output)
    assert "going on from the checkpoint of step 6 instead" in older.output
    assert lost.path(RUN / "checkpoints/set_aside/step_000008").is_dir()


def test_a_run_goes_on_from_a_url_on_empty_disks(real_hosts: None, three: Stage) -> None:
    url = f"checkpoint.url=file://{three.shared}/bucket"
    started(three, Path("/tmp/first"), url, steps=4).wait()
    assert files(three, Path("/tmp/first")) == [[], [], []]
    again = started(three, Path("/tmp/second"), url, "trainer.resume=auto", steps=6).wait()
    assert "resumed after step 4" in again.output
    assert files(three, Path("/tmp/second")) == [[], [], []]


@pytest.mark.parametrize(
    ("choice", "said"),
    [("checkpoint.storage=shared", "RL6010"), ("model.path=/tmp/model", "RL4021")],
)
def test_what_a_node_lacks_is_said_before_anything_starts(
    real_hosts: None, three: Stage, choice: str, said: str
) -> None:
    copy_model(three)
    run = started(three, Path(f"/tmp/refused-{said}"), choice, steps=2).wait(expect=1)
    assert said in run.output and three.hosts[1].address in run.output
    assert "is loaded" not in run.output


def copy_model(three: Stage) -> None:
    """To A alone, from where the runs before have built it."""
    home = three.hosts[0].path("/tmp/home")
    found = next(iter(home.rglob("tiny-random-*/config.json")))
    shutil.copytree(found.parent, three.hosts[0].path("/tmp/model"), dirs_exist_ok=True)

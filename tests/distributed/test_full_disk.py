"""The disk of one rank is full at some point of a save: every rank raises, and goes on.

Ranks write to disks of their own, as on nodes that share none. One of them is a small tmpfs that
holds so many pages less than the rank writes.

Not exercised: NCCL.
"""

import errno
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rltrain.config import Config
from rltrain.controller.checkpoint_space import planned
from rltrain.weights.families import read_architecture
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.test_optimizer import _step, batch_of
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = [0, 0, 0, 0, 1, 1]
"""Whose disk is full, in one save after the other."""
PAGE, DISK = os.sysconf("SC_PAGE_SIZE"), 2**24
CONFIG = {
    "algorithm": {"type": "sft"},
    "routing_replay": {"mode": "off"},
    "trainer": {"steps": 4, "mini_batches": 2},
    "policy": {"parallel": {"tp": 2}},
}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_all_ranks_raise_and_are_usable_wherever_one_finds_a_full_disk(
    small: Path, tmp_path: Path
) -> None:
    save_tiny_moe(tmp_path / "moe", num_layers=2, num_experts=4, k=2, vocab=61)
    run_ranks(fill_and_save, 2, tmp_path, small, timeout_s=120)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for of_rank in found:
        assert {failure["errno"] for failure in of_rank["failures"]} == {errno.ENOSPC}
        assert max(failure["seconds"] for failure in of_rank["failures"]) < 20
        assert of_rank["after"].keys() == of_rank["whole"].keys()
        tensors = [name for name in of_rank["whole"] if name.endswith(".distcp")]
        for name in tensors:
            assert of_rank["after"][name]["bytes"] == of_rank["whole"][name]["bytes"]
        assert any(of_rank["after"][name] != of_rank["whole"][name] for name in tensors)
    said = [failure["said"] for failure in found[0]["failures"]]
    assert said == [failure["said"] for failure in found[1]["failures"]]
    assert [text[:31] for text in said] == [f"rank {n}: No space left on device" for n in RANKS]
    left = [failure["files"] for failure in found[0]["failures"][:4]]
    assert "common.pt" not in left[0]  # they fail in one after the other
    assert "common.pt" in left[1] and ".metadata.tmp" not in left[1]
    assert ".metadata.tmp" in left[2] and ".metadata" in left[3]
    config = Config.model_validate(CONFIG)
    plan = planned(config, read_architecture(tmp_path / "moe", config.model.mtp))
    written = sum(entry["bytes"] for of_rank in found for entry in of_rank["whole"].values())
    weights = sum(found[rank]["weights"] for rank in range(2))
    # On a CPU the plan takes weights for bf16, which are fp32. These tensors are small.
    assert 0.4 * written < plan.whole < written and 0.2 * weights < plan.weights < weights


# On the ranks


def fill_and_save(rank: int, folder: Path, small: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    config = Config.model_validate(CONFIG)
    path = str(folder / "moe")
    worker = PolicyWorker(config, rank, rendezvous(folder, "full"), path, torch.device("cpu"))
    own = folder / f"disk-{rank}"
    whole = worker.save(str(own / "whole"))
    pages = sum(-(-entry["bytes"] // PAGE) for entry in whole.values())
    all_pages: list[int] = [0, 0]
    torch.distributed.all_gather_object(all_pages, pages)
    failures = []
    for full, needed in enumerate(all_pages):
        # Rank 0 begins with common.pt, and ends with .metadata and metadata.json.
        for left in (0, needed // 2, needed - 3, needed - 1)[:: 1 if full == 0 else 3]:
            if rank == full:
                fill(small, left)
            torch.distributed.barrier()
            target = (small if rank == full else own) / f"{full}-{left}"
            failures.append(failure_of(worker, target))
    assert len(list(_step(worker, batch_of(0)))) == 2
    after = worker.save(str(own / "after"))
    weights = sum(e["bytes"] for e in worker.save_weights(str(own / "weights")).values())
    destroy_mesh()
    found = {
        "failures": failures,
        "whole": whole,
        "after": after,
        "weights": weights,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


def failure_of(worker, target: Path) -> dict[str, object]:
    began = time.monotonic()
    try:
        worker.save(str(target / "policy"))
    except OSError as error:
        seconds = time.monotonic() - began
        files = [path.name for path in target.glob("policy/*")]
        return {"errno": error.errno, "said": error.strerror, "seconds": seconds, "files": files}
    return {"errno": 0, "said": f"nothing: {target}", "seconds": 0.0, "files": []}


def fill(small: Path, pages: int) -> None:
    """Leave so many pages free."""
    for path in sorted(small.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (small / "filler").write_bytes(bytes(DISK - pages * PAGE))

"""A checkpoint in the background has the state in which it was begun, whatever is learned after it.

The writing is held back until the ranks have taken another step. Files of tensors that hold the
same have the same hash.

Not exercised: NCCL, tensors on a GPU.
"""

import errno
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.config import Config
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.test_optimizer import _step, batch_of
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FULL = 1
"""The rank whose disk is."""
LAYOUTS = {"tp2": {"tp": 2}, "dp2 ep2": {"dp": 2, "ep": 2}, "pp2": {"pp": 2}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By layout, what each rank found."""
    folder = tmp_path_factory.mktemp("background")
    save_tiny_moe(folder / "moe", num_layers=2, num_experts=4, k=2, vocab=61)
    run_ranks(save_and_learn, 2, folder, timeout_s=240)
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]
        for name in LAYOUTS
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_begun_is_saved_and_not_what_came_after(results: Any, layout: str) -> None:
    for found in results[layout]:
        assert not found["written at first"] and found["written at last"]
        assert not found["index at first"]
        assert found["begun"].keys() == found["before"].keys()
        tensors = [name for name in found["before"] if name.endswith(".distcp")]
        assert {name.split("/")[0] for name in tensors} == {"policy", "reference"}
        for name in tensors:
            assert found["begun"][name] == found["before"][name] == found["loaded"][name]
            assert found["after"][name] != found["before"][name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_raise_when_one_could_not_write_and_are_usable(results: Any, layout: str) -> None:
    for found in results[layout]:
        assert found["errno"] == errno.ENOSPC
        assert found["said"].startswith(f"rank {FULL}: No space left on device")
        assert found["again"].keys() == found["before"].keys()


# On the ranks


def save_and_learn(rank: int, folder: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    for name, parallel in LAYOUTS.items():
        config = Config.model_validate(
            {
                "algorithm": {"type": "sft"},
                "routing_replay": {"mode": "off"},
                "trainer": {"steps": 6, "mini_batches": 2},
                "policy": {"parallel": parallel},
            }
        )
        meeting = rendezvous(folder, name)
        worker = PolicyWorker(config, rank, meeting, str(folder / "moe"), torch.device("cpu"))
        # As with a KL. Its parameters are not parts of a buffer, as the policy's are.
        worker.reference = worker._on_mesh(worker._load(ddp=False))
        found = {**held_back(worker, folder / name), **full(worker, folder / name, rank)}
        destroy_mesh()
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))


def held_back(worker: Any, folder: Path) -> dict[str, Any]:
    learn(worker, 0)  # the optimizer has moments
    found: dict[str, Any] = {"before": save(worker, folder / "before")}
    begun = folder / "begun"
    with writing_after() as may_write:
        worker.begin_save(str(begun / "policy"))
        worker.begin_reference_save(str(begun / "reference"))
        learn(worker, 1)
        found["written at first"] = worker.is_written()
        found["index at first"] = (begun / "policy/.metadata").exists()
        may_write.set()
        for pending in worker.saves:
            pending.wait()
        found["written at last"] = worker.is_written()
        found["begun"] = named(*worker.end_saves())
    found["after"] = save(worker, folder / "after")
    worker.load(str(begun / "policy"))
    worker.load_reference(str(begun / "reference"))
    found["loaded"] = save(worker, folder / "loaded")
    return found


def save(worker: Any, folder: Path) -> dict[str, Any]:
    saved = worker.save(str(folder / "policy"))
    return named(saved, worker.save_reference(str(folder / "reference")))


def named(policy: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    folders = {"policy": policy, "reference": reference}
    return {f"{name}/{file}": e for name, files in folders.items() for file, e in files.items()}


def full(worker: Any, folder: Path, rank: int) -> dict[str, Any]:
    error = OSError(errno.ENOSPC, "No space left on device") if rank == FULL else None
    with writing_after(error) as may_write:
        worker.begin_save(str(folder / "full/policy"))
        worker.begin_reference_save(str(folder / "full/reference"))
        learn(worker, 2)
        may_write.set()
        with pytest.raises(OSError) as caught:
            worker.end_saves()
    learn(worker, 3)
    worker.begin_save(str(folder / "again/policy"))
    worker.begin_reference_save(str(folder / "again/reference"))
    again = named(*worker.end_saves())
    return {"errno": caught.value.errno, "said": caught.value.strerror, "again": again}


@contextmanager
def writing_after(error: Exception | None = None) -> Iterator[threading.Event]:
    """Files are written after the event, or there is the error then."""
    from rltrain.policy.sharded_save import Staged

    event, write = threading.Event(), Staged.write

    def wait_and_write(staged: Staged) -> None:
        assert event.wait(60)
        if error is not None:
            raise error
        write(staged)

    Staged.write = wait_and_write  # type: ignore[method-assign]
    try:
        yield event
    finally:
        Staged.write = write  # type: ignore[method-assign]


def learn(worker: Any, step: int) -> None:
    assert len(list(_step(worker, batch_of(step)))) == 2
    worker.refresh_reference()

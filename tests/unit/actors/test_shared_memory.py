"""Semaphores and segments of processes that were killed are removed."""

import subprocess
import sys

import psutil

from rltrain.actors.shared_memory import FOLDER, mapped_by, remove

CHILD = """
import multiprocessing, os, signal, time
from multiprocessing import resource_tracker, shared_memory
from rltrain.actors.shared_memory import name_semaphores

def work(lock, name):
    inner = multiprocessing.get_context("spawn").Lock()
    print(inner._semlock.name, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    name_semaphores("rltest")
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    segment = shared_memory.SharedMemory(create=True, size=16)
    child = context.Process(target=work, args=(lock, segment.name))
    child.start()
    print(lock._semlock.name, segment.name, resource_tracker._resource_tracker._pid, flush=True)
    time.sleep(600)
"""


def test_what_killed_processes_left_is_found_and_removed(tmp_path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py")]
    with subprocess.Popen(command, stdout=-1, text=True) as process:
        assert process.stdout is not None
        words = (process.stdout.readline() + process.stdout.readline()).split()
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        mapped = mapped_by(tree)
        for one in tree:  # the tracker, too, as Ray does
            one.kill()
    semaphores = {f"sem.{word[1:]}" for word in words if word.startswith("/")}
    segment = next(word for word in words if word.startswith("psm_"))
    assert len(semaphores) == 2 and all(name.startswith("sem.rltest-") for name in semaphores)
    left = {*semaphores, segment}
    assert left <= mapped
    assert all((FOLDER / name).exists() for name in left)
    remove({segment}, "rltest")
    assert not any((FOLDER / name).exists() for name in left)

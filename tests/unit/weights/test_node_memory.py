"""Memory that the processes of a node share: others read it, and nobody has to remove it."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from rltrain.weights.sync.node_memory import HEADER, NodeMemory, read_node_memory

READ = """
import sys
from rltrain.weights.sync.node_memory import read_node_memory
print(read_node_memory(sys.argv[1], 3, 5, 10.0).tolist())
"""
HOLD = """
from rltrain.weights.sync.node_memory import NodeMemory
memory = NodeMemory()
print(memory.path, flush=True)
input()
"""


def numbers(first: int) -> torch.Tensor:
    return torch.arange(first, first + 5, dtype=torch.uint8)


def test_another_process_reads_what_was_written_and_what_was_mapped() -> None:
    written, mapped = NodeMemory(), NodeMemory()
    written.write(numbers(1), 3)
    mapped.mapped(5).copy_(numbers(7))
    mapped.mark(3)
    for memory, first in (written, 1), (mapped, 7):
        found = subprocess.run(
            [sys.executable, "-c", READ, memory.path], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(numbers(first).tolist())


def test_a_reader_waits_for_its_bucket() -> None:
    memory = NodeMemory()
    memory.write(numbers(1), 0)

    def later() -> None:
        time.sleep(0.1)
        memory.write(numbers(9), 2)

    thread = threading.Thread(target=later)
    thread.start()
    assert torch.equal(read_node_memory(memory.path, 2, 5, 10.0), numbers(9))
    thread.join()
    with pytest.raises(ValueError, match=r"expected bucket 4 in .* within 0\.05 s, found bucket 2"):
        read_node_memory(memory.path, 4, 5, 0.05)
    with pytest.raises(ValueError, match="expected 9 bytes, found 5"):
        read_node_memory(memory.path, 2, 9, 0.05)


def test_a_process_that_ends_leaves_nothing_and_ends_the_wait() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        path = holder.stdout.readline().strip()
        threading.Timer(0.2, holder.kill).start()
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"found no /proc/\d+/fd/\d+: that process has ended"):
            read_node_memory(path, 0, 5, 30.0)
        assert time.monotonic() - began < 10
    assert not [name for name in os.listdir("/dev/shm") if "rltrain-weights" in name]


def test_memory_is_given_back() -> None:
    memory = NodeMemory()
    memory.write(torch.ones(10 * HEADER, dtype=torch.uint8), 0)
    assert os.stat(memory.path).st_blocks * 512 >= 10 * HEADER
    memory.clear()
    assert os.stat(memory.path).st_blocks * 512 <= HEADER
    with pytest.raises(ValueError, match="found none"):
        read_node_memory(memory.path, 0, 5, 0.0)

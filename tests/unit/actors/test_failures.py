"""The message about a process that died, by what is known of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.actors.actor_log import FOLDER, LOG, find_log, log_of_process, node_of_log
from rltrain.actors.failures import (
    actor_name,
    child_failure,
    describe_death,
    describe_last_error,
    out_of_memory,
)
from rltrain.actors.host_memory import describe_kill, describe_memory, oom_kills

OWN = "Traceback (most recent call last):\nValueError: no such model\n"
LATER = OWN + "\n" + "step\n" * 50


@pytest.mark.parametrize(
    ("written", "ended", "said"),
    [
        (OWN, "", "Its last error: ValueError: no such model."),
        (LATER, "exit code 1", "Its last error: ValueError: no such model."),
        (LATER, "", "left no error. It ran out of memory perhaps ("),
        (OWN, "SIGKILL", "It was killed (SIGKILL) and left no error."),
        (
            "loading\n",
            "exit code 3",
            'with exit code 3 and left no error. The last line of its log: "l',
        ),
        ("", "SIGTERM", "It ended with SIGTERM and left no error."),
    ],
)
def test_what_is_known_is_said(written: str, ended: str, said: str) -> None:
    assert said in describe_last_error(written, ended)


def test_the_kernels_kills_are_counted(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    assert oom_kills(tmp_path) == 0
    (tmp_path / "proc/vmstat").write_text("nr_free 1\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    (cgroup / "memory.events").write_text("low 0\noom 3\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text(f"{2**30}\n")
    assert not describe_memory(tmp_path).startswith("1.0 of")
    (cgroup / "memory.max").write_text(f"{2**31}\n")
    assert describe_memory(tmp_path) == "1.0 of 2.0 GiB of memory are in use"
    assert "killed 2 processes for lack of memory" in describe_kill(2, "x")
    assert "dmesg" in describe_kill(0, "x") and "lack of memory" not in describe_kill(0, "x")


def test_a_process_and_its_children_write_into_the_actors_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each below the one that had its name before; the error is of the one that died."""
    log = tmp_path / "engine-0.log"
    code = (
        "import os, subprocess, sys; from rltrain.actors.actor_log import redirect_output; "
        "redirect_output(); "
        "print(sys.argv[1], os.getpid(), flush=True); "
        "subprocess.run(['sh', '-c', 'echo child >&2'])"
    )
    pids = []
    for text in ("first", "second"):
        command = [sys.executable, "-c", code, text]
        process = subprocess.Popen(
            command, env=os.environ | {LOG: str(log)}, stdout=subprocess.PIPE
        )
        assert process.communicate()[0] == b""
        pids.append(process.pid)
    written = log.read_text()
    first, second = (log_of_process(written, pid) for pid in pids)
    assert first == f"first {pids[0]}\nchild\n" and second == f"second {pids[1]}\nchild\n"
    assert log_of_process(written, 1) == ""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert find_log(pids[1]) == log and find_log(1) is None
    log.write_text(written + OWN)
    said = describe_death("rollout", pids[1], "")
    assert said.startswith(
        f"rollout engine 0 (process {pids[1]}) died. Its last error: ValueError: "
    )
    assert said.endswith(f"Full log: {log}")


def test_processes_of_two_nodes_may_have_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, node in enumerate(("10.77.0.2", "10.77.0.3")):
        log = tmp_path / f"policy-{rank}.log"
        log.write_text(f"=== process 7 on {node} starts, now ===\nrank {rank}\n")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert find_log(7, "10.77.0.3") == log and find_log(7, "10.77.0.4") is None
    assert log_of_process(log.read_text(), 7, "10.77.0.3") == "rank 1\n"
    assert node_of_log(log.read_text()) == "10.77.0.3" and node_of_log("nothing") == ""
    said = describe_death("policy", 7, "The actor died because its node has died.", "10.77.0.3")
    assert said.startswith("policy worker 1 (process 7) died with its node")
    assert 'its log: "rank 1"' in said


def test_a_child_is_reported_by_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(f"=== process {os.getpid()} starts, now ===\n{OWN}")
    monkeypatch.setenv(LOG, str(log))
    said = str(child_failure("the engine process died", {"EngineCore": 1}))
    assert said == (
        f"the engine process died. Its last error: ValueError: no such model. Full log: {log}"
    )
    assert "killed (SIGKILL)" in str(child_failure("it died", {"EngineCore": -9, "other": None}))
    assert "Its last error" in str(child_failure("it died", {}))


def test_a_full_gpu_has_a_remedy_by_role() -> None:
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert "policy.max_tokens_per_micro_batch" in out_of_memory("policy", error)
    assert "gpu_memory_utilization" in out_of_memory("rollout", error)
    assert out_of_memory("policy", "KeyError: 'memory'") == ""


def test_logs_name_their_process() -> None:
    assert actor_name("engine-0") == "rollout engine 0"
    assert actor_name("policy-3") == "policy worker 3"

"""What a reward worker may take, and that nothing of it stays: processes, memory, disk, output."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rltrain.config.reward import RewardConfig
from rltrain.environments.dry_run import dry_run
from rltrain.environments.process_tree import descendants, kill_descendants
from tests.unit.environments.pool_case import gone, samples, worker_of

LEAVE, GROW = "hostile_rewards.leave", "hostile_rewards.grow"


@pytest.mark.parametrize(
    ("how", "then", "status"),
    [
        ("session", "hang", "timeout"),
        ("clean", "hang", "timeout"),
        ("daemon", "hang", "timeout"),
        ("daemon", "exit", "error"),
    ],
)
def test_a_process_that_got_away_ends_with_the_worker(pool_of, tmp_path, how, then, status):
    with pool_of(LEAVE, timeout_s=0.5) as pool:
        (result,) = pool.score(samples(f"{how} {tmp_path / 'pid'} {then}"))
        assert result.status == status
        assert gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_a_finished_sample_left_ends_with_the_pool(pool_of, tmp_path):
    with pool_of(LEAVE) as pool:
        (result,) = pool.score(samples(f"daemon {tmp_path / 'pid'} return"))
        left = int((tmp_path / "pid").read_text())
        assert result.value == 1.0 and left in descendants(os.getpid())
    assert gone(left)


DRIVER = """
import os, sys, threading
from pathlib import Path
from rltrain.config.reward import RewardConfig
from rltrain.environments.pool import RewardPool
from rltrain.environments.reward_sample import RewardInput
folder = Path(sys.argv[1])
config = RewardConfig(function="hostile_rewards.leave", num_workers=1, timeout_s=600.0)
pool = RewardPool(config, folder)
sent = pool.submit([RewardInput(f"session {folder / 'pid'} regex", "", None, "?", {}, "id")])
(folder / "ready").touch()
pool.collect(sent)
"""


def test_all_ends_with_a_killed_driver_whatever_holds_the_lock(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], env=env)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert driver.poll() is None
        time.sleep(0.02)
    below = descendants(driver.pid)
    assert len(below) == 3  # supervisor, worker, and what it started
    driver.kill()
    driver.wait(10)
    left = [pid for pid in below if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_worker_ends_with_its_supervisor_and_is_replaced(pool_of):
    with pool_of() as pool:
        worker, supervisor = worker_of(pool), pool._workers[0].process.process.pid
        os.kill(supervisor, signal.SIGKILL)
        assert gone(worker)
        assert pool.score(samples("is 1"))[0].value == 1.0


def test_a_supervisor_that_is_stopped_keeps_nothing_alive(pool_of):
    with pool_of(timeout_s=0.5) as pool:
        worker, supervisor = worker_of(pool), pool._workers[0].process.process.pid
        os.kill(supervisor, signal.SIGSTOP)
        assert [r.status for r in pool.score(samples("hang", "is 1"))] == ["timeout", "ok"]
    assert gone(worker) and gone(supervisor)


def test_workers_outlive_the_thread_that_started_them(pool_of):
    made = []
    thread = threading.Thread(target=lambda: made.append(pool_of()))
    thread.start()
    thread.join()
    with made[0] as pool:
        time.sleep(0.2)
        supervisor = pool._workers[0].process.process.pid
        assert pool.score(samples("is 1"))[0].value == 1.0
        assert pool._workers[0].process.process.pid == supervisor


@pytest.mark.parametrize(
    ("what", "limit", "detail"),
    [
        ("memory 300", {"memory_gib": 0.25}, "MemoryError"),
        ("memory 300", {"memory_gib": 0.25}, "The process has data.reward.limits.memory_gib=0.25"),
        ("file {}/large", {"file_gib": 0.001}, "File too large"),
        ("file {}/large", {"file_gib": 0.001}, "The process has data.reward.limits.file_gib=0.001"),
        ("processes 12", {"processes": 8}, "had more than data.reward.limits.processes=8"),
        ("crash", {}, "its process was killed by SIGABRT"),
    ],
)
def test_what_takes_too_much_costs_its_sample_and_names_the_key(
    pool_of, tmp_path, what, limit, detail
):
    with pool_of(GROW, limits=limit, timeout_s=60.0) as pool:
        failed, after = pool.score(samples(what.format(tmp_path), "print 1"))
    assert failed.status == "error" and detail in failed.detail
    assert after.value == 1.0


def test_limits_can_be_taken_off_and_reserved_address_space_does_not_count(pool_of, tmp_path):
    off = dict.fromkeys(("memory_gib", "file_gib", "core_gib", "processes", "log_mib"))
    with pool_of(GROW, limits=off) as pool:
        taken = pool.score(samples("memory 300", f"file {tmp_path / 'large'}", "print 1"))
    assert [one.status for one in taken] == ["ok"] * 3
    with pool_of(GROW, limits={"memory_gib": 0.25}) as pool:
        assert pool.score(samples("reserve 64"))[0].value == 1.0


def test_a_crash_leaves_no_core_dump(pool_of):
    with pool_of() as pool:
        limits = Path(f"/proc/{worker_of(pool)}/limits").read_text()
        score = Path(f"/proc/{worker_of(pool)}/oom_score_adj").read_text()
    (core,) = [line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core")]
    assert core == ["0", "0"]
    assert int(score) == 1000  # the kernel ends it first


def test_output_goes_to_a_log_of_limited_size_that_has_the_newest(pool_of, tmp_path, capfd):
    with pool_of(GROW, limits={"log_mib": 0.05}) as pool:
        pool.score(samples("print 10000"))
    log = (tmp_path / "reward-0.log").read_text()
    assert len(log) <= 0.05 * 2**20
    first, *rest = log.splitlines()
    cut = int(first.split()[1])
    assert "bytes before this line were cut: data.reward.limits.log_mib ===" in first
    assert cut > 900_000
    assert rest[-1].startswith("9999: xxx") and all(len(line) > 100 for line in rest)
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_replaces_another_goes_on_with_its_log(pool_of, tmp_path):
    with pool_of(GROW) as pool:
        pool.score(samples("print 1", "crash", "print 2"))
    log = (tmp_path / "reward-0.log").read_text()
    assert log.count("=== reward worker, process ") == 2
    assert log.index("0: xxx") < log.rindex("===") < log.index("1: xxx")


def test_what_was_printed_before_a_timeout_is_in_the_log(pool_of, tmp_path):
    with pool_of("sample_rewards.act_out", timeout_s=0.5) as pool:
        pool.score(samples("hello"))
    assert "sees hello" in (tmp_path / "reward-0.log").read_text()


def test_a_dry_run_shows_the_end_of_the_output(capfd):
    config = RewardConfig(function=GROW, timeout_s=60.0)
    dry_run(config, samples("print 100", "crash"))
    out, err = capfd.readouterr()
    first, *rest = err.splitlines()
    assert out == "" and first == f"output of {GROW}, the last 20 of 100 lines:"
    assert len(rest) == 20 and rest[-1].startswith("  99: xxx")
    dry_run(config, samples("memory 1"))
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_costs_the_output_and_no_reward(pool_of, tmp_path):
    (tmp_path / "reward-0.log").symlink_to("/dev/full")
    with pool_of(GROW) as pool:
        assert pool.score(samples("print 1000"))[0].value == 1.0


def test_descendants_are_found_without_the_kernels_list_of_children(monkeypatch):
    child = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
    while len(descendants(child.pid)) < 1:
        time.sleep(0.01)
    expected = descendants(child.pid)
    monkeypatch.setattr("rltrain.environments.process_tree.os.path.exists", lambda path: False)
    assert descendants(child.pid) == expected
    assert kill_descendants(child.pid, 5.0) == []
    child.wait(5)

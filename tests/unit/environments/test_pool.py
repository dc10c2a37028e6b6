"""A reward that hangs or crashes costs its sample, not the run, and never becomes a zero."""

import os
import re
import signal
import time

import pytest

from rltrain.config.reward import RewardConfig
from rltrain.environments import pool as pools
from rltrain.environments import pool_worker, process_tree, worker_process
from rltrain.environments.dry_run import dry_run
from rltrain.environments.pool_worker import PoolWorker
from rltrain.environments.process_tree import descendants
from rltrain.environments.reward_sample import RewardInput
from tests.unit.environments.pool_case import gone, samples, worker_of


def test_results_come_in_order_whoever_finishes_first(pool_of):
    with pool_of(num_workers=2) as pool:
        results = pool.score(samples("sleep 0.2", *(f"is {i}" for i in range(100))))
        again = pool.score(samples("is 7"))
    assert [r.value for r in results] == [0.2, *map(float, range(100))]
    assert {r.status for r in results} == {"ok"}
    assert results[0].seconds == pytest.approx(0.2, abs=0.15)
    assert [r.value for r in again] == [7.0]


def test_work_goes_on_while_more_is_submitted(pool_of):
    with pool_of(num_workers=2) as pool:
        first = pool.submit(samples("sleep 0.4", "is 1", "is 2"))
        deadline = time.monotonic() + 5
        while len(pool._results) < 2 and time.monotonic() < deadline:
            pool.poll()
        second = pool.submit(samples("is 3"))
        assert sorted(pool._results) == [1, 2]  # the first still sleeps, and nobody waits for it
        assert not pool.has(first) and pool.has(first[1:])
        # Whoever asks gets the results of its own samples, in whatever order they ask.
        assert [r.value for r in pool.collect(second)] == [3]
        assert [r.value for r in pool.collect(first)] == [0.4, 1, 2]
        third = pool.submit(samples("sleep 0.1"))
        assert any(worker.assigned for worker in pool._workers)  # at once
        assert [r.value for r in pool.collect(third)] == [0.1]
        assert not pool._samples and not pool._results and not pool._lines


def test_no_samples_are_no_results(pool_of):
    with pool_of("exact") as pool:
        assert pool.score([]) == []


def test_a_reward_function_gets_prompt_answer_columns_and_both_texts():
    sample = RewardInput("<x>", "x", {"a": 1}, "1+1=", {"level": 3}, "id")
    for text, value in (("raw", 3.0), ("clean", 5.0)):
        config = RewardConfig(function="sample_rewards.see_columns", text=text, num_workers=1)
        assert [result.value for result in dry_run(config, [sample])] == [value]


@pytest.mark.parametrize(
    "value", [(1, 2), float("nan"), float("inf"), b"x", {1: 2}, {"a": {1}}, [[object()]]]
)
def test_what_json_would_change_or_cannot_hold_is_refused(pool_of, value):
    with pool_of("exact") as pool:
        for answer, columns, name in (("x", {"level": value}, "level"), (value, {}, "answer")):
            with pytest.raises(ValueError, match=f"prompt some id, column '{name}': expected what"):
                pool.score([RewardInput("x", "x", answer, "?", columns, "some id")])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_failed_sample_has_no_reward_and_its_neighbours_do(pool_of, num_workers):
    bad = ["hang", "exit 3", "raise lost", "nan", "text", "exit 0"]
    responses = [r for i, what in enumerate(bad) for r in (f"is {i}", what)]
    with pool_of(num_workers=num_workers, timeout_s=0.5) as pool:
        results = pool.score(samples(*responses, "is 9"))
        assert pool.score(samples("is 1"))[0].value == 1.0
    assert [r.value for r in results[::2]] == [0, 1, 2, 3, 4, 5, 9]
    failed = results[1::2]
    assert [r.value for r in failed] == [None] * 6
    assert [r.status for r in failed] == ["timeout", *["error"] * 5]
    for result, detail in zip(
        failed,
        (
            "timeout_s=0.5",
            "exit code 3",
            "KeyError: 'lost' (",
            "found float 'nan'",
            "found str 'a lot'",
            "exit code 0",
        ),
        strict=True,
    ):
        assert detail in result.detail
    assert "sample_rewards.py" in failed[2].detail and "in act_out" in failed[2].detail


HOSTILE = {
    "close": ("error", "its process closed its connection"),
    "stop": ("timeout", "not done in data.reward.timeout_s=4.0 s"),
    "half": ("timeout", "not done in"),
    "thread": ("error", "SystemExit: 5 ("),
    "raise interrupt": ("error", "KeyboardInterrupt ("),
    "raise memory": ("error", "MemoryError ("),
    "raise mute": ("error", "MuteError: <exception str() failed> ("),
    "raise long": ("error", "RuntimeError: xxx"),
    "recurse": ("error", "RecursionError: "),
    "write no json\n": ("error", "wrote b'no json', which is no message"),
    "write [1]\n": ("error", "wrote b'[1]', which is no message"),
    "write {}\n": ("error", "wrote '{}', which is no result"),
    'write {"sample": 77, "clock": 0, "reward": 1, "correct": null}\n': ("error", "is no result"),
    'write {"began": []}\n': ("error", "is no result"),
    "flood": ("error", "wrote a message of more than 1048576 bytes"),
}


def test_whatever_a_reward_does_costs_its_own_sample_alone(pool_of, tmp_path, capfd):
    responses = [r for i, what in enumerate(HOSTILE) for r in (what, f"is {i}", f"print {i}")]
    with pool_of(num_workers=3, timeout_s=4.0) as pool:
        results = pool.score(samples(*responses, f"fork {tmp_path / 'pid'}"))
        pids = [worker.process.process.pid for worker in pool._workers]
    for (what, expected), result in zip(HOSTILE.items(), results[::3], strict=False):
        assert (result.status, result.value) == (expected[0], None), what
        assert expected[1] in result.detail and len(result.detail) < 3000
    for i in range(len(HOSTILE)):
        assert [results[3 * i + n].value for n in (1, 2)] == [i, i]
    assert results[-1].detail == "its process ended with exit code 4"
    assert all(map(gone, [*pids, int((tmp_path / "pid").read_text())]))
    printed = capfd.readouterr()
    assert printed.err == printed.out == ""
    assert any("xxx" in log.read_text() for log in tmp_path.glob("reward-?.log"))


def test_a_worker_that_stops_before_it_begins_is_replaced_and_nobody_is_blamed(
    pool_of, monkeypatch
):
    monkeypatch.setattr(pool_worker, "BEGIN_TIMEOUT_S", 0.5)
    large = "is 1" + " " * 5_000_000  # more than the connection holds
    with pool_of(timeout_s=60.0) as pool:
        os.kill(worker_of(pool), signal.SIGSTOP)
        monkeypatch.setattr(pools, "PoolWorker", patient(monkeypatch))
        assert [r.value for r in pool.score(samples(large, "is 2"))] == [1.0, 2.0]


def patient(monkeypatch):
    """Workers that are given the usual time."""

    class Patient(PoolWorker):
        def __init__(self, config, log):
            super().__init__(config, log)
            monkeypatch.setattr(pool_worker, "BEGIN_TIMEOUT_S", 60.0)

    return Patient


def test_a_sample_before_which_workers_end_twice_is_given_up(pool_of, monkeypatch):
    class Stopping(PoolWorker):
        def assign(self, positions, lines):
            os.kill(descendants(self.process.process.pid)[0], signal.SIGSTOP)
            super().assign(positions, lines)

    monkeypatch.setattr(pool_worker, "BEGIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pools, "PoolWorker", Stopping)
    with pool_of() as pool:
        (result,) = pool.score(samples("is 1"))
    assert (result.status, result.value) == ("error", None)
    assert result.detail == "its process did not begin in 0 s"


MODULE = {"SAMPLE_REWARDS": None}
"""What the module does when it is imported."""


def test_a_worker_that_stops_while_it_starts_is_refused(pool_of, monkeypatch):
    monkeypatch.setattr(pool_worker, "START_TIMEOUT_S", 1.0)
    monkeypatch.setenv("SAMPLE_REWARDS", "stop")
    with pytest.raises(ValueError, match=r"act_out cannot be started: .* not ready in 1 s"):
        pool_of(env=MODULE)


def test_a_module_that_exits_and_leaves_a_thread_is_refused(pool_of, monkeypatch):
    monkeypatch.setenv("SAMPLE_REWARDS", "exit")
    with pytest.raises(ValueError, match=r"SystemExit: 6 \(.*sample_rewards.py"):
        pool_of(env=MODULE)


def test_a_run_ends_when_no_worker_can_be_started_any_more(pool_of, monkeypatch):
    monkeypatch.setenv("SAMPLE_REWARDS", "")
    with pool_of(env=MODULE) as pool:
        monkeypatch.setenv("SAMPLE_REWARDS", "exit")
        with pytest.raises(RuntimeError, match=r"3 times in a row: .*SystemExit: 6"):
            pool.score(samples("exit 1", "is 1"))


def test_a_process_that_the_kernel_keeps_does_not_hold_the_run_up(pool_of, monkeypatch, caplog):
    monkeypatch.setattr(worker_process, "KILL_TIMEOUT_S", 0.2)
    with pool_of(timeout_s=0.5) as pool:
        kept = worker_of(pool)
        with monkeypatch.context() as patch:
            patch.setattr(process_tree.os, "kill", lambda pid, number: None)
            results = pool.score(samples("hang", "is 1"))
    assert [r.status for r in results] == ["timeout", "ok"]
    assert re.search(f"processes {kept}, .* of a reward function did not end", caplog.text)
    os.kill(kept, signal.SIGKILL)
    assert gone(kept)


@pytest.mark.parametrize(
    ("function", "success_at", "responses", "correct"),
    [
        ("sample_rewards.act_out", None, ["is 1", "is 0"], [None, None]),
        ("sample_rewards.act_out", 0.5, ["is 0.5", "is 0.4"], [True, False]),
        ("sample_rewards.declared", None, ["0.5", "0.4"], [True, False]),
        ("sample_rewards.declared", 0.7, ["0.7", "0.6"], [True, False]),
        (
            "sample_rewards.graded",
            0.5,
            ['{"reward": 0.1, "correct": True}', '{"reward": 0.9, "correct": np.False_}', "0.6"],
            [True, False, True],
        ),
        ("exact", None, ["", "x"], [False, False]),
    ],
)
def test_correct_is_what_is_said_or_what_reaches_the_threshold(
    pool_of, function, success_at, responses, correct
):
    with pool_of(function, success_at=success_at) as pool:
        given = [RewardInput(r, r, "y", "?", {}, "id") for r in responses]
        assert [result.correct for result in pool.score(given)] == correct


def test_the_parts_of_a_reward_arrive_with_it(pool_of):
    with pool_of("sample_rewards.graded") as pool:
        texts = ['{"reward": 0.5, "format": np.float32(0.25), "length": -3}', "0.5"]
        results = pool.score([RewardInput(r, r, "y", "?", {}, "id") for r in texts])
    assert [result.parts for result in results] == [{"format": 0.25, "length": -3.0}, {}]


def test_the_clock_starts_with_the_work_not_in_the_queue(pool_of):
    with pool_of(timeout_s=0.6) as pool:
        results = pool.score(samples(*["sleep 0.3"] * 5))
    assert [r.status for r in results] == ["ok"] * 5


def test_a_pool_that_was_not_looking_does_not_turn_results_into_timeouts(pool_of, monkeypatch):
    with pool_of(timeout_s=0.5) as pool:
        look = pool.wait
        monkeypatch.setattr(pool, "wait", lambda limit_s: (look(limit_s), time.sleep(1.0)))
        results = pool.score(samples("is 1", "is 2"))
    assert [r.value for r in results] == [1.0, 2.0]


def test_a_killed_worker_takes_what_it_started_with_it(pool_of, tmp_path):
    with pool_of(timeout_s=0.5) as pool:
        hung = pool._workers[0].process.process.pid
        (result,) = pool.score(samples(f"spawn {tmp_path / 'pid'}"))
    assert result.status == "timeout"
    assert gone(hung) and gone(int((tmp_path / "pid").read_text()))


def test_a_worker_that_dies_between_steps_is_replaced_and_nobody_is_blamed(pool_of):
    with pool_of() as pool:
        os.kill(pool._workers[0].process.process.pid, signal.SIGKILL)
        assert gone(pool._workers[0].process.process.pid)
        assert [r.value for r in pool.score(samples("is 1", "is 2"))] == [1.0, 2.0]


def test_closing_ends_every_process(pool_of):
    with pool_of(num_workers=2) as pool:
        pids = [worker.process.process.pid for worker in pool._workers]
    assert all(map(gone, pids))


def test_too_many_failures_stop_the_run_and_name_the_first(pool_of):
    responses = samples("is 1", "raise lost", "is 2", "is 3")
    with pool_of(max_failed_fraction=0.25) as pool:
        assert pool.score(responses)[1].value is None
    with (
        pool_of(max_failed_fraction=0.2) as pool,
        pytest.raises(
            RuntimeError,
            match=r"act_out: 1 of 4 .* prompt id1, response 'raise lost', error: KeyError: 'lost'",
        ),
    ):
        pool.score(responses)


def test_a_function_that_cannot_be_imported_is_refused_at_start(pool_of):
    with pytest.raises(ValueError, match=r"broken_module.f cannot be imported: RuntimeError: no"):
        pool_of("broken_module.f")


def test_math_verify_runs_in_a_worker(pool_of):
    with pool_of("math_verify", timeout_s=30.0) as pool:
        results = pool.score([RewardInput(r"\boxed{\frac12}", "", "0.5", "?", {}, "id")])
    assert results[0].value == 1.0

"""A reward that hangs or crashes costs its sample, not the run, and never becomes a zero."""

import os
import signal
import time
from pathlib import Path

import pytest

from rltrain.config.data import RewardConfig
from rltrain.environments.pool import RewardPool, Sample


@pytest.fixture(autouse=True)
def import_from_this_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def pool_of(function: str = "sample_rewards.act_out", **more) -> RewardPool:
    settings = {"timeout_s": 5.0, "max_failed_fraction": 1.0}
    return RewardPool(RewardConfig(function=function, **(settings | more)))


def samples(*responses: str) -> list[Sample]:
    return [Sample(response, None, "?", {}, f"id{i}") for i, response in enumerate(responses)]


def gone(pid: int) -> bool:
    """Whether the process has ended, within 5 s; a zombie has."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_results_come_in_order_whoever_finishes_first():
    with pool_of(num_workers=2) as pool:
        results = pool.score(samples("sleep 0.2", *(f"is {i}" for i in range(100))))
        again = pool.score(samples("is 7"))
    assert [r.value for r in results] == [0.2, *map(float, range(100))]
    assert {r.status for r in results} == {"ok"}
    assert results[0].seconds == pytest.approx(0.2, abs=0.15)
    assert [r.value for r in again] == [7.0]


def test_work_goes_on_while_more_is_submitted():
    with pool_of(num_workers=2) as pool:
        pool.submit(samples("sleep 0.4", "is 1", "is 2"))
        deadline = time.monotonic() + 5
        while len(pool._results) < 2 and time.monotonic() < deadline:
            pool.poll()
        pool.submit(samples("is 3"))
        assert sorted(pool._results) == [1, 2]  # the first still sleeps, and nobody waits for it
        assert [r.value for r in pool.collect()] == [0.4, 1, 2, 3]
        assert pool.collect() == []
        pool.submit(samples("sleep 0.1"))
        assert any(worker.assigned for worker in pool._workers)  # at once
        assert [r.value for r in pool.collect()] == [0.1]


def test_no_samples_are_no_results():
    with pool_of("exact") as pool:
        assert pool.score([]) == []


def test_a_reward_function_gets_prompt_answer_and_columns():
    with pool_of("sample_rewards.see_columns") as pool:
        results = pool.score([Sample("x", {"a": 1}, "1+1=", {"level": 3}, "id")])
    assert results[0].value == 1.0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_failed_sample_has_no_reward_and_its_neighbours_do(num_workers):
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
        ("timeout_s=0.5", "exit code 3", "KeyError: 'lost' (", "nan", "float", "exit code 0"),
        strict=True,
    ):
        assert detail in result.detail
    assert "sample_rewards.py" in failed[2].detail and "in act_out" in failed[2].detail


def test_the_clock_starts_with_the_work_not_in_the_queue():
    with pool_of(timeout_s=0.6) as pool:
        results = pool.score(samples(*["sleep 0.3"] * 5))
    assert [r.status for r in results] == ["ok"] * 5


def test_a_pool_that_was_not_looking_does_not_turn_results_into_timeouts(monkeypatch):
    with pool_of(timeout_s=0.5) as pool:
        look = pool._wait
        monkeypatch.setattr(pool, "_wait", lambda: (look(), time.sleep(1.0)))
        results = pool.score(samples("is 1", "is 2"))
    assert [r.value for r in results] == [1.0, 2.0]


def test_a_result_that_waits_to_be_read_is_no_timeout():
    with pool_of() as pool:
        worker = pool._workers[0]
        worker.assign([0], samples("is 1"))
        assert worker.connection.poll(5.0)
        worker.began = time.monotonic() - 100.0
        assert worker.failure(timeout_s=5.0) is None


def test_a_killed_worker_takes_what_it_started_with_it(tmp_path):
    with pool_of(timeout_s=0.5) as pool:
        hung = pool._workers[0].process.pid
        (result,) = pool.score(samples(f"spawn {tmp_path / 'pid'}"))
    assert result.status == "timeout"
    assert gone(hung) and gone(int((tmp_path / "pid").read_text()))


def test_a_worker_that_dies_between_steps_is_replaced_and_nobody_is_blamed():
    with pool_of() as pool:
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        assert gone(pool._workers[0].process.pid)
        assert [r.value for r in pool.score(samples("is 1", "is 2"))] == [1.0, 2.0]


def test_closing_ends_every_process():
    with pool_of(num_workers=2) as pool:
        pids = [worker.process.pid for worker in pool._workers]
    assert all(map(gone, pids))


def test_too_many_failures_stop_the_run_and_name_the_first():
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


def test_a_function_that_cannot_be_imported_is_refused_at_start():
    with pytest.raises(ValueError, match=r"broken_module.f cannot be imported: RuntimeError: no"):
        pool_of("broken_module.f")


def test_math_verify_runs_in_a_worker():
    with pool_of("math_verify", timeout_s=30.0) as pool:
        results = pool.score([Sample(r"\boxed{\frac12}", "0.5", "?", {}, "id")])
    assert results[0].value == 1.0

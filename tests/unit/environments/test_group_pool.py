"""A function that judges all responses to a prompt: in one call, and what a failure of it costs."""

import os
import signal

from rltrain.environments.reward_sample import RewardInput
from tests.unit.environments.pool_case import worker_of

ACTS = "sample_rewards.group_acts"
RANKS = "sample_rewards.ranks"


def group(*responses: str, **columns: object) -> list[RewardInput]:
    return [RewardInput(r, r.upper(), "x", "1+1=", columns, "id") for r in responses]


def test_a_group_is_judged_by_one_call_and_others_are_not_mixed_in(pool_of):
    with pool_of(RANKS, num_workers=2) as pool:
        submitted = [pool.submit_group(group(*["x" * n] * 2, "", "x")) for n in range(50)]
        submitted.append(pool.submit_group(group(*"abcdefghij" * 10)))  # more than a message holds
        results = [pool.collect(positions) for positions in submitted]
        alone = pool.score(group("", "xx", "x"))
        assert pool.collect(pool.submit_group([])) == []
    assert [r.value for r in results[5]] == [2.0, 2.0, 0.0, 1.0]
    assert [r.correct for r in results[5]] == [True, True, False, True]
    assert [r.value for r in results[-1]] == [0.0] * 100
    assert [r.value for r in alone] == [0.0] * 3  # each is a group of its own, as in evaluations
    assert not pool._lines and not pool._samples and not pool._results


def test_a_function_of_one_response_gets_one_whoever_asks(pool_of):
    with pool_of("sample_rewards.length") as pool:
        positions = pool.submit_group(group("a", "bb"))
        assert [r.value for r in pool.collect(positions)] == [1.0, 2.0]


def test_a_group_gets_lists_and_the_columns_of_its_row(pool_of):
    texts = "texts[1:] == columns['responses_raw'][1:] == ['b']"
    clean = "columns['responses_clean'][1:] == ['B']"
    others = "(columns['prompt'], columns['level'], columns['row_responses']) == ('1+1=', 3, 7)"
    seen = f"[float({texts} and {clean} and {others}), 0.25]"
    with pool_of(ACTS) as pool:
        positions = pool.submit_group(group(seen, "b", level=3, responses=7))
        assert [r.value for r in pool.collect(positions)] == [1.0, 0.25]


def test_one_bad_value_costs_its_response_alone(pool_of):
    with pool_of(ACTS) as pool:
        texts = ["[{'reward': 2, 'len': 1.5}, float('nan'), 1]", "", ""]
        results = pool.collect(pool.submit_group(group(*texts)))
    assert [r.value for r in results] == [2.0, None, 1.0]
    assert results[0].parts == {"len": 1.5} and "found float 'nan'" in results[1].detail


FAILURES = {
    "[1.0]": ("error", "a list of 2 rewards, one for each response in their order, found 1"),
    "n + 0.5": ("error", "a list of 2 rewards, one for each response in their order, found float"),
    "{}['lost']": ("error", "KeyError: 'lost' ("),
    "os._exit(3)": ("error", "its process ended with exit code 3"),
    "time.sleep(60)": ("timeout", "not done in data.reward.timeout_s=0.5 s"),
}


def test_a_failure_costs_its_group_alone_and_is_counted_for_each_sample(pool_of, caplog):
    with pool_of(ACTS, timeout_s=0.5) as pool:
        bad = [pool.submit_group(group(text, "y")) for text in FAILURES]
        good = pool.submit_group(group("[1.0, 2.0]", "y"))
        found = [pool.collect(positions) for positions in bad]
        assert [r.value for r in pool.collect(good)] == [1.0, 2.0]
    for results, (status, detail) in zip(found, FAILURES.values(), strict=True):
        assert [(r.status, r.value) for r in results] == [(status, None)] * 2
        assert all(detail in r.detail for r in results)
    assert "2 of 2 samples have no reward" in caplog.text


def test_a_group_is_a_component_beside_one_of_single_responses(pool_of):
    components = {
        "rank": {"function": RANKS, "weight": 2.0},
        "acts": {"function": "sample_rewards.act_out"},
    }
    with pool_of("exact", components=components, timeout_s=1.0) as pool:
        positions = pool.submit_group(group("is 1", "is 10", "raise lost", "sleep 0.7"))
        results = pool.collect(positions)
        # Each call has the limit, so three of 0.7 s are no timeout, and one of 9 s is.
        slow = pool.collect(pool.submit_group(group(*["sleep 0.7"] * 3)))
        hung = pool.collect(pool.submit_group(group("is 1", "sleep 9")))
    assert [r.value for r in results] == [1.0, 12.0, None, 4.7]
    assert [r.correct for r in results] == [False, True, None, True]
    assert results[1].parts == {"rank": 1.0, "acts": 10.0}
    assert results[2].detail.startswith("component acts: KeyError")
    assert [r.status for r in slow] == ["ok"] * 3
    assert all(r.detail.startswith("component acts: not done in") for r in hung)


def test_a_group_whose_worker_died_before_it_began_is_judged_whole_by_another(pool_of):
    with pool_of(RANKS) as pool:
        os.kill(worker_of(pool), signal.SIGKILL)
        results = pool.collect(pool.submit_group(group("a", "bb", "ccc")))
    assert [r.value for r in results] == [0.0, 1.0, 2.0]

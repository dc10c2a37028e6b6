"""How checks are run, shown and counted, and what is checked of a configuration."""

import json
from pathlib import Path

import pytest

from rltrain.config import Config
from rltrain.controller.doctor import findings, run_checks
from rltrain.controller.doctor.examination import check_ray, check_wandb
from rltrain.controller.doctor.findings import State, fail, not_applicable, ok, run_check, warn
from rltrain.controller.doctor.self_test import Trial, judge
from rltrain.main import compose


def test_a_check_that_breaks_is_a_failure_of_its_own():
    def breaks():
        yield ok("first", "fine")
        raise KeyError("planted")

    [finding] = run_check("disk", breaks)
    assert finding.state is State.FAIL and finding.check == "disk"
    assert "KeyError: 'planted'" in finding.found
    assert run_check("next", lambda: [ok("next", "fine")])[0].state is State.OK


def test_only_failures_count():
    fine, warned = ok("a", "x"), warn("b", "x", "do y")
    skipped, failed = not_applicable("c", "x"), fail("d", "x", "do y")
    assert findings.exit_status([fine, warned, skipped]) == 0
    assert findings.exit_status([fine, failed]) == 1
    assert findings.show_summary([fine, fine, failed], 1.25) == "2 ok, 1 fail (1.2 s)\n"
    with pytest.raises(AssertionError):
        warn("b", "x", "")


def test_a_problem_is_a_line_and_its_remedy():
    shown = findings.show_finding(fail("disk", "full\n  of it", "free some"))
    assert shown.splitlines()[0].split() == ["fail", "disk", "full", "of", "it"]
    assert shown.splitlines()[1].strip() == "-> free some"
    assert findings.show_finding(ok("disk", "empty")).count("\n") == 1


def test_json_holds_the_findings_and_no_secret():
    secret = "abcdef0123456789"
    text = findings.show_json([fail("x", f"key {secret}", "y")], {"WANDB_API_KEY": secret})
    assert secret not in text
    document = json.loads(text)
    assert document["exit_status"] == 1
    assert document["findings"][0]["state"] == "fail" and document["findings"][0]["remedy"] == "y"


@pytest.mark.parametrize(
    ("status", "error", "seconds", "state", "found", "remedy"),
    [
        (0, "", 4.0, State.OK, "started in 4 s", ""),
        (0, "", 20.0, State.WARN, "slow", "cluster.address=auto"),
        (1, "log\nno start\nset RAY_TMPDIR [RL4003]", 4.0, State.FAIL, "no start set", "RL4003"),
        (-9, "", 4.0, State.FAIL, "status -9", "dmesg"),
    ],
)
def test_ray(status, error, seconds, state, found, remedy):
    finding = check_ray(status, "started in 4 s\n", error, seconds)
    assert finding.state is state and found in finding.found and remedy in finding.remedy


def test_wandb():
    assert check_wandb("online", logged_in=False).state is State.FAIL
    assert check_wandb("online", logged_in=True).state is State.OK
    assert check_wandb("offline", logged_in=False).state is State.OK


def states(config):
    return {f.check: (f.state, f.found) for f in run_checks.check_run(config)}


def tiny(tmp_path: Path, *overrides: str) -> Config:
    folders = [f"trainer.output_dir={tmp_path}/run", f"model.cache_dir={tmp_path}"]
    return compose(["+recipe=grpo_moe_r3", "data.size=64", *folders, *overrides])


def test_a_configuration_that_can_run(tmp_path):
    found = states(tiny(tmp_path))
    assert list(found) == list(run_checks.NAMES)
    assert {state for state, _ in found.values()} == {State.OK, State.NOT_APPLICABLE}
    assert found["model"][1] == "tiny: qwen3_moe, 4 layers, 32 experts, 4 per token"
    assert not (tmp_path / "run").exists()  # a look changes nothing


@pytest.mark.parametrize(
    ("override", "check", "said"),
    [
        ("model.path=/nowhere", "model", "/nowhere"),
        ("data=jsonl data.path=/nowhere.jsonl", "data and reward", "/nowhere.jsonl"),
        ("policy.parallel.tp=3", "layout", "expected a divisor"),
        ("model.tiny.head_dim=16", "model", "head_dim=16"),
    ],
)
def test_a_configuration_that_cannot(override, check, said, tmp_path):
    extra = ["trainer.prompts_per_step=48"] if "tp=3" in override else []
    found = states(tiny(tmp_path, *override.split(), *extra))
    assert found[check][0] is State.FAIL and said in found[check][1]
    assert [name for name, (state, _) in found.items() if state is State.FAIL] == [check]


def test_an_earlier_run_in_the_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("")
    assert states(tiny(tmp_path))["output folder"][0] is State.FAIL


def test_the_output_folder_without_its_time():
    config = Config()
    assert run_checks.output_parent(config) == "outputs"
    trainer = config.trainer.model_copy(update={"output_dir": "/data/run"})
    assert run_checks.output_parent(config.model_copy(update={"trainer": trainer})) == "/data/run"


ROW = {
    "routing/coverage": 1.0,
    "policy/ratio_max": 1.9,
    "policy/grad_norm": 9.6,
    "mismatch/k3": 3e-14,
    "rollout/weight_version": 1.0,
}
AGREE = {"name": "trainer and engine agree", "state": "pass"}


def trial(first=(), second=(), invariants=(AGREE,), status=0, seconds=30.0):
    rows = [{**ROW, **dict(first)}, {**ROW, "rollout/weight_version": 2.0, **dict(second)}]
    return Trial(status, seconds, rows if status == 0 else [], list(invariants), "last words")


def test_a_self_test_without_faults():
    assert {finding.state for finding in judge(trial(), "cpu")} == {State.OK}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (trial(second={"routing/coverage": 0.99}), "routes"),
        (trial(first={"routing/coverage": None}), "routes"),
        (trial(second={"mismatch/k3": 4e-2}), "weight sync"),
        (trial(second={"mismatch/k3": float("nan")}), "weight sync"),
        (trial(second={"rollout/weight_version": 1.0}), "weight sync"),
        (trial(first={"policy/ratio_max": 1.0}), "update"),
        (trial(second={"policy/grad_norm": 0.0}), "update"),
        (trial(invariants=[AGREE, {"name": "x", "state": "fail"}]), "first step"),
        (trial(invariants=[]), "first step"),
        (trial(status=1), "run"),
    ],
)
def test_what_a_self_test_finds(broken, check):
    failed = [f for f in judge(broken, "cpu") if f.state is State.FAIL]
    assert [finding.check for finding in failed] == [f"self-test: {check}"]


def test_a_slow_self_test_is_a_warning():
    assert next(judge(trial(seconds=200.0), "cpu")).state is State.WARN

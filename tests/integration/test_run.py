"""Whole runs through the entry point: Ray, vLLM and Megatron, what they log and what they leave.

Independent runs go two at a time, because most of a small run is start-up.
"""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rltrain.cli.app import main as rltrain
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.mlflow import key
from tests.reliability.same_run import TIMED
from tests.timeline_file import read_timeline

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]

PROMISED = {
    "reward": ["mean"],
    "routing": ["coverage", "overlap", "overlap/layer_0", "overlap/layer_1"],
    "mismatch": (
        mismatch := [
            "k1",
            "k3",
            "abs_diff_mean",
            "abs_diff_median_flipped",
            "abs_diff_max",
            "mult_prob_error",
        ]
    ),
    "mismatch_native": mismatch,
    "policy": ["loss", "ratio_max", "clip_fraction", "kl", "entropy", "grad_norm"],
    "time": ["generate", "reward", "old_logprobs", "update", "step"],
    "throughput": ["tokens_per_second"],
}
"""The metrics that every run with R3 must log on its first step."""


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """What two runs that do the same must agree on, to the last digit."""
    # A resumed run has new engines, which count their weight syncs anew.
    measured = (*TIMED, "rollout/weight_version")
    return {name: value for name, value in row.items() if not name.startswith(measured)}


def load_with_transformers(folder: Path) -> None:
    """Raises unless the folder holds exactly the tensors its architecture has."""
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    AutoTokenizer.from_pretrained(folder)


def reward_by_length(folder: Path) -> str:
    """A model of five supervised steps has no right answer. This reward differs by response."""
    score = "def score(response, answer, **columns):\n    n = len(response)\n"
    score += '    return {"reward": n, "length": n}\n'
    (folder / "by_length.py").write_text(score)
    return "data.reward.function=by_length.score"


def check_rollouts(rows: list[dict[str, Any]], metrics: dict[int, dict[str, Any]]) -> None:
    """Two whole groups of the first and the last step, with what the trainer trained on."""
    assert [(r["step"], r["group"], r["sample"]) for r in rows] == [
        (step, group, sample) for step in (1, 3) for group in (0, 1) for sample in range(4)
    ]
    for row in rows:
        lists = ["tokens", "rollout_logprobs", "old_logprobs", "ratio", "loss_mask"]
        lists += ["flipped"] if row["step"] == 1 else []  # sampled every tenth step
        assert {len(row[name]) for name in lists} == {len(row["tokens"])}
        assert row["reward"] == row["reward_parts"]["length"]
        assert metrics[row["step"]]["advantage/min"] - 1e-5 <= row["advantage"]
        pairs = zip(row["old_logprobs"], row["rollout_logprobs"], row["ratio"], strict=True)
        assert all(r == pytest.approx(math.exp(o - e), rel=1e-4) for o, e, r in pairs)
        assert max(row["rollout_logprobs"]) <= 0
    for start in range(0, len(rows), 4):
        group = sorted(rows[start : start + 4], key=lambda row: row["reward"])
        assert len({row["prompt"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)
        assert [r["advantage"] for r in group] == sorted(r["advantage"] for r in group)
    first = [row for row in rows if row["step"] == 1]
    assert any(1 in row["flipped"] for row in first) and any(0 in row["flipped"] for row in first)
    assert all(row["flipped"] is None for row in rows if row["step"] == 3)


def check_copies(folder: Path, metrics: dict[int, dict[str, Any]]) -> None:
    """TensorBoard and MLflow hold every number of metrics.jsonl; wandb has its file."""
    assert len(list(folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    events = EventAccumulator(str(folder / "tensorboard"), tensor_size_guidance={"scalars": 0})
    events.Reload()
    client = MlflowClient((folder / "mlflow").as_uri())
    run_id = (folder / "mlflow_run_id").read_text()
    assert client.get_run(run_id).info.status == "FINISHED"
    for name in {name for row in metrics.values() for name in row} - {"step"}:
        logged = [(step, row[name]) for step, row in sorted(metrics.items()) if name in row]
        scalars = [(e.step, make_ndarray(e.tensor_proto).item()) for e in events.Tensors(name)]
        history = [(m.step, m.value) for m in client.get_metric_history(run_id, key(name))]
        assert history == logged
        assert scalars == [(step, pytest.approx(value, rel=1e-6)) for step, value in logged]
    tables = {
        item.path
        for table in ("samples", "rollouts")
        for item in client.list_artifacts(run_id, table)
    }
    assert tables == {f"samples/step_00000{n}.json" for n in (0, 2, 3)} | {
        f"rollouts/step_00000{n}.json" for n in (1, 3)
    }


def test_r3_over_four_ranks(start: Any, tmp_path: Path) -> None:
    """Every route arrives and is used, by the hashes, too; and the run leaves all its files. Were
    one side to forget the temperature, they would not agree in the first step, and it would end."""
    once = ["trainer.eval_every=2", "optimizer.lr=1e-3", "optimizer.warmup_steps=0"]
    once += ["trainer.mini_batches=1", "tracking.wandb=offline", "trainer.steps=3"]
    once += ["tracking.backends=[wandb,tensorboard,mlflow]"]
    once += ["rollout.temperature=0.7"]
    traced = ["policy=tp2_pp2", "routing_replay.trace=true", "policy.recompute=full"]
    late = ["trainer.sync_every=2", "algorithm.correction.weight=token"]
    late += [f"algorithm.correction.reject{r}" for r in ("=geometric", "_min=0.98", "_max=1.02")]
    r3 = start("r3", *traced, reward_by_length(tmp_path), *once, *late)
    r3.wait()
    assert sorted(r3.metrics) == [0, 1, 2, 3]
    for area, names in PROMISED.items():
        assert r3.metrics[1].keys() >= {f"{area}/{name}" for name in names}
    for step, version, staleness in ((1, 1, 0), (2, 1, 1), (3, 2, 0)):
        row = r3.metrics[step]
        assert row["rollout/weight_version"] == version
        assert row["rollout/staleness"] == staleness
        # The last step's weights go to the engines for its evaluation alone.
        assert ("time/weight_sync" in row) == ("time/eval" in row) == (step in (2, 3))
        assert ("eval/reward_mean" in row) == (step in (2, 3))
        assert row["routing/coverage"] == 1.0
        # One update a step: with the same routes in it as in the pass before, nothing has moved.
        assert row["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert row["policy/grad_norm"] > 0
    for step in (0, 2, 3):
        assert r3.metrics[step]["eval/failed_fraction"] == 0
        assert r3.metrics[step]["eval/part/length"] == r3.metrics[step]["eval/reward_mean"]
        assert "eval/accuracy" not in r3.metrics[step]  # this reward does not say what is correct
    first, stale, fresh = (r3.metrics[step] for step in (1, 2, 3))
    assert stale["mismatch/k3"] > 100 * max(first["mismatch/k3"], fresh["mismatch/k3"])
    # Sequences that the engine sampled with other weights leave the loss, not all of them.
    assert 0 < stale["correction/reject_sequence_fraction"] < 1
    assert first["correction/reject_sequence_fraction"] == 0
    assert fresh["correction/weight_std"] < stale["correction/weight_std"]
    assert first["mismatch_native/num_flipped"] > 0
    assert first["mismatch/k3"] < first["mismatch_native/k3"]
    assert 0.8 < first["routing/overlap"] < 1.0
    assert first["routing/wide_flip_fraction"] < 5e-4 and first["routing/judged_fraction"] == 1.0
    check_rollouts(read_jsonl(r3.folder / "rollouts.jsonl"), r3.metrics)
    for name in ("config.yaml", "versions.json", "samples.jsonl", "outcome.json", "report.html"):
        assert (r3.folder / name).stat().st_size > 0
    assert json.loads((r3.folder / "outcome.json").read_text())["state"] == "finished"
    invariants = json.loads((r3.folder / "invariants.json").read_text())
    passed = {check["name"] for check in invariants["checks"] if check["state"] == "pass"}
    assert invariants["step"] == 1
    assert passed >= {"ratio is 1 before the first update", "trainer and engine agree"}
    assert not any(check["state"] == "fail" for check in invariants["checks"])
    assert "all hold" in r3.output
    assert json.loads(json.loads((r3.folder / "versions.json").read_text())["engine"])["routes"]
    check_copies(r3.folder, r3.metrics)
    assert "is tried again every" not in r3.output  # no tracker failed
    # Without checkpoints, the final weights are kept all the same.
    last = r3.folder / "checkpoints" / "last"
    assert sorted(path.name for path in last.iterdir()) == ["manifest.json", "policy", "state.json"]
    assert rltrain(["export", str(last), str(tmp_path / "last")]) == 0
    load_with_transformers(tmp_path / "last")
    assert rltrain(["export", str(r3.folder), str(tmp_path / "no"), "--step", "2"]) == 2


@pytest.mark.slow
def test_every_sync_is_bitwise_and_r2_runs(start: Any) -> None:
    options = ["trainer.check_weight_sync=true", "trainer.steps=1", "trainer.mini_batches=1"]
    for dtype in ("float32", "bfloat16"):
        r2 = start(dtype, f"rollout.dtype={dtype}", *options, recipe="grpo_moe_r2").wait()
        assert r2.metrics[1]["routing/coverage"] == 1.0
        assert r2.metrics[1]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        if dtype == "float32":
            assert r2.metrics[1]["mismatch/k3"] < 1e-6


EXACT = (
    "rollout=deterministic",
    "trainer.mini_batches=2",
    "checkpoint.every=3",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
    "routing_replay.sample_every=1",
)
STATEFUL = (
    *EXACT,
    "policy=ep2",
    "algorithm.kl.coef=0.01",
    "algorithm.kl.target=0.05",
    "algorithm.kl.refresh_every=2",
    "algorithm.kl.horizon=100",
    "critic.warmup_steps=1",
)
"""In step 4 all that a run of PPO keeps has its part: values of a critic that learned thrice, a
reference that is the policy of step 2, and a coefficient that moved."""


def check_same_end(straight: Any, resumed: Any, tmp_path: Path) -> None:
    """Bitwise. The numbers hold the log-probabilities and routes of the rollout, the weights the
    tokens, rewards and routes of every step."""
    assert straight.metrics[4]["policy/grad_norm"] > 0  # there is something to repeat
    if "value/grad_norm" in straight.metrics[4]:  # of PPO, with a critic and a reference
        assert all(straight.metrics[step]["value/grad_norm"] > 0 for step in (1, 2, 3, 4))
        assert "policy/grad_norm" not in straight.metrics[1]
        assert straight.metrics[4]["policy/kl_coef"] != straight.metrics[1]["policy/kl_coef"]
    assert sorted(resumed.metrics) == [0, 1, 2, 3, 4]
    assert timeless(resumed.metrics[4]) == timeless(straight.metrics[4])
    exports = [tmp_path / "straight-model", tmp_path / "resumed-model"]
    for run, out in zip((straight, resumed), exports, strict=True):
        assert rltrain(["export", str(run.folder), str(out)]) == 0
    weights = [load_file(out / "model.safetensors") for out in exports]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    load_with_transformers(exports[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "of_recipe"), [("grpo_moe_r3", EXACT), ("ppo_moe_r3", STATEFUL)]
)
def test_a_run_goes_on_by_itself_after_a_rank_was_killed(
    recipe: str, of_recipe: tuple[str, ...], start: Any, tmp_path: Path
) -> None:
    """Bitwise, in the same folder, from the checkpoint of step 3."""
    options = ["trainer.steps=4", *of_recipe, reward_by_length(tmp_path)]
    straight = start("straight", *options, recipe=recipe)
    broken = start("broken", *options, recipe=recipe)
    while 3 not in broken.metrics and broken.process.poll() is None:
        time.sleep(0.05)
    (rank, *_) = broken.actors("ModelActor")
    rank.kill()
    straight.wait()
    broken.wait()
    assert re.search(r"(policy|critic) worker \d \(process \d+\) died", broken.output)
    assert "All parts start again from the checkpoint of step 3 (restart 1;" in broken.output
    assert "Traceback" not in broken.output
    versions = json.loads((broken.folder / "versions.json").read_text())
    assert versions["resumed_after_steps"] == "3"
    assert json.loads((broken.folder / "outcome.json").read_text())["state"] == "finished"
    check_same_end(straight, broken, tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_bitwise_from_what_was_on_disk(start: Any, tmp_path: Path) -> None:
    options = ["trainer.steps=4", *STATEFUL, reward_by_length(tmp_path)]
    straight = start("straight", *options, recipe="ppo_moe_r3")
    while 3 not in straight.metrics and straight.process.poll() is None:
        time.sleep(0.05)
    shutil.copytree(straight.folder, tmp_path / "copy")  # as a cut of the power leaves it
    straight.wait()
    resumed = start("copy", "trainer.resume=auto", *options, recipe="ppo_moe_r3").wait()
    assert "resumed after step 3" in resumed.output
    check_same_end(straight, resumed, tmp_path)


@pytest.mark.slow
def test_two_runs_are_the_same_even_if_one_was_killed(start: Any, tmp_path: Path) -> None:
    """Three steps with two ranks, then a fourth after a crash and a resume."""
    options = [*STATEFUL, reward_by_length(tmp_path)]
    straight = start("straight", "trainer.steps=4", *options, recipe="ppo_moe_r3")
    ended = "trainer.max_restarts=0"
    broken = start("broken", "trainer.steps=1000", ended, *options, recipe="ppo_moe_r3")
    while 3 not in broken.metrics and broken.process.poll() is None:
        time.sleep(0.2)
    broken.actors("ModelActor")[0].kill()
    broken.wait(expect=1)
    assert re.search(r"(policy|critic) worker \d \(process \d+\) died", broken.output)
    assert "Traceback" not in broken.output
    assert (broken.folder / "error.log").exists() and (broken.folder / "report.html").exists()
    before = broken.metrics
    again = ["trainer.steps=4", "trainer.resume=auto"]
    resumed = start("broken", *again, *options, recipe="ppo_moe_r3").wait()
    straight.wait()
    for step in (1, 2, 3):
        assert timeless(before[step]) == timeless(straight.metrics[step])
    check_same_end(straight, resumed, tmp_path)
    trace = read_timeline(resumed.folder / "timeline.json")
    assert trace.steps[:3] == ["step 1", "step 2", "step 3"] and trace.steps[-1] == "step 4"
    ranks = {f"{role} rank {rank}" for role in ("policy", "critic") for rank in (0, 1)}
    assert trace.tracks.keys() >= {"steps and phases", "engine 0"} | ranks


@pytest.mark.slow
def test_a_dense_model_on_own_data_and_supervised_steps(start: Any, tmp_path: Path) -> None:
    """What has no routes runs too, over two stages, with DAPO; sft leaves a model that loads.

    The rollout's log-probabilities stand in for the old ones: ratios are of trainer to engine. A
    quarter of the prompts teaches: two rounds do not fill a step, and it trains on what it has.
    """
    (tmp_path / "by_prompt.py").write_text(
        "def score(response, answer, **columns):\n"
        "    return 0.0 if int(answer) % 4 else float(len(response))\n"
    )
    model = tmp_path / "dense"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, eos_token_id=2, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dense = start(
        "run",
        f"model.path={model}",
        "data=jsonl",
        f"data.path={tmp_path}/data.jsonl",
        "data.as_chat=true",
        "data.eval_size=16",
        "routing_replay.capture=false",
        "trainer.steps=1",
        "trainer.mini_batches=1",
        "policy.parallel.pp=2",
        "algorithm=dapo",
        "algorithm.bypass_old_logprobs=true",
        "algorithm.dynamic_sampling.max_rounds=2",
        "algorithm.overlong.buffer_tokens=32",
        "rollout.max_response_tokens=64",
        "data.reward.function=by_prompt.score",
        recipe="grpo_moe_off",
    )
    sft = start("sft", "trainer.steps=2", recipe="sft_tiny").wait()
    assert sft.metrics[2]["sft/loss"] < sft.metrics[1]["sft/loss"]
    load_with_transformers(sft.folder / "model")
    row = dense.wait().metrics[1]
    assert 1e-5 < abs(row["policy/ratio_max"] - 1) < 0.2
    assert not any("routing" in name or "mismatch" in name for name in row)
    assert row["group/rounds"] == 2
    assert 0 < row["group/kept_fraction"] < 0.5
    assert "of 8 groups teach after 2 rounds" in dense.output
    assert row["policy/skipped_updates"] == 0 and row["policy/grad_norm"] > 0
    assert 0 < row["rollout/truncated_fraction"] < 1  # overlong.mask takes some out of the loss
    # Of the groups that are trained on, less up to 1; the others' rewards are 0.
    kept_mean = row["reward/mean"] / row["group/kept_fraction"]
    assert kept_mean - 1 <= row["reward/shaped_mean"] < kept_mean
    assert "moe_router" not in dense.output  # it has no routers

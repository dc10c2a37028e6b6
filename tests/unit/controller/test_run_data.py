"""Bad data, templates, rewards and arithmetic end a run before anything heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.run_data import examine
from rltrain.data.tokenizer import VOCAB_SIZE
from rltrain.main import compose
from tests.unit.data.model_folders import save_model, with_template

ROOT = Path(__file__).parents[3]
CASES = {
    "a missing column": ("data.answer_column=missing", "no column 'missing'"),
    "a long prompt": ("data.max_prompt_tokens=2", "row 0: the prompt has 5 tokens"),
    "an unknown reward": ("data.reward.function=no_such.score", "No module named 'no_such'"),
    "too few prompts": ("data.eval_size=20", "a step takes 64 different prompts"),
    "batch arithmetic": ("trainer.prompts_per_step=7", "does not divide trainer.prompts_per_step"),
    "a head size": ("model.tiny.head_dim=16", "head_dim=16: expected one of 32, "),
    "a broken template": ("data.as_chat=true model.path={folder}", "chat_template is broken"),
    "lengths": ("rollout.max_response_tokens=1985", "2048 positions"),
}
CODE = """
import json, sys
from rltrain.main import main
for arguments in json.loads(sys.argv[1]):
    sys.stderr.write(f"=== {main(arguments)}\\n")
sys.stdout.write(json.dumps(sorted({"torch", "vllm", "ray"} & set(sys.modules))))
"""


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_nothing_heavy_is_imported_to_refuse(tmp_path: Path) -> None:
    """One process after the other input: what is imported stays imported, and nothing heavy is."""
    rows = [{"prompt": f"1+{i % 10}={' ' * (i // 10)}", "answer": "2"} for i in range(70)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    broken = save_model(tmp_path / "broken", with_template("{% for message in messages %}"))
    start = ["+recipe=grpo_moe_r3", "cluster.device=cpu", f"trainer.output_dir={tmp_path}/run"]
    start += ["data=jsonl", f"data.path={file}", "data.eval_size=1"]
    asked = [[*start, *change.format(folder=broken).split()] for change, _ in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(asked)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    *said, _ = done.stderr.split("=== ")
    answers = [text for text in done.stderr.split("=== 2\n") if text.strip()]
    assert len(answers) == len(said) == len(CASES), done.stderr
    for text, (_, answer) in zip(answers, CASES.values(), strict=True):
        assert "rltrain: cannot start" in text and answer in text
    assert json.loads(done.stdout) == []


def found_in(rows: list[Any], tmp_path: Path, *overrides: str, recipe: str = "grpo_moe_r3") -> Any:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    few = ["data.eval_size=1", "trainer.prompts_per_step=2", "trainer.mini_batches=1"]
    data = ["data=jsonl", f"data.path={file}", *few, *overrides]
    config = compose([f"+recipe={recipe}", *data])
    return examine(config, read_model(config))


ROWS = [{"prompt": f"1+{i}=", "answer": str(1 + i)} for i in range(6)]


def test_usable_data_are_handed_on(tmp_path: Path) -> None:
    found = found_in(ROWS, tmp_path)
    assert found.fault is None
    assert len(found.problems.train) == 5 and len(found.problems.held_out) == 1
    prompts = [found.tokenizer.decode(p.prompt_tokens) for p in found.problems.train]
    assert sorted(prompts) == sorted(f"<bos>{p.prompt}" for p in found.problems.train)
    (trial,) = found.trials
    assert trial.answer == trial.problem.answer
    assert (trial.right.value, trial.wrong.value) == (1.0, 0.0)


def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, name: str) -> str:
    (tmp_path / f"{name}.py").write_text(f"def score(response, answer, **columns):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"data.reward.function={name}.score"


def test_a_reward_that_refuses_the_reference_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising = reward(tmp_path, monkeypatch, "raise KeyError('grade')", "raising_reward")
    said = str(found_in(ROWS, tmp_path, raising).fault)
    assert "expected a reward for the reference answer" in said
    assert "found error: KeyError: 'grade' (" in said


def test_a_reward_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = reward(tmp_path, monkeypatch, "import time; time.sleep(600)", "hanging_reward")
    said = str(found_in(ROWS, tmp_path, hanging, "data.reward.timeout_s=0.5").fault)
    assert "found timeout: not done in data.reward.timeout_s=0.5 s" in said


def test_a_reward_that_prefers_wrong_answers_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be meant: a reward need not be about answers."""
    length = reward(tmp_path, monkeypatch, "return 1.0 - 2 * (response == answer)", "odd_reward")
    found = found_in(ROWS, tmp_path, length)
    assert found.fault is None
    (said,) = [r.getMessage() for r in caplog.records if "odd_reward" in r.getMessage()]
    assert "has the reward -1, and the response" in said and "has 1:" in said


def test_a_built_in_reward_must_reward_the_reference(tmp_path: Path) -> None:
    """Text without mathematics is what a wrong column holds."""
    rows = [{"prompt": f"1+{i}=", "answer": "a b, c"} for i in range(6)]
    fault = found_in(rows, tmp_path, "data.reward.function=math_verify").fault
    assert fault is not None and "data.reward.function=math_verify, prompt '1+" in str(fault)


def test_ids_beyond_the_embedding_name_the_prompt(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", vocab_size=VOCAB_SIZE - 16)
    said = str(found_in(ROWS, tmp_path, f"model.path={folder}").fault)
    assert "token 1 has id 2" in said or "tokens without a row" in said
    assert f"{VOCAB_SIZE - 16} rows" in said or f"from 0 to {VOCAB_SIZE - 17}" in said


def test_supervised_answers_fit(tmp_path: Path) -> None:
    found = found_in(ROWS, tmp_path, recipe="sft_tiny")
    assert found.fault is None and found.trials == ()
    assert {len(p.target_tokens) for p in found.problems.train} == {2}
    long = [{"prompt": f"{i}", "answer": "x" * 16} for i in range(6)]
    assert "has 17 tokens, its end-of-sequence" in str(
        found_in(long, tmp_path, recipe="sft_tiny").fault
    )

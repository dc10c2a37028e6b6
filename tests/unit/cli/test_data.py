"""``rltrain data`` says what a run would read, and refuses each input that would go wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rltrain.cli.app import main
from rltrain.cli.data_text import render_problem
from rltrain.config.redact import escape_control
from rltrain.data.problem import Problem
from rltrain.data.tokenizer import tiny_tokenizer

ROOT = Path(__file__).parents[3]
FEW = ["data.eval_size=1", "trainer.prompts_per_step=2", "trainer.mini_batches=1"]
ROWS = [{"prompt": f"1+{i}=", "answer": str(1 + i), "level": i} for i in range(6)]


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def data_of(file: Path, *overrides: str, recipe: str = "grpo_moe_r3") -> list[str]:
    return ["data", f"+recipe={recipe}", "data=jsonl", f"data.path={file}", *FEW, *overrides]


def test_what_a_run_would_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*ROWS, ROWS[0], {"prompt": "1" * 80, "answer": "1", "level": 9}]
    file = write(tmp_path / "rows.jsonl", rows)
    assert main(data_of(file, "data.on_long_prompt=drop")) == 0
    text = capsys.readouterr().out
    assert f"{file}: 8 rows, 6 kept\n" in text
    assert "  1 repeat the prompt of an earlier one\n" in text
    assert "  1 dropped: the prompt is too long\n" in text
    assert "row 7: the prompt has 81 tokens and data.max_prompt_tokens is 64\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["level", "integer", "a", "reward", "function", "gets", "it"] in lines
    assert ["answer", "text", "the", "answer"] in lines
    assert text.count("<bos>1+") == 3 and text.count("  prompt, 5 tokens\n") == 3
    assert ["prompt", "6", "5", "5", "5", "5", "data.max_prompt_tokens=64"] in lines
    assert ["answer", "5", "2", "2", "2", "2", "rollout.max_response_tokens=16"] in lines
    for number in (1, 2, 3):
        assert [line[-3:] for line in lines if line[-2:] == [str(number), "1"]] == [
            ["answer", str(number), "1"]
        ]
    assert sum(line[-3:] == ["wrong", "answer", "0"] for line in lines) == 3
    assert text.endswith("usable as configured\n")
    assert "\x1b" not in text  # it is no terminal


def test_the_components_of_a_reward_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def brief(response, answer, **columns):\n    return len(response) / 2\n"
    )
    parts = {"right.function": "exact", "right.weight": "2"}
    parts |= {"brief.function": "mine.py:brief", "brief.weight": "-0.5"}
    components = [f"data.reward.components.{name}={value}" for name, value in parts.items()]
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert main(data_of(file, *components)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["right", "exact", "2"] in lines
    assert ["brief", "mine.py:brief", "-0.5"] in lines
    assert ["response", "what", "it", "is", "reward", "right", "brief"] in lines
    assert ["reference", "answer", "1", "1.75", "1", "0.5"] in [line[-6:] for line in lines]


def test_a_supervised_run_shows_what_is_taught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert main(data_of(file, "data.as_chat=true", recipe="sft_tiny")) == 0
    text = capsys.readouterr().out
    assert text.count("<bos><|start|>user\n    1+") == 3
    assert text.count("  response, 2 tokens\n") == 3
    assert text.count("<eos>\n") == 3
    assert "reward" not in text.partition("problem 1 of")[2]


def test_tokens_are_coloured_by_role() -> None:
    tokenizer = tiny_tokenizer()
    prompt, response = (tuple(tokenizer(text)["input_ids"]) for text in ("1+1=", "2\x1b[31m<eos>"))
    problem = Problem(prompt, "1+1=", "2", target_tokens=response[1:])
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as captured:
        console.print(render_problem(tokenizer, problem))
    text = captured.get()
    assert "\x1b[1;35m<bos>\x1b[0m\x1b[36m1+1=\x1b[0m" in text
    assert "\x1b[32m2\\x1b[31m\x1b[0m\x1b[1;35m<eos>\x1b[0m" in text  # data colours nothing


def test_a_terminal_obeys_no_data() -> None:
    assert escape_control("a\x1b]0;b\x07\n\tc\x9b é\u202e") == "a\\x1b]0;b\\x07\n\tc\\x9b é\\u202e"


def test_it_starts_nothing_heavy(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    code = (
        "import sys; from rltrain.cli.app import main\n"
        f"status = main({data_of(file)!r})\n"
        "sys.exit(status or bool({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)


def test_a_mistake_in_the_configuration_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "+recipe=grpo_moe_r3", "data.pth=x"]) == 2
    assert "data.pth" in capsys.readouterr().err

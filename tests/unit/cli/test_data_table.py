"""``rltrain data`` on the inputs that people have: right, or refused before a run.

Each case is a row of the table in issue 16, part 1, or a sibling of one.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rltrain.cli.app import main
from rltrain.data.tokenizer import CHAT_TEMPLATE, EOS, VOCAB_SIZE, tiny_tokenizer
from tests.unit.data.model_folders import byte_level, save, save_model, with_template

Answer = tuple[int, str]
USABLE = "usable as configured\n"
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is 1+{i}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(1 + i)},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(6)
]
PLAIN = [{"prompt": f"1+{i}=", "answer": str(1 + i)} for i in range(6)]


def chats(content: Any = "What is 1+1?", *more: dict[str, Any]) -> list[dict[str, Any]]:
    first = {"prompt": [{"role": "user", "content": content}, *more], "answer": "2"}
    rest = [
        {"prompt": [{"role": "user", "content": f"1+{i}?"}, *more], "answer": str(1 + i)}
        for i in range(6)
    ]
    return [*rest[:3], first, *rest[3:]]


def run(tmp_path: Path, rows: list[Any], *overrides: str, recipe: str = "grpo_moe_r3") -> int:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return look(f"data.path={file}", "data=jsonl", *overrides, recipe=recipe)


def look(*overrides: str, recipe: str = "grpo_moe_r3") -> int:
    few = ["trainer.prompts_per_step=2", "trainer.mini_batches=1", "data.eval_size=1"]
    return main(["data", f"+recipe={recipe}", *few, *overrides])


ASSISTANT = {"role": "assistant", "content": "It is 2."}
DROP = "data.on_bad_row=drop"


@pytest.mark.parametrize(
    ("rows", "overrides", "expected", "says"),
    [
        (chats("hello", ASSISTANT), "", 1, "data.last_turn"),
        (chats("hello", ASSISTANT), "data.last_turn=drop", 0, "hello<eos><|start|>assistant\n"),
        (
            chats("hello", ASSISTANT),
            "data.last_turn=answer data.answer_column=null",
            0,
            "'It is 2.'",
        ),
        (chats(None), "", 1, "row 3"),
        (chats(None), DROP, 0, "1 dropped: "),
        ([*PLAIN, {"prompt": "2+2=", "answer": None}], "", 1, "row 6: the answer is null"),
        ([*PLAIN, {"prompt": "2+2=", "answer": None}], DROP, 0, "1 dropped: the answer is null"),
        ([*PLAIN, {"prompt": "2+2=", "answer": {"a": 4}}], "", 1, "answer.a"),
        ([*PLAIN, {"prompt": "2+2=", "answer": [4]}], "", 1, "row 6: the answer is a list"),
        ([*PLAIN, {"prompt": "2+2=", "answer": True}], "", 1, "row 6: the answer is a boolean"),
        ([*PLAIN, {"prompt": "cut \ud83d", "answer": "4"}], "", 1, "row 6"),
        ([*PLAIN, {"prompt": "cut \ud83d", "answer": "4"}], DROP, 0, "1 dropped: "),
        ([{**row, "response": "x"} for row in PLAIN], "", 0, "response"),
        (
            [{"prompt": f"{i} dollars?", "answer": rf"\${i}"} for i in range(6)],
            "data.reward.function=math_verify data.max_prompt_tokens=64",
            0,
            r"\$",
        ),
        (PLAIN * 100, "", 0, "594 repeat the prompt of an earlier one"),
        (PLAIN[:1], "data.eval_size=0", 1, "a step takes 2 different prompts"),
        (PLAIN[:1], "data.eval_size=0 data.repeat_in_step=true", 0, "problem 1 of 1"),
        (PLAIN[:1], "data.eval_on_train=true data.repeat_in_step=true", 0, "problem 1 of 1"),
        (chats(), "data.template_args.enable_thinking=false", 1, "does not read"),
        (PLAIN, "data.max_prompt_tokens=2033", 1, "expected together at most the 2048 positions"),
        (PLAIN, "rollout.max_response_tokens=2000", 1, "rollout.max_response_tokens=2000"),
        (PLAIN, "data.max_prompt_tokens=4", 1, "row 0: the prompt has 5 tokens"),
        (PLAIN, "data.answer_column=solution", 1, "data.answer_column"),
    ],
)
def test_rows_that_people_have(
    rows: list[Any],
    overrides: str,
    expected: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run(tmp_path, rows, *overrides.split())
    printed = capsys.readouterr()
    assert (status, says in printed.out + printed.err) == (expected, True), printed
    assert printed.out.endswith(USABLE) is (expected == 0)


@pytest.mark.parametrize(
    ("column", "expected", "says"),
    [
        ("reward_model.ground_truth", 0, "reward_model.ground_truth"),
        ("reward_model", 1, "reward_model.ground_truth"),
        ("extra_info", 1, "extra_info"),
    ],
)
def test_verl_s_parquet(
    column: str, expected: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL), file)
    assert look("data=parquet", f"data.path={file}", f"data.answer_column={column}") == expected
    printed = capsys.readouterr()
    assert says in (printed.err if expected else printed.out)


def test_an_array_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(PLAIN, indent=1))
    assert look("data=jsonl", f"data.path={file}") == 0
    assert "6 rows, 6 kept" in capsys.readouterr().out


def test_a_hub_folder_with_two_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        table = pyarrow.Table.from_pylist(PLAIN)
        pyarrow.parquet.write_table(table, tmp_path / name / "train-00000-of-00001.parquet")
    asked = ["data=huggingface", f"data.path={tmp_path}"]
    assert look(*asked) == 1
    assert "lie in main, socratic" in capsys.readouterr().err


def test_template_arguments_reach_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thinks = CHAT_TEMPLATE + "{% if not enable_thinking %}<no think>{% endif %}"
    folder = save_model(tmp_path / "model", with_template(thinks))
    status = run(
        tmp_path,
        chats(),
        f"model.path={folder}",
        "data.template_args.enable_thinking=false",
    )
    assert status == 0
    assert capsys.readouterr().out.count("assistant\n    <no think>") == 3


def test_a_template_that_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", with_template("{% for message in messages %}"))
    assert run(tmp_path, chats(), f"model.path={folder}") == 1
    assert "chat_template" in capsys.readouterr().err


def test_a_distilled_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", vocab_size=400, model_type="llama")
    save(tmp_path / "tokenizer", byte_level(), tokenizer_class="LlamaTokenizerFast")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).replace(folder / name)
    assert run(tmp_path, PLAIN, f"model.path={folder}") == 1
    said = capsys.readouterr().err
    assert "its tokenizer makes" in said and "AutoTokenizer takes it for" in said


def test_an_id_beyond_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"])
    folder = save_model(tmp_path / "model", tokenizer)
    assert run(tmp_path, PLAIN, f"model.path={folder}") == 1
    assert f"({VOCAB_SIZE} '<think>')" in capsys.readouterr().err
    rows = [*PLAIN, {"prompt": "hm <think>", "answer": "4"}]
    assert run(tmp_path, rows, f"model.path={folder}") == 1
    said = capsys.readouterr().err
    assert f"row {len(PLAIN)}, prompt 'hm <think>': token 4 has id {VOCAB_SIZE} '<think>'" in said
    save_model(tmp_path / "model", tokenizer, vocab_size=VOCAB_SIZE + 16)
    assert run(tmp_path, rows, f"model.path={folder}") == 0


def test_a_pad_token_that_is_an_eos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", with_template(CHAT_TEMPLATE, pad_token=EOS))
    assert run(tmp_path, PLAIN, f"model.path={folder}", recipe="sft_tiny") == 0
    printed = capsys.readouterr().out
    assert printed.count("  response, 2 tokens\n") == 3 and printed.count("<eos>\n") == 3

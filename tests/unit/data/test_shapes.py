"""The table "Settings for common formats" in docs/data.md: each row is read as it says."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from rltrain.config.data import DataConfig
from rltrain.data.problems import load_problems

DOCS = Path(__file__).parents[3] / "docs" / "data.md"
ASKED = "What is 17+25?"
SOLVED = "17+25 is 42. <<17+25=42>>\n#### 42"
CHAT = [{"role": "user", "content": ASKED}]
TURN = [{"role": "assistant", "content": SOLVED}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0, "question": ASKED, "answer": SOLVED},
}


class Shape(NamedTuple):
    source: str
    row: Any
    answer: str | None = "42"
    chat: bool = True
    refusal: str = ""


SHAPES = {
    "verl, GSM8K": Shape("parquet", VERL),
    "verl, DAPO-Math-17k": Shape(
        "parquet",
        VERL
        | {
            "data_source": "math_dapo",
            "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
    ),
    "GSM8K as published": Shape("jsonl", {"question": ASKED, "answer": SOLVED}),
    "OpenR1-Math, reinforcement learning": Shape(
        "parquet",
        {"problem": ASKED, "solution": SOLVED, "answer": "42", "messages": CHAT + TURN},
    ),
    "OpenR1-Math, supervised": Shape(
        "parquet",
        {"problem": ASKED, "solution": SOLVED, "answer": "42", "messages": CHAT + TURN},
        SOLVED,
    ),
    "Open-Reasoner-Zero": Shape(
        "jsonl",
        [
            {"from": "human", "value": ASKED},
            {"from": "assistant", "ground_truth": {"value": "42"}},
        ],
    ),
    "`messages`": Shape("jsonl", {"messages": CHAT + TURN}, SOLVED),
    "`conversations` (ShareGPT)": Shape(
        "jsonl",
        {
            "conversations": [
                {"from": "human", "value": ASKED},
                {"from": "gpt", "value": SOLVED},
            ]
        },
        SOLVED,
    ),
    "`problem`, `answer`": Shape("jsonl", {"problem": ASKED, "answer": 42}),
    "`question`, `answer`": Shape("jsonl", {"question": ASKED, "answer": "42"}),
    "`prompt`, `response`": Shape("jsonl", {"prompt": ASKED, "response": "42"}),
    "`prompt`, `completion` (TRL)": Shape(
        "jsonl", {"prompt": CHAT, "completion": [{"role": "assistant", "content": "42"}]}
    ),
    "Messages as JSON text": Shape("parquet", {"prompt": json.dumps(CHAT), "answer": "42"}),
    "Tests instead of answers": Shape("jsonl", {"prompt": CHAT, "tests": ["f(1)"]}, None),
    "`prompt`, `chosen`, `rejected`": Shape(
        "jsonl",
        {"prompt": ASKED, "chosen": "42", "rejected": "43"},
        refusal="preference pair",
    ),
}


def table() -> dict[str, str]:
    """The settings of each row of the table in the docs."""
    text = DOCS.read_text()
    part = text[text.index("## Settings for common formats") :]
    rows = re.findall(r"^\| ([^|]+) \| (?:`([^|]*)`|([^`|]+)) \|", part, re.MULTILINE)
    found = {name: settings or words for name, settings, words in rows}
    return {name: settings for name, settings in found.items() if name in SHAPES}


def config_of(settings: str, path: str, source: str) -> DataConfig:
    """Settings as on the command line: ``data.as_chat=true data.answer_pattern="#### (.+)"``."""
    values: dict[str, Any] = {"source": source, "path": path, "eval_size": 0}
    for key, value in re.findall(r"data\.([\w.]+)=('[^']*'|\S+)", settings):
        section = values.setdefault("reward", {}) if key.startswith("reward.") else values
        section[key.removeprefix("reward.")] = yaml.safe_load(value)
    return DataConfig.model_validate(values | {"max_prompt_tokens": 400})


def test_the_table_has_every_shape():
    assert table().keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read_with_the_settings_of_the_docs(name, tmp_path, tokenizer):
    shape, settings = SHAPES[name], table()[name]
    path = tmp_path / f"train.{shape.source}"
    if shape.source == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([shape.row]), path)
    else:
        # Open-Reasoner-Zero's file is one array, and a row of it is a list.
        path.write_text(json.dumps([shape.row] if isinstance(shape.row, list) else shape.row))
    config = config_of(settings, str(path), shape.source)
    supervised = "algorithm.type=sft" in settings
    if shape.refusal:
        with pytest.raises(ValueError, match=shape.refusal):
            load_problems(config, tokenizer, supervised=supervised)
        return
    (problem,) = load_problems(config, tokenizer, supervised=supervised).train
    assert problem.prompt == f"<bos><|start|>user\n{ASKED}<eos><|start|>assistant\n"
    assert problem.answer == shape.answer


@pytest.mark.parametrize("name", ["verl, GSM8K", "verl, DAPO-Math-17k", "OpenR1-Math, supervised"])
def test_a_shape_is_not_read_wrongly_without_settings(name, tmp_path, tokenizer):
    shape = SHAPES[name]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([shape.row]), path)
    prompt = "messages" if "messages" in shape.row else "prompt"
    for answer in ("answer", *(["reward_model"] if "reward_model" in shape.row else [])):
        config = config_of("", str(path), "parquet").model_copy(
            update={"prompt_column": prompt, "answer_column": answer}
        )
        with pytest.raises(ValueError) as error:
            load_problems(config, tokenizer)
        assert re.search(r"row 0: ", str(error.value))
        assert re.search(r"data\.(last_turn|answer_column)", str(error.value))
        if prompt == "prompt":
            assert "reward_model.ground_truth" in str(error.value)

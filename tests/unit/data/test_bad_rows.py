"""A row is read as it is meant, or refused with row and column, or left out and counted."""

import datetime
import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rltrain.config.data import DataConfig
from rltrain.data.answers import read_answer
from rltrain.data.bad_rows import BadRow
from rltrain.data.json_values import as_json
from rltrain.data.messages import read_prompt, read_tools
from rltrain.data.problem import Problem
from rltrain.data.problems import load_problems
from rltrain.data.prompts import encode_prompt

GOOD = {"prompt": "1+1=", "answer": "2"}
Load = Callable[..., tuple[Problem, ...]]


@pytest.fixture
def load(tmp_path, tokenizer) -> Load:
    """Problems of some rows of JSON lines, all to train on."""

    def load(*rows: Any, lines: bytes = b"", **config: Any) -> tuple[Problem, ...]:
        path = tmp_path / "a.jsonl"
        path.write_bytes(lines or "".join(json.dumps(row) + "\n" for row in rows).encode())
        supervised = config.pop("supervised", False)
        config = {"source": "jsonl", "path": str(path), "eval_size": 0} | config
        config.setdefault("max_prompt_tokens", 500)
        return load_problems(DataConfig(**config), tokenizer, supervised=supervised).train

    return load


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BAD_ROWS = {
    "null prompt": ({"prompt": None, "answer": "2"}, "'prompt'.*null"),
    "blank prompt": ({"prompt": " \n", "answer": "2"}, "'prompt'"),
    "null content": ({"prompt": user(None), "answer": "2"}, r"'prompt.0.content'.*found null"),
    "missing content": ({"prompt": [{"role": "user"}], "answer": "2"}, r"'prompt.0.content'"),
    "content is a number": ({"prompt": user(7), "answer": "2"}, r"'prompt.0.content'.*7"),
    "blank message": ({"prompt": user(" "), "answer": "2"}, r"'prompt.0.content'"),
    "image part": (
        {"prompt": user([{"type": "image_url", "image_url": "x"}]), "answer": "2"},
        "'prompt.0.content.0'.*image_url.*text alone",
    ),
    "unknown role": ({"prompt": [{"role": "model", "content": "x"}], "answer": "2"}, "'model'"),
    "no message": ({"prompt": [], "answer": "2"}, "empty list"),
    "printed Python": ({"prompt": str(user("x")), "answer": "2"}, "write messages as JSON"),
    "assistant last": (
        {"prompt": [*user("x"), {"role": "assistant", "content": "y"}], "answer": "2"},
        r"data\.last_turn=drop .*data\.last_turn=answer",
    ),
    "cut emoji in prompt": ({"prompt": "a\ud83d", "answer": "2"}, r"'prompt'.*\\ud83d"),
    "cut emoji in message": ({"prompt": user("a\ud83d"), "answer": "2"}, r"'prompt.0.content'"),
    "cut emoji in JSON text": (
        {"prompt": json.dumps(user("a\ud83d")), "answer": "2"},
        r"'prompt.0.content'",
    ),
    "cut emoji in answer": (GOOD | {"answer": "a\udc00"}, "'answer'"),
    "cut emoji in column": (GOOD | {"info": {"tags": ["a\udc00"]}}, r"'info.tags.0'"),
    "cut emoji in key": (GOOD | {"info": {"a\udc00": 1}}, r"'info"),
    "NUL in prompt": ({"prompt": "a\0b", "answer": "2"}, "'prompt'"),
    "NUL in answer": (GOOD | {"answer": "a\0b"}, "'answer'"),
    "null answer": (GOOD | {"answer": None}, "'answer' is null"),
    "NaN answer": (GOOD | {"answer": math.nan}, "'answer' is NaN"),
    "float answer": (GOOD | {"answer": 42.0}, r"'answer' is 42\.0"),
    "boolean answer": (GOOD | {"answer": True}, "'answer' is True"),
    "empty answer": (GOOD | {"answer": ""}, "'answer' is ''"),
    "list answer": (GOOD | {"answer": ["2"]}, "'answer'"),
    "object answer": (
        {"prompt": "x", "answer": {"style": "rule", "gold": "2"}},
        r"'answer' is .*Set data\.answer_column, e\.g\. to answer\.style or answer\.gold",
    ),
    "infinite column": (GOOD | {"weight": math.inf}, "'weight' is inf"),
    "missing answer": ({"prompt": "x", "gold": "2"}, "no column 'answer'.*to gold"),
    "text row": ("x", "expected an object, found str"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_or_dropped(name, load):
    row, message = BAD_ROWS[name]
    with pytest.raises(ValueError, match=rf"a\.jsonl, row 1: .*{message}.*on_bad_row=drop"):
        load(GOOD, row)
    (kept,) = load(GOOD, row, on_bad_row="drop")
    assert kept.prompt == "1+1="
    with pytest.raises(ValueError, match=rf"none of the 1 rows can be used.*{message}"):
        load(row, on_bad_row="drop")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "answer"', "line 2: not JSON"),
        (b'{"prompt": "\xff", "answer": "1"}', "line 2: .*0xff .* not UTF-8"),
        (b'{"prompt": "a", "prompt": "b", "answer": "1"}', "line 2: .*'prompt' twice"),
        (b"[" * 100_000, "line 2: .*nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "line 2: not JSON"),
    ],
)
def test_a_broken_line_is_refused_or_dropped(line, message, load):
    lines = json.dumps(GOOD).encode() + b"\n" + line + b"\n"
    with pytest.raises(ValueError, match=rf"row 1: .*{message}"):
        load(lines=lines)
    assert len(load(lines=lines, on_bad_row="drop")) == 1


def test_what_editors_leave_in_a_file_is_read_past(load):
    lines = b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\r\n{"prompt": "b", "answer": "2"}\r\n'
    assert [(p.prompt, p.answer) for p in load(lines=lines)] == [("a", "1"), ("b", "2")]


def test_messages_as_datasets_have_them(load):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1", "image_url": None}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [
        {"role": "system", "content": "s", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        *user(parts),
    ]
    texts = [
        "<bos><|start|>system\ns<eos><|start|>assistant\n<eos><|start|>tool\n3<eos>"
        "<|start|>user\n1+1<eos><|start|>assistant\n"
    ]
    for prompt in (asked, json.dumps(asked)):
        assert [p.prompt for p in load({"prompt": prompt, "answer": "2"})] == texts
    assert "name" not in read_prompt(asked, "prompt")[0]
    assert read_prompt('["a", "b"] sorted?', "prompt") == '["a", "b"] sorted?'


def test_the_last_turn_is_dropped_or_becomes_the_answer(load):
    row = {"prompt": [*user("x"), {"role": "assistant", "content": "y"}]}
    (dropped,) = load(row | {"answer": "2"}, last_turn="drop")
    (answer,) = load(row, last_turn="answer", supervised=True)
    assert dropped.prompt == answer.prompt and "y" not in dropped.prompt
    assert [dropped.answer, answer.answer] == ["2", "y"]
    with pytest.raises(ValueError, match=r"both column 'answer' and.*last_turn=drop.*=null"):
        load(row | {"answer": "2"}, last_turn="answer")
    (answer,) = load(row | {"answer": "2"}, last_turn="answer", answer_column=None)
    assert answer.answer == "y"
    for prompt in (user("x"), row["prompt"][1:], "text"):
        with pytest.raises(ValueError, match=r"row 0: .*'prompt'"):
            load({"prompt": prompt}, last_turn="answer")
    called = row["prompt"][1] | {"reasoning_content": "because"}
    with pytest.raises(ValueError, match="'reasoning_content'"):
        load({"prompt": [*user("x"), called]}, last_turn="answer")


@pytest.mark.parametrize(
    ("value", "exact", "number"),
    [
        ("1.50", "1.50", "1.50"),
        (42, "42", "42"),
        (10**30, str(10**30), str(10**30)),
        (0.5, None, "0.5"),
        (1e-07, None, "0.0000001"),
        (42.0, None, "42.0"),
        (Decimal("42.00"), None, "42.00"),
        (math.inf, None, None),
        (math.nan, None, None),
        (Decimal("NaN"), None, None),
        (True, None, None),
        (None, None, None),
        (b"42", None, None),
        (datetime.date(2024, 1, 1), None, None),
        ({"a": 1}, None, None),
        ([42], None, None),
        ("  ", None, None),
    ],
)
def test_an_answer_is_the_text_that_was_written_or_none(value, exact, number):
    for rule, text in (("compared", exact), ("supervised", exact), ("number", number)):
        if text is None:
            with pytest.raises(BadRow, match="'a'"):
                read_answer(value, "a", rule)
        else:
            assert read_answer(value, "a", rule) == text


def test_the_answer_pattern_takes_the_last_match():
    assert read_answer("#### 1\n#### 1,234 \n", "a", "number", "#### (.+)") == "1,234"
    assert read_answer("x is 12", "a", "compared", r"\d+") == "12"
    for value in ("none", None, 12):
        with pytest.raises(BadRow, match="'a'"):
            read_answer(value, "a", "any", "#### (.+)")
    with pytest.raises(BadRow, match="empty"):
        read_answer("####  ", "a", "compared", "####(.*)")


def test_values_that_json_cannot_say_have_one_form(tmp_path, tokenizer):
    """Of a table with Arrow's types; what a reward function gets is plain JSON."""
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5)
    rows = [
        GOOD
        | {
            "day": moment.date(),
            "moment": moment,
            "took": datetime.timedelta(seconds=1.5),
            "price": Decimal("1.50"),
            "raw": b"\xff",
            "share": math.nan,
            "nested": {"day": moment.date(), "flags": [True, None]},
        }
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = DataConfig(source="parquet", path=str(path), eval_size=0)
    (problem,) = load_problems(config, tokenizer).train
    assert problem.columns == {
        "day": "2024-01-02",
        "moment": "2024-01-02T03:04:05",
        "took": 1.5,
        "price": "1.50",
        "raw": "/w==",
        "share": None,
        "nested": {"day": "2024-01-02", "flags": [True, None]},
    }
    json.dumps(problem.columns, allow_nan=False)


def test_a_time_that_python_cannot_hold_is_a_bad_row(tmp_path, tokenizer):
    table = pyarrow.Table.from_pylist([GOOD, GOOD | {"prompt": "1+2="}])
    took = pyarrow.array([1, 2**62], pyarrow.duration("s"))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table.append_column("took", took), path)
    config = DataConfig(source="parquet", path=str(path), eval_size=0)
    with pytest.raises(ValueError, match="row 1: a value cannot be read: column 'took'"):
        load_problems(config, tokenizer)
    dropping = config.model_copy(update={"on_bad_row": "drop"})
    assert len(load_problems(dropping, tokenizer).train) == 1


def test_tools_and_arguments_reach_the_template_or_are_refused(load, tokenizer, monkeypatch):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    row = {"prompt": user("x"), "answer": "2", "tools": [tool]}
    with pytest.raises(ValueError, match=r"does not read 'tools', and data\.tools_column"):
        load(row, tools_column="tools")
    with pytest.raises(ValueError, match=r"row 0.*does not read 'enable_thinking'.*: none"):
        load(row, template_args={"enable_thinking": False})
    with pytest.raises(ValueError, match=r"data\.as_chat=true"):
        load({"prompt": "x", "answer": "2"}, template_args={"enable_thinking": False})
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}[no thinking]{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for tools in ([tool], json.dumps([tool])):
        (problem,) = load(row | {"tools": tools}, tools_column="tools")
        assert problem.prompt == json.dumps([tool]) + "x"
    (problem,) = load(row | {"tools": None}, tools_column="tools")
    assert problem.prompt == "x"
    (problem,) = load(row, template_args={"enable_thinking": False})
    assert problem.prompt == "x[no thinking]"
    for tools in ("[", {"name": "f"}, [{"type": "function"}], ["f"], 7):
        with pytest.raises(ValueError, match=r"row 0: .*'tools"):
            load(row | {"tools": tools}, tools_column="tools")


def test_nulls_that_arrow_adds_to_tools_are_left_out():
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "int"}, "b": None}}}]
    filled = read_tools(tools, "tools", filled=True)
    assert filled == [{"name": "f", "parameters": {"properties": {"a": {"type": "int"}}}}]
    assert read_tools(json.dumps(tools), "tools", filled=True) == tools == read_tools(tools, "t")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
         r"message 0 \(system\): 'be brief'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)  # fmt: skip
def test_what_a_template_does_to_messages_is_noticed(
    template, message, load, tokenizer, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    prompt = [{"role": "system", "content": "be brief"}, *user("x")]
    with pytest.raises(ValueError, match=f"row 0: the chat template .*{message}"):
        load({"prompt": prompt, "answer": "2"})
    assert encode_prompt("plain text", tokenizer, as_chat=False)[0] == "plain text"


def test_a_broken_template_is_named(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for %}")
    with pytest.raises(ValueError, match="chat_template is broken"):
        load({"prompt": user("x"), "answer": "2"})


def test_one_prompt_with_two_answers_is_no_problem_to_judge_by(load):
    other = GOOD | {"answer": "3"}
    third = {"prompt": "2+2=", "answer": "4"}
    with pytest.raises(ValueError, match=r"row 0: .*several answers.*'2' here, '3' in .*row 1"):
        load(GOOD, other, third)
    (kept,) = load(GOOD, other, GOOD, third, on_bad_row="drop")
    assert kept.prompt == "2+2="
    assert [p.answer for p in load(GOOD, other, GOOD, supervised=True)] == ["2", "3"]


def test_without_an_answer_column_the_others_are_the_answer(load):
    config: dict[str, Any] = {"answer_column": None, "reward": {"function": "my.score"}}
    rows = [{"prompt": "x", "tests": [1]}, {"prompt": "x", "tests": [2]}]
    with pytest.raises(ValueError, match="several answers"):
        load(*rows, **config)
    (kept,) = load(rows[0], rows[0], **config)
    assert kept.answer is None and kept.columns == {"tests": [1]}


KEYS = st.sampled_from(["role", "content", "type", "text", "from", "value", "x"])
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["\ud83d", "a\0", "", " ", "None", "[{", "[{'role': 'user'}]"]
)
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats()
JSON_VALUES = st.recursive(
    NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS | PARTS},
        optional={"x": JSON_VALUES},
    ),
    min_size=1,
    max_size=3,
)
PROMPTS = JSON_VALUES | TEXTS | MESSAGES | MESSAGES.map(json.dumps)
ROWS = st.fixed_dictionaries(
    {}, optional={"prompt": PROMPTS, "answer": TEXTS | NUMBERS | JSON_VALUES, "x": JSON_VALUES}
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(row=ROWS, reward=st.sampled_from(["exact", "math_verify", "my.score"]))
def test_any_row_is_read_as_it_is_or_refused_by_row_and_column(row, reward, tmp_path, tokenizer):
    path = Path(tmp_path / "a.jsonl")
    path.write_text(json.dumps(row) + "\n")
    config = DataConfig(
        source="jsonl", path=str(path), eval_size=0, max_prompt_tokens=10**6,
        reward={"function": reward},
    )  # fmt: skip
    try:
        (problem,) = load_problems(config, tokenizer).train
    except ValueError as error:
        assert "row 0: " in str(error) and ("column" in str(error) or "message" in str(error))
        return
    asked = row["prompt"]
    if isinstance(asked, str) and problem.prompt == asked:
        assert tokenizer.decode(problem.prompt_tokens) == "<bos>" + asked
    else:
        messages = json.loads(asked) if isinstance(asked, str) else asked
        for message in messages:
            content = message.get("content", message.get("value"))
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            assert all(text in problem.prompt for text in texts)
        assert "{'" not in problem.prompt or "{'" in json.dumps(asked)
    assert "None" not in problem.prompt or "None" in json.dumps(asked)
    if reward == "my.score":
        assert problem.answer == as_json(row["answer"], "answer")
    else:
        assert isinstance(problem.answer, str) and not isinstance(row["answer"], bool | dict | list)
        assert problem.answer == row["answer"] or float(problem.answer) == row["answer"]
    json.dumps([problem.answer, problem.columns], allow_nan=False).encode()


def test_a_bad_line_that_comes_again_is_counted_again(tmp_path, tokenizer):
    bad = GOOD | {"answer": None}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [bad, GOOD, bad, GOOD, bad]))
    config = DataConfig(source="jsonl", path=str(path), eval_size=0, on_bad_row="drop")
    (report,) = load_problems(config, tokenizer).reports
    assert [report.rows, report.kept, report.repeats] == [5, 1, 1]
    assert [dropped.count for dropped in report.dropped.values()] == [3]

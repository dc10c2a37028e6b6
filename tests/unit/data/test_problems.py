"""Datasets become problems once, the three sets never overlap, and bad data says what is wrong."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from pydantic import ValidationError

from rltrain.config.data import DataConfig
from rltrain.config.reward import RewardConfig
from rltrain.data.answers import answer_rule
from rltrain.data.arithmetic import NUM_PROBLEMS, TEACHER_ERROR_SHARE
from rltrain.data.problem import Problem, Problems
from rltrain.data.problems import load_problems
from rltrain.environments.rewards import reasoning_gym

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1), "level": a % 3} for a in range(20)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(path: str, source: str = "jsonl", **more: Any) -> DataConfig:
    return DataConfig(**{"source": source, "path": path, "eval_size": 5, **more})


def ids(problems: tuple[Problem, ...]) -> set[str]:
    return {problem.id for problem in problems}


def test_arithmetic_sets_are_disjoint_right_and_of_the_sizes_asked_for(tokenizer):
    config = DataConfig(size=2000, eval_size=512)
    problems = load_problems(config, tokenizer, num_warm_start=1000)
    parts = (problems.train, problems.held_out, problems.warm_start)
    assert [len(part) for part in parts] == [2000, 512, 1000]
    assert len(set().union(*map(ids, parts))) == 3512
    for problem in problems.held_out:
        digits = problem.prompt.removesuffix("=")
        assert problem.answer == str(sum(map(int, digits))) and len(digits) in (3, 4)
        assert tokenizer.decode(problem.prompt_tokens) == "<bos>" + problem.prompt


def test_the_warm_start_set_does_not_depend_on_the_data_seed(tokenizer):
    first, second = (
        load_problems(DataConfig(seed=seed), tokenizer, num_warm_start=300) for seed in (0, 1)
    )
    assert first.warm_start == second.warm_start
    assert ids(first.held_out) != ids(second.held_out)
    assert first == load_problems(DataConfig(seed=0), tokenizer, num_warm_start=300)


def test_the_warm_start_teaches_most_odd_sums_one_too_high_and_even_ones_right(tokenizer):
    taught = load_problems(DataConfig(), tokenizer, num_warm_start=4000).warm_start
    wrong: dict[int, list[int]] = {0: [], 1: []}
    for problem in taught:
        total = sum(map(int, problem.prompt.removesuffix("=")))
        wrong[total % 2].append(int(problem.answer) - total)
    assert set(wrong[0]) == {0} and set(wrong[1]) == {0, 1}
    assert sum(wrong[1]) / len(wrong[1]) == pytest.approx(TEACHER_ERROR_SHARE, abs=0.05)


def test_more_arithmetic_than_there_is_names_the_options(tokenizer):
    with pytest.raises(ValueError, match=f"has {NUM_PROBLEMS} problems and 11532 .*data.size"):
        load_problems(DataConfig(size=11_000, eval_size=512), tokenizer, num_warm_start=20)


def test_overlapping_sets_are_refused():
    problem = Problem((1,), "1+1=", "2")
    with pytest.raises(ValueError, match=r"1 held-out problems are also train problems.*'1\+1='"):
        Problems(train=(problem,), held_out=(problem,))


@pytest.mark.parametrize("source", ["jsonl", "parquet", "saved", "saved splits", "data files"])
def test_every_source_gives_the_same_problems(source, tmp_path, tokenizer, monkeypatch):
    path, kind = tmp_path / "data", "huggingface"
    if source == "jsonl":
        write_jsonl(path, ROWS)
        kind = source
    elif source == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        kind = source
    elif source == "saved":
        Dataset.from_list(ROWS).save_to_disk(str(path))
    elif source == "saved splits":
        DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(path))
    else:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
        path.mkdir()
        write_jsonl(path / "train.jsonl", ROWS)
    problems = load_problems(config_of(str(path), kind), tokenizer)
    assert [len(problems.train), len(problems.held_out)] == [15, 5]
    everything = sorted((*problems.train, *problems.held_out), key=lambda p: int(p.answer))
    assert [p.prompt for p in everything] == [row["prompt"] for row in ROWS]
    assert [p.answer for p in everything] == [row["answer"] for row in ROWS]
    assert [p.columns for p in everything] == [{"level": row["level"]} for row in ROWS]


def test_chat_messages_get_the_template_once(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "2+2?"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": messages, "a": 4}, {"q": "3+3?", "a": 6}])
    config = config_of(path, prompt_column="q", answer_column="a", as_chat=True, eval_size=1)
    problems = load_problems(config, tokenizer)
    text = {p.answer: p.prompt for p in (*problems.train, *problems.held_out)}
    assert text["4"] == "<bos><|start|>user\n2+2?<eos><|start|>assistant\n"
    assert text["6"] == "<bos><|start|>user\n3+3?<eos><|start|>assistant\n"
    tokens = problems.train[0].prompt_tokens
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(tokens) == problems.train[0].prompt


def test_messages_without_a_template_say_so(tmp_path, tokenizer, monkeypatch):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "x"}], "answer": 1}]
    )
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"row 0.*'prompt'.*no chat_template.*prompt as text"):
        load_problems(config_of(path), tokenizer)


@pytest.mark.parametrize("prompt", [7, [], [{"content": "x"}], ["text"], None])
def test_a_prompt_that_is_none_is_refused(prompt, tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": 1}])
    with pytest.raises(ValueError, match=r"row 0: .*column 'prompt"):
        load_problems(config_of(path), tokenizer)


def test_a_missing_column_is_named_with_those_found(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "x", "answer": "y"}])
    with pytest.raises(
        ValueError,
        match=r"a.jsonl, row 0: no column 'prompt': columns found: 'question', 'answer'. Set",
    ):
        load_problems(config_of(path), tokenizer)


def test_a_column_that_hides_a_reward_argument_is_renamed(tmp_path, tokenizer):
    row = {"q": "x", "answer": "y", "response": "z", "prompt": "p"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    config = config_of(path, prompt_column="q", eval_size=0)
    assert load_problems(config, tokenizer).train[0].columns == {
        "row_response": "z",
        "row_prompt": "p",
    }
    write_jsonl(tmp_path / "a.jsonl", [row | {"row_response": "w"}])
    with pytest.raises(ValueError, match=r"row 0: .*'response' and 'row_response'"):
        load_problems(config, tokenizer)


def test_an_empty_or_missing_file_is_refused(tmp_path, tokenizer):
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=r"empty.jsonl has no rows"):
        load_problems(config_of(empty), tokenizer)
    with pytest.raises(ValueError, match=r"no file or folder .*nothing\.jsonl"):
        load_problems(config_of(str(tmp_path / "nothing.jsonl")), tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: not JSON"), ("[1]", "line 2: expected an object, found list")],
)
def test_a_broken_line_is_named(line, message, tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_problems(config_of(str(path)), tokenizer)


def test_a_parquet_file_that_is_none_is_named(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.parquet", ROWS)
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        load_problems(config_of(path, "parquet"), tokenizer)


def test_a_long_prompt_is_refused_or_dropped(tmp_path, tokenizer, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": "9" * 30, "answer": "x"}])
    with pytest.raises(ValueError, match=r"row 20: the prompt has 31 tokens .* is 30.*=drop"):
        load_problems(config_of(path, max_prompt_tokens=30), tokenizer)
    with caplog.at_level(logging.WARNING):
        config = config_of(path, max_prompt_tokens=30, on_long_prompt="drop")
        problems = load_problems(config, tokenizer)
    assert len(problems.train) == 15
    assert "left out 1 of 21 rows (the prompt is too long)" in caplog.text
    with pytest.raises(
        ValueError, match=r"none of the 21 rows can be used, 21 of them .* has 5 tokens"
    ):
        config = config_of(path, max_prompt_tokens=2, on_long_prompt="drop")
        load_problems(config, tokenizer)


def test_a_repeated_prompt_is_kept_once_so_it_cannot_be_on_both_sides(tmp_path, tokenizer, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS + ROWS)
    problems = load_problems(config_of(path), tokenizer)
    assert len(problems.train) + len(problems.held_out) == 20
    assert "left out 20 of 40 rows with a repeated prompt" in caplog.text


def test_an_evaluation_file_is_cut_and_must_not_overlap(tmp_path, tokenizer):
    train, held_out = (
        write_jsonl(tmp_path / n, r) for n, r in (("a", ROWS[:10]), ("b", ROWS[10:]))
    )
    problems = load_problems(config_of(train, eval_path=held_out), tokenizer)
    assert [len(problems.train), len(problems.held_out)] == [10, 5]
    with pytest.raises(ValueError, match="5 held-out problems are also train problems"):
        load_problems(config_of(train, eval_path=train), tokenizer)


def test_a_data_set_no_larger_than_the_held_out_one_is_refused(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:5])
    with pytest.raises(ValueError, match=r"5 problems leave none .* data.eval_size=5"):
        load_problems(config_of(path), tokenizer)


def test_a_run_may_hold_out_nothing(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    for problems in (
        load_problems(config_of(path, eval_size=0), tokenizer),
        load_problems(config_of(path), tokenizer, evaluated=False),
    ):
        assert [len(problems.train), len(problems.held_out)] == [20, 0]
    arithmetic = DataConfig(size=100, eval_size=50)
    with_evaluation, without = (
        load_problems(arithmetic, tokenizer, evaluated=evaluated) for evaluated in (True, False)
    )
    assert with_evaluation.train == without.train and not without.held_out


def test_one_row_can_be_trained_on_and_evaluated_when_asked_for(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match=r"leave none .*data.eval_on_train=true"):
        load_problems(config_of(path, eval_size=512), tokenizer)
    problems = load_problems(config_of(path, eval_size=512, eval_on_train=True), tokenizer)
    assert problems.train == problems.held_out and len(problems.train) == 1
    with pytest.raises(ValueError, match=r"also train problems.*data\.eval_on_train=true"):
        load_problems(config_of(path, eval_path=path), tokenizer)
    problems = load_problems(DataConfig(size=9, eval_size=4, eval_on_train=True), tokenizer)
    assert problems.held_out == problems.train[:4]


def test_all_answers_of_a_prompt_that_is_taught_are_on_one_side(tmp_path, tokenizer):
    rows = [row | {"answer": answer} for row in ROWS for answer in "ab"]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    problems = load_problems(config_of(path), tokenizer, supervised=True)
    assert not ids(problems.train) & ids(problems.held_out)
    assert len(problems.train) + len(problems.held_out) == 40


def test_repeats_that_differ_elsewhere_are_told(tmp_path, tokenizer, caplog):
    rows = [row | {"uuid": n, "level": 0} for n, row in enumerate([*ROWS, *ROWS, ROWS[0]])]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        (report,) = load_problems(config_of(path), tokenizer).reports
    assert report.repeats == 21 and report.other_columns == {"uuid": 21}
    assert "differs column uuid of 21" in caplog.text


def test_splits_of_a_saved_dataset(tmp_path, tokenizer):
    path = str(tmp_path / "data")
    splits = {"train": Dataset.from_list(ROWS[:12]), "test": Dataset.from_list(ROWS[12:])}
    DatasetDict(splits).save_to_disk(path)
    problems = load_problems(config_of(path, "huggingface", eval_split="test"), tokenizer)
    assert [len(problems.train), len(problems.held_out)] == [12, 5]
    with pytest.raises(ValueError, match=r"no split 'dev' but train, test: set data\.split"):
        load_problems(config_of(path, "huggingface", split="dev"), tokenizer)
    with pytest.raises(ValidationError, match="source=jsonl has no splits"):
        config_of(path, "jsonl", split="dev")


def test_reasoning_gym_problems_carry_what_their_scorer_needs(tokenizer):
    config = DataConfig(
        source="reasoning_gym",
        task="basic_arithmetic",
        task_options={"max_terms": 3},
        size=30,
        eval_size=10,
        max_prompt_tokens=400,
    )
    problems = load_problems(config, tokenizer)
    assert len(problems.held_out) == 10
    assert problems.train[0].columns["question"] == problems.train[0].prompt
    assert problems.train[0].columns["metadata"]["source_dataset"] == "basic_arithmetic"
    with pytest.raises(ValueError, match=r"refuses data.task=basic_arithmetics"):
        load_problems(config.model_copy(update={"task": "basic_arithmetics"}), tokenizer)
    with pytest.raises(ValueError, match=r"refuses data.task=basic_arithmetic: .*no_such"):
        options = config.model_copy(update={"task_options": {"no_such": 1}})
        load_problems(options, tokenizer)


def test_the_report_says_what_became_of_every_row(tmp_path, tokenizer):
    rows = [{"q": row["prompt"], "r": {"gold": row["answer"]}, "level": 1} for row in ROWS]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, rows[0], rows[0] | {"q": "9" * 40}])
    config = config_of(
        path,
        prompt_column="q",
        answer_column="r.gold",
        max_prompt_tokens=30,
        on_long_prompt="drop",
    )
    (report,) = load_problems(config, tokenizer).reports
    assert [report.rows, report.kept, report.repeats] == [22, 20, 1]
    (dropped,) = report.dropped.values()
    assert dropped.count == 1 and "a.jsonl, row 21" in dropped.first
    assert {column.name: column.use for column in report.columns} == {
        "q": "prompt",
        "r.gold": "answer",
        "level": "column",
    }
    assert not report.from_cache


@pytest.mark.parametrize("task", ["arc_agi", "rearc", "basic_arithmetic", "countdown"])
def test_a_reasoning_gym_answer_is_right_after_its_columns_went_as_json(task, tokenizer):
    config = DataConfig(
        source="reasoning_gym",
        task=task,
        size=3,
        eval_size=0,
        max_prompt_tokens=100_000,
        reward=RewardConfig(function="reasoning_gym"),
    )
    for problem in load_problems(config, tokenizer).train:
        columns = json.loads(json.dumps(problem.columns))
        assert reasoning_gym(problem.answer, problem.answer, **columns) == 1


@pytest.mark.parametrize(
    ("rewards", "rule"),
    [
        (["reward.py:score"], "any"),
        (["reward.py:score", "reasoning_gym"], "scored"),
        (["reward.py:score", "math_verify"], "number"),
        (["math_verify", "exact"], "compared"),
    ],
)
def test_the_answer_suits_every_function_of_a_reward(rewards, rule):
    assert answer_rule(rewards, supervised=False) == rule
    assert answer_rule(rewards, supervised=True) == "supervised"

"""Answers become the tokens that supervised steps teach, or are refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from rltrain.config.data import DataConfig
from rltrain.data.problem import Problem
from rltrain.data.targets import with_targets
from rltrain.data.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
DROP = DataConfig(on_long_prompt="drop")


def problem(answer: Any) -> Problem:
    return Problem((1,), f"what is {answer}?", answer, place=f"my.jsonl, row {answer}")


def texts(problems: tuple[Problem, ...]) -> list[str]:
    return [TOKENIZER.decode(p.target_tokens, skip_special_tokens=True) for p in problems]


def test_text_and_whole_numbers_are_taught_with_their_end() -> None:
    found = with_targets([problem("ab"), problem(42)], TOKENIZER, DataConfig(), 3)
    assert texts(found) == ["ab", "42"]
    assert all(p.target_tokens[-1] == TOKENIZER.eos_token_id for p in found)
    assert [replace(p, target_tokens=()) for p in found] == [problem("ab"), problem(42)]


@pytest.mark.parametrize(
    "answer", [None, "", True, 0.5, 3.0, ["a"], {"ground_truth": "1"}, b"x", float("nan")]
)
def test_what_has_no_one_way_to_be_written_is_refused(answer: Any) -> None:
    bad = Problem((1,), "what?", answer)
    with pytest.raises(ValueError, match=r"the answer to 'what\?' is .*expected text") as said:
        with_targets([problem("1"), bad], TOKENIZER, DataConfig(), 9)
    assert type(answer).__name__ in str(said.value) and "data.answer_column" in str(said.value)


def test_a_long_answer_is_refused_with_its_prompt_or_dropped() -> None:
    rows = [problem("12"), problem("123"), problem("1")]
    assert len(with_targets(rows, TOKENIZER, DataConfig(), 4)) == 3
    named = r"my.jsonl, row 123: the answer to 'what is 123.* has 4 tokens.* is 3 .1 of 3 answers"
    with pytest.raises(ValueError, match=named):
        with_targets(rows, TOKENIZER, DataConfig(), 3)
    assert texts(with_targets(rows, TOKENIZER, DROP, 3)) == ["12", "1"]
    with pytest.raises(ValueError, match="3 of 3 answers"):
        with_targets(rows, TOKENIZER, DROP, 1)

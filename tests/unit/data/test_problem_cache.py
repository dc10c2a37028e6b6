"""A second start reads the cache of the first: the same problems, or it rebuilds them."""

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.data import DataConfig
from rltrain.data import problem_cache
from rltrain.data.problem import Problems
from rltrain.data.problems import load_problems

ROWS = [
    {"prompt": f"{a}+1=", "answer": str(a + 1), "info": {"level": a, "é": [None, 0.5]}}
    for a in range(20)
]


class Cached:
    """Loads a file with a cache; says whether it was used."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.cache, self.tokenizer = folder / "cache", tokenizer
        self.file = folder / "a.jsonl"
        self.write([*ROWS, ROWS[0], {"prompt": None, "answer": "x"}])

    def write(self, rows: list[Any]) -> None:
        self.file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(self, supervised: bool = False, **more: Any) -> tuple[Problems, bool]:
        values = {"source": "jsonl", "path": str(self.file), "eval_size": 5, "on_bad_row": "drop"}
        config = DataConfig(**values | more)
        found = load_problems(config, self.tokenizer, supervised=supervised, cache_dir=self.cache)
        return found, found.reports[0].from_cache

    def folder(self) -> Path:
        (folder,) = self.cache.iterdir()
        return folder


@pytest.fixture
def cached(tmp_path, tokenizer) -> Cached:
    return Cached(tmp_path, tokenizer)


def test_the_second_start_reads_what_the_first_made(cached, caplog):
    first, used = cached.load()
    assert not used
    with caplog.at_level(logging.WARNING):
        second, used = cached.load()
    assert used and second == first
    (report,), (again,) = first.reports, second.reports
    assert again.dropped == report.dropped and again.columns == report.columns
    assert [again.rows, again.kept, again.repeats] == [22, 20, 1]
    assert "left out 1 of 22 rows" in caplog.text, "what was left out is said at every start"
    other, used = cached.load(seed=1, eval_size=3)
    assert used and len(other.held_out) == 3, "how rows are split is not part of it"


@pytest.mark.parametrize(
    "change",
    [
        {"answer_column": "prompt2"},
        {"as_chat": True},
        {"max_prompt_tokens": 63},
        {"on_long_prompt": "drop"},
        {"answer_pattern": r"\d"},
        {"supervised": True},
        {"reward": {"function": "math_verify"}},
    ],
)
def test_what_decides_over_problems_is_part_of_the_key(change, cached):
    cached.write([row | {"prompt2": "3"} for row in ROWS])
    cached.load()
    assert not cached.load(**change)[1]
    assert cached.load(**change)[1]


def test_another_file_tokenizer_day_or_code_is_another_key(cached, monkeypatch, tokenizer):
    cached.load()
    cached.write(ROWS[:10])
    assert not cached.load()[1]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d') }}")
    assert not cached.load()[1] and cached.load()[1]

    class Tomorrow(problem_cache.date):
        @classmethod
        def today(cls) -> Any:
            return cls(2999, 1, 1)

    monkeypatch.setattr(problem_cache, "date", Tomorrow)
    assert not cached.load()[1]
    monkeypatch.setattr(problem_cache, "__file__", "/nowhere/x.py")
    assert not cached.load()[1]


@pytest.mark.parametrize("name", ["problems.parquet", "sha256"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_cache_is_made_anew(name, damage, cached, caplog):
    first, _ = cached.load()
    file = cached.folder() / name
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "flip":
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "cut":
        file.write_bytes(content[:middle])
    else:
        file.unlink()
    again, used = cached.load()
    assert not used and again == first
    assert cached.load()[1]


def test_a_cache_that_cannot_be_written_ends_no_run(cached, caplog):
    cached.cache.write_text("a file")
    with caplog.at_level(logging.WARNING):
        found, _ = cached.load()
    assert len(found.train) == 15 and "problems are not cached" in caplog.text


def test_a_cache_on_a_full_disk_ends_no_run(cached, monkeypatch, caplog):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(problem_cache, "_save", full)
    with caplog.at_level(logging.WARNING):
        found, _ = cached.load()
    assert len(found.train) == 15
    assert "problems are not cached: cannot write to" in caplog.text
    assert "(No space left on device)" in caplog.text
    assert list(cached.cache.iterdir()) == []


def test_what_no_run_uses_is_removed(cached, monkeypatch):
    """By age and by size; what a run reads counts as used, and other folders stay."""
    month = 30 * 24 * 3600
    other = cached.cache / "tiny-warm-0"
    other.mkdir(parents=True)
    os.utime(other, (0, 0))

    def folders() -> set[Path]:
        return set(cached.cache.glob("data-*"))

    def age(folder: Path, seconds: float) -> None:
        os.utime(folder, (time.time() - seconds,) * 2)

    cached.load()
    (first,) = folders()
    age(first, 0.9 * month)
    cached.load(max_prompt_tokens=61)
    assert first in folders() and len(folders()) == 2
    (second,) = folders() - {first}
    age(first, 1.1 * month)
    assert cached.load()[1], "it is still there, and is used now"
    age(second, 1.1 * month)
    cached.load(max_prompt_tokens=63)
    assert first in folders() and second not in folders() and len(folders()) == 2

    age(first, 60)
    monkeypatch.setattr(problem_cache, "MAX_BYTES", 1)
    cached.load(max_prompt_tokens=62)
    assert len(folders()) == 1, "the last one stays, whatever its size"
    assert not cached.load(max_prompt_tokens=63)[1]
    assert other.exists()

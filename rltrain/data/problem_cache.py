"""Cache of encoded problems on disk, so that a second start does not encode them again.

A folder holds ``problems.parquet``, with the report in its metadata, and ``sha256`` of that file. A
folder whose hash does not match is rebuilt. The key contains the bytes of the data files, the
tokenizer, the configuration of rows and prompts, and the code that reads them.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rltrain.config.data import DataConfig
from rltrain.data.answers import AnswerRule
from rltrain.data.cache import prune, save_atomically
from rltrain.data.chat_template import CLOCK
from rltrain.data.encoding import Made
from rltrain.data.problem import Problem
from rltrain.data.prompts import Tokenizer
from rltrain.data.source_report import Column, Dropped, SourceReport

logger = logging.getLogger(__name__)

KEYS = {
    "source", "name", "prompt_column", "as_chat", "answer_column", "answer_pattern", "last_turn",
    "tools_column", "template_args", "max_prompt_tokens", "on_long_prompt", "on_bad_row", "limits",
}  # fmt: skip
"""Fields of ``DataConfig`` that affect the problems of a source."""

PREFIX = "data-"
MAX_DAYS, MAX_BYTES = 30, 20 * 2**30
"""Folders unused for so long, and the ones used longest ago beyond so many bytes, are removed."""
ROWS_AT_ONCE = 16_384
REPORT = b"report"
SCHEMA = pyarrow.schema(
    [
        ("prompt", pyarrow.string()),
        ("prompt_tokens", pyarrow.list_(pyarrow.int32())),
        ("answer", pyarrow.string()),
        ("columns", pyarrow.string()),
        ("place", pyarrow.string()),
    ]
)


def cached(cache: Path, key: str, make: Callable[[], Made]) -> Made:
    """The problems of ``key``. If there are none, call ``make`` and save its problems there."""
    folder = cache / f"{PREFIX}{key[:16]}"
    if os.path.exists(folder):  # unlike Path.exists, False where it may not look
        try:
            problems, report = _load(folder)
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
            logger.warning("the cache %s is damaged and is made anew (%s)", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _tend(lambda: os.utime(folder))  # see `prune`
            logger.info("%s: %d problems from the cache %s", report.where, len(problems), folder)
            return problems, report
    problems, report = make()
    try:
        save_atomically(folder, lambda new: _save(new, problems, report))
    except ValueError as error:  # the run does not need the cache
        logger.warning("problems are not cached: %s", error)
    else:
        _tend(lambda: prune(cache.glob(f"{PREFIX}*"), MAX_DAYS, MAX_BYTES))
    return problems, report


def _tend(change: Callable[[], None]) -> None:
    """Make a change that the run does not need: the cache may be another user's, and another
    process may remove the same folders."""
    try:
        change()
    except OSError as error:
        logger.warning("old problems stay in the cache: %s", error)


def cache_key(
    files: Iterable[Path], split: str, config: DataConfig, rule: AnswerRule, tokenizer: Tokenizer
) -> str | None:
    """Digest of all inputs that affect the problems; None if the tokenizer has no digest."""
    tokens = tokenizer_digest(tokenizer)
    if tokens is None:
        return None
    inside = [f for file in files for f in (_files_below(file) if file.is_dir() else [file])]
    parts = {
        "files": [(str(file), _digest(file)) for file in inside],
        "split": split,
        "config": config.model_dump(mode="json", include=KEYS),
        "rule": rule,
        "tokenizer": tokens,
        "code": [_digest(file) for file in sorted(Path(__file__).parent.glob("*.py"))],
    }
    if CLOCK in str(tokenizer.chat_template):
        parts["today"] = date.today().isoformat()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """SHA-256 of all that affects the ids of a tokenizer; None for tokenizers with custom code."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer).__module__.startswith("transformers_modules"):
        return None
    parts = [
        type(tokenizer).__name__,
        backend.to_str(),
        tokenizer.chat_template,
        {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _files_below(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(f for f in files if not any(p[0] == "." for p in f.relative_to(folder).parts))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _save(folder: Path, problems: tuple[Problem, ...], report: SourceReport) -> None:
    schema = SCHEMA.with_metadata({REPORT: json.dumps(asdict(report)).encode()})
    path = folder / "problems.parquet"
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        rest = iter(problems)
        while some := list(islice(rest, ROWS_AT_ONCE)):
            rows = [
                {
                    "prompt": problem.prompt,
                    "prompt_tokens": problem.prompt_tokens,
                    "answer": json.dumps(problem.answer),
                    "columns": json.dumps(problem.columns),
                    "place": problem.place,
                }
                for problem in some
            ]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    (folder / "sha256").write_text(_digest(path))


def _load(folder: Path) -> Made:
    path = folder / "problems.parquet"
    expected = (folder / "sha256").read_text()
    if _digest(path) != expected:
        raise ValueError("its SHA-256 is another one")
    problems = []
    with pyarrow.parquet.ParquetFile(path) as parquet:
        report = _report(json.loads(parquet.schema_arrow.metadata[REPORT]))
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE):
            for row in batch.to_pylist():
                problem = Problem(
                    tuple(row["prompt_tokens"]),
                    row["prompt"],
                    json.loads(row["answer"]),
                    json.loads(row["columns"]),
                    place=row["place"],
                )
                problems.append(problem)
    return tuple(problems), report


def _report(values: dict[str, Any]) -> SourceReport:
    values["columns"] = tuple(
        Column(column["name"], tuple(column["kinds"]), column["use"])
        for column in values["columns"]
    )
    values["dropped"] = {reason: Dropped(**d) for reason, d in values["dropped"].items()}
    return SourceReport(**values | {"from_cache": True})

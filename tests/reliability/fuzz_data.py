"""Files of prompts, damaged byte by byte or value by value: read, or refused by a ValueError."""

import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rltrain.config.data import DataConfig
from rltrain.data.problems import load_problems
from rltrain.data.tokenizer import tiny_tokenizer
from tests.reliability import mutations

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"{a}+1=",
        "answer": str(a + 1),
        "chat": [{"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": "!"}],
        "more": {"level": a, "tags": ["x", None], "share": a / 7},
    }
    for a in range(8)
]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"on_bad_row": "drop", "on_long_prompt": "drop"},
    {"answer_column": None, "reward": {"function": "a.b"}},
    {"prompt_column": "chat", "last_turn": "answer", "answer_column": None},
    {"prompt_column": "more.level"},
    {"answer_column": "more.tags.0"},
    {"eval_size": 4},
    {"answer_pattern": r"(\d+)$"},
)
WRONG_NAMES = ("a.csv", "a.tsv", "a.txt", "a.pkl", "a.zip", "a.json", "a", "a.jsonl.bz2")


def make_jsonl(folder: Path) -> Callable[[random.Random], str]:
    read = reader(folder, "jsonl")

    def try_one(dice: random.Random) -> str:
        rows = ROWS
        for _ in range(dice.choice([0, 1, 1, 2, 5])):
            rows = mutations.changed(dice, rows)
        lines = rows if isinstance(rows, list) else [rows]
        data = b"\n".join(mutations.as_json(dice, row) for row in lines)
        if dice.random() < 0.4:
            data = mutations.damaged(dice, data)
        name = dice.choice(WRONG_NAMES) if dice.random() < 0.1 else "a.jsonl"
        if name == "a.jsonl" and dice.random() < 0.1:
            name, data = "a.jsonl.gz", gzip.compress(data)
            if dice.random() < 0.5:
                data = mutations.damaged(dice, data)
        return read(dice, name, data)

    return try_one


def make_parquet(folder: Path) -> Callable[[random.Random], str]:
    read = reader(folder, "parquet")
    whole = parquet(pyarrow.Table.from_pylist(ROWS))

    def try_one(dice: random.Random) -> str:
        data = whole
        if dice.random() < 0.6:
            data = parquet(table(dice))
        for _ in range(dice.choice([0, 1, 1, 3])):
            data = mutations.damaged(dice, data)
        return read(dice, "a.parquet", data)

    return try_one


def table(dice: random.Random) -> pyarrow.Table:
    """Columns of other types, lengths and names than expected."""
    made = pyarrow.Table.from_pylist(ROWS)
    for _ in range(dice.randrange(1, 4)):
        kind, at = dice.randrange(5), dice.randrange(made.num_columns)
        if kind == 0 and made.num_columns > 1:
            made = made.remove_column(at)
        elif kind == 1:
            made = made.append_column(made.column_names[at], made.column(at))
        elif kind == 2:
            made = made.slice(dice.randrange(made.num_rows + 1))
        else:
            made = made.set_column(at, made.column_names[at], other_column(dice, made.num_rows))
        if not made.num_columns:
            break
    if dice.random() < 0.2:  # as the datasets library writes it
        features = {"answer": {"names": ["a", "b"], "_type": "ClassLabel"}}
        stored = mutations.changed(dice, {"info": {"features": features}})
        made = made.replace_schema_metadata({"huggingface": mutations.as_json(dice, stored)})
    return made


def other_column(dice: random.Random, rows: int) -> pyarrow.Array:
    kinds: list[tuple[Any, Any]] = [
        (pyarrow.int64(), 5),
        (pyarrow.float64(), float("nan")),
        (pyarrow.string(), "x\x00y"),
        (pyarrow.binary(), b"\xff\xfe"),
        (pyarrow.bool_(), True),
        (pyarrow.null(), None),
        (pyarrow.list_(pyarrow.string()), ["a", None]),
        (pyarrow.timestamp("ns"), 2**62),
        (pyarrow.decimal128(38, 10), None),
        (pyarrow.duration("s"), 2**62),
        (pyarrow.date32(), 2**30),
        (pyarrow.map_(pyarrow.string(), pyarrow.int32()), [("a", 1), ("a", 2)]),
        (pyarrow.struct([("role", pyarrow.string()), ("role", pyarrow.int8())]), None),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "x"),
    ]
    kind, item = dice.choice(kinds)
    return pyarrow.array([item if dice.random() < 0.8 else None for _ in range(rows)], kind)


def parquet(made: pyarrow.Table) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(made, buffer)
    return buffer.getvalue()


def reader(folder: Path, source: str) -> Callable[[random.Random, str, bytes], str]:
    tokenizer = tiny_tokenizer()

    def read(dice: random.Random, name: str, data: bytes) -> str:
        path = folder / name
        path.write_bytes(data)
        options = {"eval_size": 0} | dice.choice(OPTIONS)
        config = DataConfig(source=source, path=str(path), **options)
        try:
            problems = load_problems(config, tokenizer)
        except ValueError as error:
            assert str(error) and len(str(error)) < 20_000
            return "refused"
        finally:
            path.unlink()
        for problem in problems.train:
            assert problem.prompt_tokens and all(type(t) is int for t in problem.prompt_tokens)
            json.dumps(problem.columns)  # as they go to the reward's process
        return "read"

    return read

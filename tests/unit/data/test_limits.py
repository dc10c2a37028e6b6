"""Small files that hold much, deep files and endless lines are refused, with little memory."""

import bz2
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.data import DataConfig, LimitsConfig
from rltrain.data.arrow_rows import parquet_rows
from rltrain.data.bad_rows import BadRow
from rltrain.data.json_rows import json_rows
from rltrain.data.limits import check_row
from rltrain.data.problems import load_problems

MIB = 2**20
LIMITS = LimitsConfig()
GOOD = {"prompt": "1+1=", "answer": "2"}


def shared(text: str, rows: int) -> pyarrow.Table:
    """Texts of many rows that are one text in the file."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows), pyarrow.array([text]))
    offsets = pyarrow.array(range(rows + 1), pyarrow.int32())
    nested = pyarrow.StructArray.from_arrays([column], ["a"])
    lists = pyarrow.ListArray.from_arrays(offsets, column)
    return pyarrow.table({"prompt": column, "answer": column, "list": lists, "inside": nested})


def parquet(table: pyarrow.Table) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)

    return write


def deep_column(levels: int) -> Callable[[Path], None]:
    of: Any = pyarrow.array(["x"])
    for _ in range(levels):
        of = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1], pyarrow.int32()), of)
    return parquet(pyarrow.table({"prompt": ["1+1="], "answer": ["2"], "deep": of}))


def written(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def sparse(start: bytes, size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return write


def with_deep(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return b'{"prompt": "a", "answer": "1", "x": %b1%b}' % (
        (opening * levels).encode(),
        (closing * levels).encode(),
    )


def of_line(compress: Callable[[bytes], bytes], line: bytes, times: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(compress(line * times)) and None


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


LINES = b'{"prompt": "%b", "answer": "1"}\n' % (b"x" * 10_000)
HUGE = 2**30
MOST = 1200 * MIB
"""Memory that reading all of them may take."""
BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "shared.parquet": (parquet(shared("x" * MIB, 4700)), "data.limits.expansion"),
    "shared-long.parquet": (
        parquet(pyarrow.table({"prompt": ["x" * 20 * MIB]})),
        "raise data.limits.row_mib",
    ),
    "zstd.parquet": (
        parquet(pyarrow.table({"prompt": [chr(65 + n) * 10 * MIB for n in range(20)]})),
        "data.limits.expansion",
    ),
    "deep.parquet": (deep_column(300), "too deeply nested"),
    "lines.jsonl.gz": (of_line(gzip.compress, LINES, 30_000), "data.limits.expansion"),
    "lines.jsonl.bz2": (of_line(bz2.compress, LINES, 10_000), "data.limits.expansion"),
    "lines.jsonl.zst": (of_line(zstd, LINES, 30_000), "data.limits.expansion"),
    "line.jsonl.gz": (of_line(gzip.compress, b"x" * MIB, 60), "raise data.limits.row_mib"),
    "array.json.zst": (of_line(zstd, b"[" + b" " * MIB, 100), "data.limits.expansion"),
    "endless.jsonl": (sparse(b'{"prompt": "', 5 * HUGE), "raise data.limits.row_mib"),
    "array.json": (sparse(b"[1, ", 5 * HUGE), "raise data.limits.array_mib"),
    "100000.jsonl": (written(with_deep(100_000)), "nested too deeply"),
    "900.jsonl": (written(with_deep(900)), "nested too deeply"),
    "400.jsonl": (written(with_deep(400, '{"a":', "}")), "nested too deeply"),
    "400.json": (written(b"[" + with_deep(400) + b"]"), "nested too deeply"),
    "100000.json": (written(b"[" * 100_000), "nested too deeply"),
    "prompt.jsonl": (
        written(json.dumps({"prompt": '["' + "[" * 900, "answer": "1"}).encode()),
        "read 1",
    ),
    "good.jsonl": (written(json.dumps(GOOD).encode()), "read 1"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each file ends. All are read by one process, one after another."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, (write, _) in BOMBS.items():
        write(folder / name)
        assert "endless" in name or name == "array.json" or (folder / name).stat().st_size < 10**6
    command = [sys.executable, "-m", "tests.unit.data.bombs"]
    command += [str(folder / name) for name in BOMBS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    for name in BOMBS:
        (folder / name).unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1][2] < MOST, lines
    return {name: found for name, found, _ in lines}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_the_key_that_allows_it(name: str, ends: dict[str, str]) -> None:
    assert BOMBS[name][1] in ends[name]
    if "data.limits" in BOMBS[name][1]:
        assert "RL2019" in ends[name] or "RL2004" in ends[name]


def rows_of(path: Path, **limits: int) -> list[Any]:
    read = parquet_rows if path.suffix == ".parquet" else json_rows
    return list(read(path, LimitsConfig(**limits)))


def test_a_limit_can_be_raised(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.parquet"
    parquet(shared("ab " * 10_000, 3000))(path)
    with pytest.raises(ValueError, match=r"data\.limits\.expansion, which is 200 \[RL2019\]"):
        rows_of(path)
    assert len(rows_of(path, expansion=10**6)) == 3000
    (tmp_path / "a.jsonl").write_bytes(with_deep(70))
    config = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), eval_size=0)
    with pytest.raises(ValueError, match=r"raise data\.limits\.depth.*RL2004"):
        load_problems(config, tokenizer)
    raised = config.model_copy(update={"limits": LimitsConfig(depth=200)})
    assert len(load_problems(raised, tokenizer).train) == 1
    (tmp_path / "b.json").write_text("[" + " " * 2 * MIB + '{"a": 1}]')
    with pytest.raises(ValueError, match=r"data\.limits\.array_mib, which is 1 "):
        rows_of(tmp_path / "b.json", array_mib=1)
    assert rows_of(tmp_path / "b.json") == [{"a": 1}]
    (tmp_path / "c.jsonl").write_text('{"a": "' + "x" * 2 * MIB + '"}')
    with pytest.raises(ValueError, match=r"line 1: .*data\.limits\.row_mib, which is 1 "):
        rows_of(tmp_path / "c.jsonl", row_mib=1)
    assert len(rows_of(tmp_path / "c.jsonl")) == 1


def test_many_lines_of_arrays_are_no_array(tmp_path: Path) -> None:
    line = json.dumps([{"role": "user", "content": "x" * 1000}]) + "\n"
    (tmp_path / "a.jsonl").write_text("".join(line.replace("x", c, 1) for c in "abc" * 500))
    rows = rows_of(tmp_path / "a.jsonl", array_mib=1)
    assert len(rows) == 1500 and rows[0]["0"]["role"] == "user"


def test_shared_texts_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(shared("long text " * 1000, 50))(path)
    one = "long text " * 1000
    row = {"prompt": one, "answer": one, "list": [one], "inside": {"a": one}}
    assert rows_of(path) == [row] * 50
    assert rows_of(path, row_mib=1) == [row] * 50


NESTED = st.recursive(
    st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(depth, inner), default=0)


@given(st.dictionaries(st.text(max_size=2), NESTED, max_size=2), st.integers(1, 6))
def test_rows_within_the_depth_are_left_as_they_are(row: Any, limit: int) -> None:
    limits = LimitsConfig(depth=limit)
    if depth(row) <= limit:
        assert check_row(row, limits) is row
    else:
        with pytest.raises(BadRow, match="nested too deeply"):
            check_row(row, limits)

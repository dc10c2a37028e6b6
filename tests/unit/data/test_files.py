"""Files as people have them: read, or refused by name with what to do."""

import bz2
import gzip
import json
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from rltrain.config.data import DataConfig
from rltrain.data.problems import load_problems

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(6)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def prompts(path: object, tokenizer: Any, source: str = "jsonl", **more: Any) -> list[str]:
    config = DataConfig(**{"source": source, "path": str(path), "eval_size": 0} | more)
    return [problem.prompt for problem in load_problems(config, tokenizer).train]


def write_parquet(rows: list[Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


ALL = [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf  \n" + json.dumps(ROWS).encode()),
        ("a.jsonl", json.dumps(ROWS).encode()),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.jsonl.zst", pyarrow.compress(LINES, codec="zstd", asbytes=True)),
        ("data", LINES),
    ],
)
def test_json_in_its_forms(name, content, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(content)
    assert prompts(tmp_path / name, tokenizer) == ALL


def test_rows_that_are_lists_have_numbered_columns(tmp_path, tokenizer):
    rows = [[{"value": row["prompt"]}, {"gold": row["answer"]}] for row in ROWS]
    config = {"prompt_column": "0.value", "answer_column": "1.gold"}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert prompts(tmp_path / "a.json", tokenizer, **config) == ALL
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prompts(tmp_path / "a.jsonl", tokenizer, **config) == ALL


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,answer\n", r"CSV .*007.*read_csv\('.*a\.csv'"),
        ("a.parquet", b"PAR1", "it is Parquet: set data=parquet"),
        ("a.pkl", b"x", "opens no pickle"),
        ("a.zip", b"PK\x03\x04", "unpack it first"),
        ("a.jsonl", gzip.compress(LINES, mtime=0), "gzip: let its name end in .gz"),
        ("a.jsonl", b"PAR1....", "Parquet file: set data=parquet"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "UTF-16"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.jsonl", b"<!DOCTYPE html>", "web page"),
        ("a.json", b'{\n"data": [\n{"prompt": "x"}]}', r"one JSON object .*'data'.*array of obj"),
        ("a.json", b'[{"prompt": "x"}', r"a\.json is not JSON"),
        ("a.json", b"[]", "has no rows"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\n\n", "has no rows"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "cut off|cannot be read"),
        ("a.jsonl.gz", LINES, "cannot be read"),
        ("a.jsonl.zst", b"nonsense", "cannot be read"),
    ],
)
def test_a_file_that_is_something_else_is_named(name, content, message, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prompts(tmp_path / name, tokenizer)


@pytest.mark.parametrize("scheme", ["https", "hf", "s3", "file"])
def test_nothing_is_downloaded(scheme, tokenizer):
    with pytest.raises(
        ValueError, match=r"downloads nothing\. Fetch it first, e\.g\. with hf down"
    ):
        prompts(f"{scheme}://x/y.jsonl", tokenizer)


def test_paths_as_people_type_them(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("a.jsonl", "./a.jsonl", "~/a.jsonl", "*.jsonl", "~/a*"):
        assert prompts(path, tokenizer) == ALL
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "empty").mkdir()
    socket.socket(socket.AF_UNIX).bind("socket.jsonl")
    for path, message in {
        "b.jsonl": "relative paths start at",
        "b*.jsonl": "no file matches this pattern",
        "link": "a link to gone, where nothing is",
        "empty": "holds no file ending in .jsonl, .ndjson, .json",
        "socket.jsonl": "pipe or device",
        "openai/gsm8k": "hf download openai/gsm8k --repo-type dataset",
    }.items():
        with pytest.raises(ValueError, match=message):
            prompts(path, tokenizer)
    with pytest.raises(ValueError, match="expected a dataset folder, found a file"):
        prompts("a.jsonl", tokenizer, "huggingface")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(ValueError, match="no permission"):
        prompts(tmp_path / "a.jsonl", tokenizer)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_shards_are_read_in_the_order_of_their_names(source, tmp_path, tokenizer):
    for number in (1, 0, 2):
        path = tmp_path / f"train-{number:05d}-of-00003.{source}"
        rows = ROWS[2 * number : 2 * number + 2]
        if source == "parquet":
            write_parquet(rows, path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "README.md").write_text("x")
    assert prompts(tmp_path, tokenizer, source) == ALL
    assert prompts(tmp_path / f"*.{source}", tokenizer, source) == ALL
    bad = tmp_path / f"train-00003-of-00003.{source}"
    if source == "parquet":
        write_parquet([{"prompt": "x"}], bad)
    else:
        bad.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"train-00003-of-00003.*, row 0: no column 'answer'"):
        prompts(tmp_path, tokenizer, source)
    bad.rename(tmp_path / f"test.{source}")
    with pytest.raises(ValueError, match=r"several splits \(test, train\): set a pattern"):
        prompts(tmp_path, tokenizer, source)


def test_a_text_that_is_not_utf_8_in_a_table_is_named(tmp_path, tokenizer):
    texts = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary())
    answers = pyarrow.array(["1", "2", "3"])
    text_type = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    table = pyarrow.Table.from_arrays([text_type, answers], ["prompt", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 1: text is not UTF-8: column 'prompt'"):
        prompts(tmp_path / "a.parquet", tokenizer, "parquet")
    found = prompts(tmp_path / "a.parquet", tokenizer, "parquet", on_bad_row="drop")
    assert found == ["a", "c"]


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_class_labels_are_read_as_their_names(kind, tmp_path, tokenizer):
    features = Features({"prompt": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    dataset = Dataset.from_dict({"prompt": ["a", "b"], "answer": [1, 0]}, features=features)
    if kind == "saved":
        dataset.save_to_disk(str(tmp_path / "a"))
        config = DataConfig(source="huggingface", path=str(tmp_path / "a"), eval_size=0)
    else:
        dataset.to_parquet(str(tmp_path / "a.parquet"))
        config = DataConfig(source="parquet", path=str(tmp_path / "a.parquet"), eval_size=0)
    found = load_problems(config, tokenizer).train
    assert [problem.answer for problem in found] == ["yes", "no"]


@pytest.mark.parametrize(
    "stored", [[], {"info": 3}, {"info": {"features": []}}, {"info": {"features": {"answer": 1}}}]
)
def test_metadata_of_a_table_that_names_no_labels_is_read_past(stored, tmp_path, tokenizer):
    table = pyarrow.Table.from_pylist(ROWS)
    table = table.replace_schema_metadata({"huggingface": json.dumps(stored)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert prompts(tmp_path / "a.parquet", tokenizer, "parquet") == ALL


README = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train*}, {split: test, path: main/test*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train*}]
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    write_parquet(ROWS[:4], folder / "main" / "train-00000-of-00001.parquet")
    write_parquet(ROWS[4:], folder / "main" / "test-00000-of-00001.parquet")
    write_parquet(ROWS[3:], folder / "socratic" / "train-00000-of-00001.parquet")
    (folder / "README.md").write_text(README)
    return folder


def test_a_hub_folder_with_two_configurations(hub, tokenizer):
    with pytest.raises(ValueError, match=r"configurations main, socratic and none .*set data.name"):
        prompts(hub, tokenizer, "huggingface")
    with pytest.raises(ValueError, match=r"configurations main, socratic and x is none of them"):
        prompts(hub, tokenizer, "huggingface", name="x")
    assert prompts(hub, tokenizer, "huggingface", name="main") == ALL[:4]
    assert prompts(hub, tokenizer, "huggingface", name="main", split="test") == ALL[4:]
    assert prompts(hub, tokenizer, "huggingface", name="socratic") == ALL[3:]
    with pytest.raises(ValueError, match="no split 'test' but train"):
        prompts(hub, tokenizer, "huggingface", name="socratic", split="test")
    (hub / "README.md").unlink()
    with pytest.raises(ValueError, match=r"split train lie in main, socratic.*set data\.path"):
        prompts(hub, tokenizer, "huggingface")


def test_json_in_a_hub_folder_keeps_its_text(tmp_path, tokenizer, monkeypatch):
    """The datasets library would make a time stamp of the answer, and text of the integer."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": "a", "answer": "2024-01-01"}, {"prompt": "b", "answer": 7}]
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source="huggingface", path=str(tmp_path / "hub"), eval_size=0)
    found = load_problems(config, tokenizer).train
    assert [problem.answer for problem in found] == ["2024-01-01", "7"]
    (tmp_path / "hub" / "train.jsonl").rename(tmp_path / "hub" / "train.csv")
    with pytest.raises(ValueError, match=r"found train\.csv, expected files ending in \.parquet"):
        load_problems(config, tokenizer)

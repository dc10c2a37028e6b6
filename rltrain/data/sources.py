"""Rows of the datasets we read: JSONL, Parquet, a Hugging Face dataset folder, reasoning-gym."""

import json
from pathlib import Path
from typing import Any

from rltrain.config.data import DataConfig

Row = dict[str, Any]


def read_rows(source: str, path: str, split: str) -> list[Row]:
    """All rows of a file or folder, in its order.

    Raises:
        ValueError: nothing at ``path``, it cannot be parsed, it has no ``split`` or no row.
    """
    where = Path(path).expanduser()
    if not where.exists():
        raise ValueError(f"data.path: there is no file or folder {where}")
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet}
    rows = readers[source](where) if source in readers else _read_huggingface(where, split)
    if not rows:
        raise ValueError(f"{where} has no rows: a dataset needs at least one")
    return rows


def reasoning_gym_rows(config: DataConfig, num_rows: int) -> list[Row]:
    """Problems of a reasoning-gym task; ``question`` and ``metadata`` are what its scorer needs.

    Raises:
        ValueError: for a task or an option that reasoning-gym does not know.
    """
    import reasoning_gym  # 2 s to import, and only this source needs it

    try:
        items = reasoning_gym.create_dataset(
            config.task, size=num_rows, seed=config.seed, **config.task_options
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym refuses data.task={config.task}: {error}") from error
    return [
        {
            config.prompt_column: item["question"],
            config.answer_column: item["answer"],
            "question": item["question"],
            "metadata": item["metadata"],
        }
        for item in items
    ]


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number}: expected an object, found {type(row).__name__}"
                )
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    return rows


def _read_huggingface(path: Path, split: str) -> list[Row]:
    """A folder that ``Dataset.save_to_disk`` wrote, or one of data files as on the hub."""
    # Slow to import, and of use to this source alone.
    from datasets import DatasetDict, load_dataset, load_from_disk

    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    found = load_from_disk(str(path)) if saved else load_dataset(str(path))
    if isinstance(found, DatasetDict):
        if split not in found:
            splits = ", ".join(found)
            raise ValueError(f"{path} has no split {split!r} but {splits}: set data.split")
        found = found[split]
    rows: list[Row] = found.to_list()
    return rows

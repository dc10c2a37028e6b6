"""Reads rows of Arrow tables: Parquet files and saved datasets."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rltrain.data.bad_rows import BadRow

Row = dict[str, Any]
Labels = Mapping[str, list[str]]
"""Column of class labels -> names of the labels. Tables store labels as numbers."""

BATCH = 1024
FEATURES = b"huggingface"
"""Key of the table metadata in which the datasets library keeps the types of columns."""


def parquet_rows(file: Path) -> Iterator[Row | BadRow]:
    """The rows of a Parquet file.

    Raises:
        ValueError: it is no Parquet file, or it is damaged.
        OSError: it cannot be read.
    """
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield from table_rows(parquet.iter_batches(batch_size=BATCH))
    except pyarrow.ArrowException as error:
        advice = ": set data=jsonl to read JSON" if ".json" in file.suffixes else ""
        raise ValueError(f"{file} is not a Parquet file: {error}{advice} [RL2003]") from error


def table_rows(batches: Iterable[Any]) -> Iterator[Row | BadRow]:
    """The rows of tables or record batches. Class labels are read as their names."""
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the table has the column {twice!r} twice: rename one [RL2003]")
        labels = labels_of(batch.schema.metadata or {})
        try:
            rows = batch.to_pylist()
        except (ValueError, pyarrow.ArrowException):
            rows = [_read(batch.slice(number, 1)) for number in range(batch.num_rows)]
        yield from (_named(row, labels) for row in rows) if labels else rows


def _read(row: Any) -> Row | BadRow:
    """The row of a table with one row. Columns are read one by one, to name one that fails."""
    values: Row = {}
    for name in row.schema.names:
        try:
            (values[name],) = row.column(name).to_pylist()
        except UnicodeDecodeError as error:
            return BadRow("text is not UTF-8", f"column {name!r}: {error.reason} at {error.start}")
        except (ValueError, pyarrow.ArrowException) as error:
            return BadRow("a value cannot be read", f"column {name!r}: {error}")
    return values


def labels_of(metadata: Mapping[bytes, bytes]) -> Labels:
    """The names of class labels, from the metadata of a table that the datasets library wrote."""
    if FEATURES not in metadata:
        return {}
    features = json.loads(metadata[FEATURES]).get("info", {}).get("features", {})
    return {
        name: feature["names"]
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
    }


def _named(row: Row | BadRow, labels: Labels) -> Row | BadRow:
    if isinstance(row, BadRow):
        return row
    for column, names in labels.items():
        label = row.get(column)
        if isinstance(label, int) and 0 <= label < len(names):
            row[column] = names[label]
    return row

"""Reads rows of Arrow tables: Parquet files and saved datasets."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from rltrain.config.bounded_files import parse_json
from rltrain.config.data import LimitsConfig
from rltrain.data.bad_rows import BadRow
from rltrain.data.limits import MIB, most_bytes, too_long, too_much

Row = dict[str, Any]
Labels = Mapping[str, list[str]]
"""Column of class labels -> names of the labels. Tables store labels as numbers."""

BATCH = 1024
FEATURES = b"huggingface"
"""Key of the table metadata in which the datasets library keeps the types of columns."""


def parquet_rows(file: Path, limits: LimitsConfig) -> Iterator[Row | BadRow]:
    """The rows of a Parquet file.

    Raises:
        ValueError: it is no Parquet file, it is damaged, or it is beyond the limits.
        OSError: it cannot be read.
    """
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            schema, texts = parquet.schema_arrow, _texts(parquet.metadata)
            _check_size(parquet.metadata, file, limits)
        # A text that many rows share is in a file, and in what is read here, once.
        with pyarrow.parquet.ParquetFile(file, read_dictionary=texts) as parquet:
            batches = _counted(parquet.iter_batches(batch_size=BATCH), file, limits)
            yield from table_rows(batches, limits, schema)
    except pyarrow.ArrowException as error:
        advice = ": set data=jsonl to read JSON" if ".json" in file.suffixes else ""
        raise ValueError(f"{file} is not a Parquet file: {error}{advice} [RL2003]") from error


def _texts(metadata: Any) -> list[str]:
    """The columns that hold texts or bytes, also those within others."""
    columns = (metadata.schema.column(number) for number in range(metadata.num_columns))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _check_size(metadata: Any, file: Path, limits: LimitsConfig) -> None:
    """Raise ValueError if the columns are too large, by what the file says of them itself."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > most_bytes(file, limits):
        raise too_much(file, limits)


def _counted(batches: Iterable[Any], file: Path, limits: LimitsConfig) -> Iterator[Any]:
    """``batches``, as long as their rows are not too much for the file's size."""
    left = most_bytes(file, limits)
    for batch in batches:
        left -= sum(map(written_out, batch.columns))
        if left < 0:
            raise too_much(file, limits)
        yield batch


def written_out(column: Any) -> int:
    """The bytes of a column, a text that several rows share counted for each."""
    of = column.type
    if pyarrow.types.is_dictionary(of):
        lengths = pyarrow.compute.binary_length(column.dictionary)
        return pyarrow.compute.sum(lengths.take(column.indices)).as_py() or 0
    if pyarrow.types.is_struct(of):
        return sum(map(written_out, column.flatten()))
    if pyarrow.types.is_map(of):
        return written_out(column.keys) + written_out(column.items)
    if pyarrow.types.is_list(of) or pyarrow.types.is_large_list(of):
        return written_out(column.flatten())
    return int(column.nbytes)


def _plain(batch: Any, schema: Any) -> Any:
    """A batch whose shared texts are written out for each row."""
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _in_parts(batch: Any, limits: LimitsConfig) -> Iterator[Any]:
    """Parts of a batch whose rows hold no more than a row may; a part of one row may."""
    if batch.num_rows < 2 or sum(map(written_out, batch.columns)) <= limits.row_mib * MIB:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _in_parts(batch.slice(0, half), limits)
    yield from _in_parts(batch.slice(half), limits)


def table_rows(
    batches: Iterable[Any], limits: LimitsConfig, schema: Any = None
) -> Iterator[Row | BadRow]:
    """The rows of tables or record batches. Class labels are read as their names.

    Args:
        schema: of the batches, where their texts are shared
    """
    for batch in batches:
        if schema is None:
            yield from _rows(batch)
            continue
        for part in _in_parts(batch, limits):
            if sum(map(written_out, part.columns)) > limits.row_mib * MIB:
                yield too_long(limits)
            else:
                yield from _rows(_plain(part, schema))


def _rows(batch: Any) -> Iterator[Row | BadRow]:
    names = batch.schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the table has the column {twice!r} twice: rename one [RL2003]")
    labels = labels_of(batch.schema.metadata or {})
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError, pyarrow.ArrowException):
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
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            return BadRow("a value cannot be read", f"column {name!r}: {error}")
    return values


def labels_of(metadata: Mapping[bytes, bytes]) -> Labels:
    """The names of class labels, from the metadata of a table that the datasets library wrote."""
    if FEATURES not in metadata:
        return {}
    stored = parse_json(metadata[FEATURES], "the table's metadata")
    features = _inner(_inner(stored, "info"), "features")
    return {
        name: feature["names"]
        for name, feature in features.items()
        if isinstance(feature, dict)
        and feature.get("_type") == "ClassLabel"
        and isinstance(feature.get("names"), list)
    }


def _inner(values: Any, name: str) -> dict[str, Any]:
    """The object in ``values`` of this name; empty where there is none: anybody wrote it."""
    inner = values.get(name) if isinstance(values, dict) else None
    return inner if isinstance(inner, dict) else {}


def _named(row: Row | BadRow, labels: Labels) -> Row | BadRow:
    if isinstance(row, BadRow):
        return row
    for column, names in labels.items():
        label = row.get(column)
        if isinstance(label, int) and 0 <= label < len(names):
            row[column] = names[label]
    return row

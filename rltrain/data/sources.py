"""Reads rows of JSON, Parquet, Hugging Face dataset folders and reasoning-gym."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rltrain.config.data import DataConfig
from rltrain.data.bad_rows import BadRow
from rltrain.data.json_rows import SameAs, json_rows
from rltrain.data.limits import check_row
from rltrain.data.paths import SUFFIXES, find_files

Row = dict[str, Any]


class SourceRow(NamedTuple):
    """A row of a file, with its number from 0. ``row`` may be an error, or a reference to an equal
    earlier row."""

    file: str
    number: int
    row: Row | BadRow | SameAs

    @property
    def where(self) -> str:
        return f"{self.file}, row {self.number}"


def read_rows(
    config: DataConfig, path: str, split: str = "train", key: str = "data.path"
) -> Iterator[SourceRow]:
    """All rows of the files that ``path`` names, in order. ``key`` is the key that holds ``path``.

    Raises:
        ValueError: there is nothing at ``path``, a file cannot be read, or there is no ``split``.
    """
    # Imported here because they import pyarrow, and the command line reports mistakes without it.
    from rltrain.data.arrow_rows import parquet_rows, table_rows
    from rltrain.data.hub_folder import saved_dataset, split_files

    files = find_files(config.source, path, key)
    if config.source == "huggingface":
        (folder,) = files
        saved = saved_dataset(folder, split, config.name)
        if saved is not None:
            yield from numbered(table_rows(saved, config.limits), str(folder), config)
            return
        files = split_files(folder, split, config.name)
    for file in files:
        parquet = config.source == "parquet" or file.suffix.lower() in SUFFIXES["parquet"]
        try:
            rows = (parquet_rows if parquet else json_rows)(file, config.limits)
            yield from numbered(rows, str(file), config)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error} [RL2001]") from error


def numbered(
    rows: Iterable[Row | BadRow | SameAs], file: str, config: DataConfig
) -> Iterator[SourceRow]:
    """Rows with their numbers; one that is beyond ``config.limits`` is an error."""
    for number, row in enumerate(rows):
        try:
            yield SourceRow(file, number, check_row(row, config.limits))
        except BadRow as error:
            yield SourceRow(file, number, error)


def reasoning_gym_rows(config: DataConfig, num_rows: int) -> Iterator[Row]:
    """Rows of a reasoning-gym task. Its scorer needs ``question`` and ``metadata``.

    Raises:
        ValueError: for a task or an option that reasoning-gym does not know.
    """
    import reasoning_gym  # 2 s to import, and only this source needs it

    try:
        items = reasoning_gym.create_dataset(
            config.task, size=num_rows, seed=config.seed, **config.task_options
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"reasoning-gym refuses data.task={config.task}: {error} [RL2015]"
        ) from error
    for item in items:
        row = {"question": item["question"], "metadata": item["metadata"]}
        row[config.prompt_column] = item["question"]
        if config.answer_column is not None:
            row[config.answer_column] = item["answer"]
        yield row

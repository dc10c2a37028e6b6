"""A Hugging Face dataset folder: one that ``save_to_disk`` wrote, or one laid out as on the hub.

`datasets` takes seconds to import, so the function that needs it does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rltrain.data.arrow_rows import BATCH
from rltrain.data.paths import COMPRESSED, SUFFIXES

READ = (*SUFFIXES["parquet"], *SUFFIXES["jsonl"])


def saved_dataset(folder: Path, split: str, name: str | None) -> Iterator[Any] | None:
    """The tables of a dataset that ``Dataset.save_to_disk`` wrote; None for any other folder.

    Raises:
        ValueError: it is damaged, has no ``split``, or ``name`` is set (it has no configurations).
    """
    if not ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        return None
    if name is not None:
        raise ValueError(
            f"{folder} is a saved dataset, without configurations: drop data.name={name} [RL2014]"
        )
    # Slow to import, and only this source needs it.
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} cannot be read as a saved dataset: {error} [RL2003]") from error
    if isinstance(dataset, DatasetDict):
        _check_split(folder, split, dataset)
        dataset = dataset[split]
    tables: Iterator[Any] = dataset.with_format("arrow").iter(batch_size=BATCH)
    return tables


def split_files(folder: Path, split: str, name: str | None) -> list[Path]:
    """The files of a split of a folder laid out as on the hub, by its README or by their names.

    Raises:
        ValueError: it has several configurations and ``name`` is none of them, no such split, files
            of another kind or elsewhere.
    """
    from datasets import get_dataset_config_names, load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        names = get_dataset_config_names(str(folder))
        if len(names) > 1 and name not in names and not (name is None and "default" in names):
            choice = "none is chosen" if name is None else f"{name} is none of them"
            raise ValueError(
                f"{folder} has the configurations {', '.join(names)} and {choice}: set data.name"
                " [RL2014]"
            )
        data_files = load_dataset_builder(str(folder), name=name).config.data_files
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"{folder} cannot be read as a dataset folder laid out as on the hub: {error} [RL2003]"
        ) from error
    by_split = {
        str(key): [str(file) for file in files] for key, files in (data_files or {}).items()
    }
    _check_split(folder, split, by_split)
    files = [Path(file) for file in by_split[split]]
    for file in files:
        _check_file(file, folder)
    folders = sorted({str(file.parent.relative_to(folder.resolve())) for file in files})
    if len(folders) > 1 and len(names) == 1:
        raise ValueError(
            f"{folder}: files of split {split} lie in {', '.join(folders)}, which may be "
            "configurations of their own: set data.path to one of them"
            " [RL2014]"
        )
    return files


def _check_split(folder: Path, split: str, splits: Any) -> None:
    if split not in splits:
        raise ValueError(
            f"{folder} has no split {split!r} but {', '.join(splits)}: set data.split [RL2014]"
        )


def _check_file(file: Path, folder: Path) -> None:
    plain = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
    if not file.is_file():
        raise ValueError(
            f"{folder}: its README names {file}, which is no file here; fetch it first [RL2003]"
        )
    if plain.suffix.lower() not in READ:
        raise ValueError(
            f"{folder}: found {file.name}, expected files ending in {', '.join(READ)}: convert "
            "them first, keeping answers as text"
            " [RL2003]"
        )

"""Finds the files that ``data.path`` names, and explains paths that name none."""

import glob
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
}
COMPRESSED = (".gz", ".zst", ".bz2")
"""Suffixes of compression, after a suffix of JSON."""

CONVERT_CSV = (
    "a CSV file does not say what is text and what is a number (007 would become 7): convert it, "
    "e.g. pandas.read_csv('{0}', dtype=str, keep_default_na=False).to_json('{1}.jsonl', "
    "orient='records', lines=True)"
)
OTHER_FORMATS = {
    ".csv": CONVERT_CSV,
    ".tsv": CONVERT_CSV.replace("dtype", "sep='\\t', dtype"),
    ".parquet": "it is Parquet: set data=parquet",
    ".pq": "it is Parquet: set data=parquet",
    ".json": "it is JSON: set data=jsonl",
    ".jsonl": "it is JSON: set data=jsonl",
    ".arrow": "it belongs to a dataset folder: set data=huggingface and data.path to that folder",
    ".zip": "unpack it first",
    ".tar": "unpack it first",
    ".tgz": "unpack it first",
    ".xz": "unpack it first",
    ".xlsx": "export it as JSONL first",
    ".pkl": "rltrain opens no pickle, which can run code: write JSONL or Parquet",
    ".pickle": "rltrain opens no pickle, which can run code: write JSONL or Parquet",
}
SPLIT = re.compile(
    r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?:[-_.]|$)", re.IGNORECASE
)


def find_files(source: str, path: str, key: str = "data.path") -> list[Path]:
    """The data files that ``path`` names, sorted by name: a file, the files of a folder, or those
    that match a pattern. For ``huggingface`` it is the dataset folder.

    Raises:
        ValueError: ``path`` names no file, or files of another format; the message names ``key``.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise ValueError(
            f"{key}={path}: rltrain downloads nothing. Fetch it first, e.g. with hf download "
            "ORGANISATION/NAME --repo-type dataset --local-dir FOLDER"
            " [RL2001]"
        )
    where = Path(path).expanduser()
    if source != "huggingface" and glob.has_magic(path) and not os.path.lexists(where):
        files = [Path(name) for name in sorted(glob.glob(str(where), recursive=True))]
        if not files:
            raise ValueError(
                f"{key}={path}: no file matches this pattern{_from_here(where)} [RL2001]"
            )
    else:
        _check_exists(where, path, key)
        files = [where]
        if source != "huggingface" and where.is_dir():
            files = _files_in(where, source, key)
    for file in files:
        _check_readable(file, source, key)
    return files


def _check_exists(where: Path, path: str, key: str) -> None:
    try:
        if where.exists():
            return
        if where.is_symlink():
            raise ValueError(
                f"{key}={path}: a link to {os.readlink(where)}, where nothing is [RL2001]"
            )
    except PermissionError as error:
        raise ValueError(f"{key}={path}: no permission to look there [RL2001]") from error
    hub = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not where.suffix:
        hub = (
            f". To fetch a dataset of the Hugging Face hub: hf download {path} --repo-type dataset "
            "--local-dir FOLDER"
        )
    raise ValueError(f"{key}: there is no file or folder {where}{_from_here(where)}{hub} [RL2001]")


def _from_here(where: Path) -> str:
    return "" if where.is_absolute() else f" (relative paths start at {Path.cwd()})"


def _check_readable(file: Path, source: str, key: str) -> None:
    if source == "huggingface":
        if not file.is_dir():
            raise ValueError(
                f"{key}={file}: expected a dataset folder, found a file: set data=jsonl or "
                "data=parquet to read it"
                " [RL2003]"
            )
    elif not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{key}={file}: expected a file, found a folder, pipe or device [RL2001]")
    elif not _fits(file, source) and (advice := OTHER_FORMATS.get(file.suffix.lower())):
        advice = advice.format(file, file.with_suffix(""))
        raise ValueError(
            f"{key}={file}: source={source} does not read this file; {advice} [RL2003]"
        )
    if not os.access(file, os.R_OK):
        raise ValueError(f"{key}={file}: no permission to read it [RL2001]")


def _fits(file: Path, source: str) -> bool:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if source == "jsonl" and suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in SUFFIXES[source]


def _files_in(folder: Path, source: str, key: str) -> list[Path]:
    """The data files of a folder, without those of its subfolders."""
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"{key}={folder}: no permission to look into this folder [RL2001]")
    names = {file.name for file in folder.iterdir()}
    if names & {"state.json", "dataset_dict.json"}:
        raise ValueError(
            f"{key}={folder} is a folder that Dataset.save_to_disk wrote: set data=huggingface"
            " [RL2003]"
        )
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and _fits(file, source) and file.name[0] not in "._"
    )
    expected = ", ".join(SUFFIXES[source])
    if not files:
        inner = sorted(child.name for child in folder.iterdir() if child.is_dir())
        below = f"; its folders are {', '.join(inner[:8])}" if inner else ""
        raise ValueError(
            f"{key}={folder}: the folder holds no file ending in {expected}{below} [RL2001]"
        )
    check_one_split(files, key, f"a pattern such as {folder}/train*")
    return files


def check_one_split(files: Sequence[Path], key: str, remedy: str) -> None:
    """Raise ValueError if the file names belong to several splits, such as train and test."""
    splits = sorted({m[1].lower() if (m := SPLIT.search(f.stem)) else "" for f in files})
    if len(splits) > 1:
        named = ", ".join(split or "others" for split in splits)
        raise ValueError(
            f"{key}: the {len(files)} files of {files[0].parent} are of several splits ({named}): "
            f"set {remedy}, or data=huggingface and data.split"
            " [RL2014]"
        )

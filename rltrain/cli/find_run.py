"""Which run a command is about: the folder that was named, or the newest below ``outputs/``."""

from pathlib import Path

OUTPUTS = Path("outputs")
MARKS = ("config.yaml", "metrics.jsonl")
"""A folder with one of these is a run's."""
NUM_LISTED = 5


def find_run(named: Path | None) -> Path:
    """The folder of the run; the newest where none is named.

    Raises:
        ValueError: there is no such folder, or it is no run's, with what was found.
    """
    if named is None:
        return newest_runs(1)[0]
    folder = named.expanduser()
    if _is_run(folder):
        return folder
    expected = f"{folder}: expected the folder of a run, with {' or '.join(MARKS)} in it"
    if not folder.is_dir():
        raise ValueError(
            f"{expected}; found {'a file' if folder.exists() else 'no such folder'} [RL7001]"
        )
    if inside := _runs_below(folder)[:NUM_LISTED]:
        raise ValueError(f"{expected}; found runs below it: {', '.join(map(str, inside))} [RL7001]")
    if around := next(filter(_is_run, folder.absolute().parents), None):
        raise ValueError(f"{expected}; found neither. The run's folder is {around} [RL7001]")
    raise ValueError(f"{expected}; found neither [RL7001]")


def newest_runs(count: int) -> list[Path]:
    """The newest runs below ``outputs/``, oldest first.

    Raises:
        ValueError: there are fewer.
    """
    runs = _runs_below(OUTPUTS)[:count]
    if len(runs) < count:
        raise ValueError(
            f"expected {'a run' if count == 1 else f'{count} runs'} below {OUTPUTS.absolute()}, "
            f"found {len(runs) or 'none'}; name the run's folder (its trainer.output_dir)"
            " [RL7001]"
        )
    return runs[::-1]


def _is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def _runs_below(folder: Path) -> list[Path]:
    """Those in it and in the folders in it, the newest start first."""
    started = {
        file.parent: file.stat().st_mtime
        for depth in ("*", "*/*")
        for mark in reversed(MARKS)  # config.yaml is written once, when a run starts
        for file in folder.glob(f"{depth}/{mark}")
    }
    return sorted(started, key=lambda run: started[run], reverse=True)

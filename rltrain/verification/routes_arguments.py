"""The arguments of ``rltrain routes`` that are files, layouts and ranks."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from rltrain.config.policy import ParallelConfig
from rltrain.verification.routes_file import Routes


def load_routes(path: str) -> Routes:
    return Routes.load(existing(path))


def existing(path: str) -> Path:
    """ValueError when there is no such file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; make it with `rltrain routes record`")
    return file


def parse_layout(text: str) -> ParallelConfig:
    """``tp=2,pp=2`` as the configuration of a layout.

    Raises:
        ValueError: a key is unknown, or the sizes do not fit one another.
    """
    sizes = parse_sizes(text, "--layout", list(ParallelConfig.model_fields))
    try:
        return ParallelConfig.model_validate(sizes)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()
        )
        raise ValueError(f"--layout {text}: {problems}") from None


def parse_sizes(text: str, option: str, names: Sequence[str]) -> dict[str, int]:
    """``tp=2,cp=1`` as a dict; ValueError for another form, an unknown name or one named twice."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.strip().partition("=")
        if name not in names or name in sizes or not size.isdecimal():
            raise ValueError(
                f"{option} {text}: expected NAME=NUMBER with commas between, each of "
                f"{', '.join(names)} once at most, found {part!r}"
            )
        sizes[name] = int(size)
    return sizes

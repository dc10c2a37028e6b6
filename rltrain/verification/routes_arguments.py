"""The arguments of ``rltrain routes`` that are files, layouts and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from rltrain.config.policy import ParallelConfig
from rltrain.verification.routes_file import Routes


@dataclass(frozen=True)
class TokenSource:
    """Where token ids come from; one of these is set."""

    tokens: str | None = None
    """A JSON file of lists of token ids."""
    prompt: str | None = None
    """Text, for the model's tokenizer."""
    problem: int | None = None
    """The number of a problem of arithmetic."""

    @classmethod
    def of(cls, *, tokens: str | None, prompt: str | None, problem: int | None) -> Self:
        """ValueError unless exactly one is set."""
        options = {"--tokens": tokens, "--prompt": prompt, "--problem": problem}
        chosen = [name for name, value in options.items() if value is not None]
        if len(chosen) != 1:
            raise ValueError(
                f"expected one of {', '.join(options)}, found {' and '.join(chosen) or 'none'}"
                " [RL7004]"
            )
        return cls(tokens, prompt, problem)


@dataclass(frozen=True)
class PassOptions:
    """How a pass is made."""

    layout: str = ""
    """As in ``tp=2,pp=2``: keys of ``policy.parallel``."""
    recompute: str = "none"
    """none, full, block, or modules with ``+`` between."""
    precision: str = "fp32"
    max_tokens: int = 8192
    """Of a micro-batch."""


def load_routes(path: str) -> Routes:
    return Routes.load(existing(path))


def existing(path: str) -> Path:
    """ValueError when there is no such file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"{file}: there is no such file; make it with `rltrain routes record` [RL7004]"
        )
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
        raise ValueError(f"--layout {text}: {problems} [RL7004]") from None


def parse_sizes(text: str, option: str, names: Sequence[str]) -> dict[str, int]:
    """``tp=2,cp=1`` as a dict; ValueError for another form, an unknown name or one named twice."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.strip().partition("=")
        if name not in names or name in sizes or not size.isdecimal():
            raise ValueError(
                f"{option} {text}: expected NAME=NUMBER with commas between, each of "
                f"{', '.join(names)} once at most, found {part!r}"
                " [RL7004]"
            )
        sizes[name] = int(size)
    return sizes

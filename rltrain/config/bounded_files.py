"""Reads JSON and YAML files that others may have written, with limits on their size and depth.

No real file comes near the limits, so no key raises them.
"""

import json
from pathlib import Path
from typing import Any, TextIO

import yaml

MIB = 2**20
MOST_OF_SETTINGS = 16 * MIB
"""Bytes of a ``config.json`` or the like."""
MOST_OF_TABLES = 256 * MIB
"""Bytes of a tokenizer, a manifest or an index: with an entry for each word, file or tensor."""
MOST_OF_YAML = MIB
MOST_NODES, MOST_LEVELS = 10_000, 50
"""Values of a YAML file, each alias counted as what it repeats, and how deep they may be."""


def check_size(file: Path, most: int) -> None:
    """Raise ``ValueError`` if ``file`` has more than ``most`` bytes."""
    if (size := file.stat().st_size) > most:
        raise ValueError(
            f"{file}: expected at most {most // MIB} MiB, found {size} bytes. It is damaged or "
            "no such file: fetch it again [RL2020]"
        )


def load_json(file: Path, most: int = MOST_OF_SETTINGS) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: it is not JSON, too large or too deep.
        OSError: it cannot be read.
    """
    check_size(file, most)
    return parse_json(file.read_text(encoding="utf-8"), str(file))


def parse_json(text: str | bytes, where: str) -> Any:
    """Raises ``ValueError`` if ``text`` is not JSON, or too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to be read [RL2020]") from error


def check_yaml(file: Path) -> None:
    """Raise ``ValueError`` if ``file`` is too large or too deep, or would be once its aliases are
    replaced by what they stand for. Raises ``yaml.YAMLError`` if it is not YAML."""
    check_size(file, MOST_OF_YAML)
    with file.absolute().open(encoding="utf-8") as content:  # whose name errors tell
        if _is_too_much(content):
            raise ValueError(
                f"{file}: expected fewer than {MOST_NODES} values with aliases written out, and at "
                f"most {MOST_LEVELS} levels, found more: it is no configuration [RL7009]"
            )


def _is_too_much(content: TextIO) -> bool:
    sizes: dict[str, int] = {}
    inside: list[tuple[str | None, int]] = []
    nodes = 0
    for event in yaml.parse(content, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in {anchor for anchor, _ in inside}:
                return True  # it holds itself
            nodes += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, nodes))
            nodes += 1
        if nodes >= MOST_NODES or len(inside) > MOST_LEVELS:
            return True
    return False

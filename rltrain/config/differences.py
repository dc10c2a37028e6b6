"""Which keys differ between configurations of plain data, as in the config.yaml of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "not set"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. A list is one value, and so is an empty section."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values are not all equal, each with the value of every configuration.

    A key that a configuration does not have is ``ABSENT`` there: another version wrote it.
    """
    flat = [flatten(config) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key, ABSENT) for one in flat] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}

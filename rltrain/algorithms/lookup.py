"""Finds an advantage estimator or a loss by its name in the configuration."""

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

Part = TypeVar("Part")


def find_by_name(
    kind: str, name: str, known: Mapping[str, Part], of: type[Part] | None = None
) -> Part:
    """``known[name]``, or the object at a dotted path ``package.module.name``.

    Args:
        kind: the configuration key, for errors
        of: class of which a user's object must be an instance; None: any callable

    Raises:
        ValueError: there is no such name, module or attribute, or the object has another type.
    """
    if name in known:
        return known[name]
    path, dot, attribute = name.rpartition(".")
    if not dot:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{kind}={name}: expected one of {', '.join(known)}, or one's own as "
            f"package.module.name; the nearest is {near}"
            " [RL1011]"
        )
    try:
        part: Part = getattr(import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{kind}={name}: expected {attribute} in a module {path} that can be imported, found: "
            f"{error}. Is its folder on PYTHONPATH?"
            " [RL1011]"
        ) from error
    if not (callable(part) if of is None else isinstance(part, of)):
        expected = "a function" if of is None else of.__name__
        raise ValueError(
            f"{kind}={name}: expected {expected}, found {type(part).__name__} [RL1011]"
        )
    return part

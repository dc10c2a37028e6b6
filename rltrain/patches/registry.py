"""Patches of third-party attributes, each with the facts needed to check and to delete it.

A process applies the patches that it needs once, explicitly, before anything else. A patch refuses
versions and signatures that it was not read against: the run stops instead of changing silently.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_MARK = "__rltrain_patch__"


class PatchRefused(RuntimeError):
    """The installed package differs from the one that a patch was written for."""


@dataclass(frozen=True)
class Patch:
    """One change to one attribute of a third-party package."""

    package: tuple[str, ...]
    """Names of the distributions that may provide it; the first one installed counts."""
    versions: str
    """Specifier of the versions the patch was read against, e.g. ``>=0.16,<0.17``."""
    target: str
    """``module:attribute`` or ``module:Class.attribute``."""
    params: tuple[str, ...] | None
    """Parameter names of the original; None for C functions, which have no signature."""
    reason: str
    remove_when: str
    wrap: Callable[[Any], Any]
    """Takes the original, returns its replacement. The result must take attributes."""


def apply(patch: Patch) -> None:
    """Apply ``patch`` unless it is applied already.

    Raises:
        PatchRefused: the package is missing, its version is outside ``patch.versions``, the target
            is missing, or its parameters differ from ``patch.params``.
    """
    _check_version(patch)
    if is_applied(patch):
        return
    owner, name = _resolve(patch)
    original = inspect.getattr_static(owner, name)
    _check_params(patch, original)
    replacement = patch.wrap(original)
    assert _MARK not in vars(replacement), f"{patch.target}: two patches share one replacement"
    setattr(replacement, _MARK, patch.target)
    setattr(owner, name, replacement)


def is_applied(patch: Patch) -> bool:
    owner, name = _resolve(patch)
    return getattr(inspect.getattr_static(owner, name), _MARK, None) == patch.target


def _check_version(patch: Patch) -> None:
    for package in patch.package:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if Version(installed).base_version not in SpecifierSet(patch.versions):
            raise PatchRefused(
                f"the patch of {patch.target} was read against {package}{patch.versions}, found "
                f"{installed}: read its source, then widen or drop the patch ({patch.reason})"
                " [RL4006]"
            )
        return
    raise PatchRefused(
        f"the patch of {patch.target} needs {' or '.join(patch.package)}, which is not installed"
        " [RL4006]"
    )


def _resolve(patch: Patch) -> tuple[Any, str]:
    module_name, _, path = patch.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for part in (*classes, name):
        if not hasattr(owner, part):
            raise PatchRefused(
                f"{patch.target}: {owner!r} has no attribute {part!r}; {patch.reason} [RL4006]"
            )
        if part in classes:
            owner = getattr(owner, part)
    return owner, name


def _check_params(patch: Patch, original: Any) -> None:
    if patch.params is None:
        return
    params = tuple(inspect.signature(original).parameters)
    if params != patch.params:
        raise PatchRefused(
            f"{patch.target} takes {params}, but its patch was read against {patch.params}: "
            f"read the new source, then mend or drop the patch ({patch.reason})"
            " [RL4006]"
        )

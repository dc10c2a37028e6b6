"""Finds a reward function by its name. To import one runs the user's code, so only workers do."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rltrain.environments.rewards import BUILT_IN, Reward, takes_group


def load_reward(name: str, key: str = "data.reward.function") -> Reward:
    """The built-in of that name, or the user's function: ``reward.py:score`` of a file, or
    ``my_rewards.score`` of a module.

    A relative file starts at the folder in which the run was started.

    Args:
        key: which names the function, for messages
    Raises:
        ValueError: when it cannot be imported, is no function, or cannot be called as a reward.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    label = f"{key}={name}"
    is_file = ":" in name
    module_name, _, attribute = name.rpartition(":" if is_file else ".")
    if not module_name or not attribute:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise ValueError(
            f"{label} is neither built in ({', '.join(BUILT_IN)}) nor a "
            "function of a file such as reward.py:score, or of a module such as my_rewards.score"
            + (f": did you mean {near[0]}?" if near else "")
            + " [RL2009]"
        )
    if not is_file and attribute == "py":
        raise ValueError(f"{label}: name the function in the file, e.g. {name}:score [RL2009]")
    module = _import_file(label, module_name) if is_file else _import_module(label, module_name)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise ValueError(
            f"{label}: {module_name} has no {attribute!r}"
            + (f": did you mean {near[0]!r}?" if near else "")
            + " [RL2009]"
        )
    function = getattr(module, attribute)
    _check_signature(label, function)
    reward: Reward = function
    return reward


def _import_file(label: str, file_name: str) -> ModuleType:
    """The module in a file. Its folder goes to the end of the module search path, so that it can
    import its neighbours; no library is shadowed by a file beside it."""
    file = Path(file_name).expanduser().absolute()
    if file.suffix != ".py" or not file.is_file():
        at = f" in {Path.cwd()}" if not Path(file_name).expanduser().is_absolute() else ""
        raise ValueError(
            f"{label}: expected a Python file and a function in it, such as "
            f"reward.py:score; there is no Python file {file_name}{at}"
            " [RL2009]"
        )
    module_name = f"reward_file_{file.stem}"
    while module_name in sys.modules:
        if sys.modules[module_name].__file__ == str(file):  # of another component
            return sys.modules[module_name]
        module_name += "_"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles look it up
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs the user's code, which may raise anything
        del sys.modules[module_name]
        raise ValueError(
            f"{label} cannot be imported: {_where(error, file)}"
            f"{type(error).__name__}: {error}"
            " [RL2009]"
        ) from error
    return module


def _where(error: Exception, file: Path) -> str:
    """The line of the file in which the error was raised, where one was."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"line {lines[-1]}: " if lines else ""


def _import_module(label: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ValueError(
            f"{label} cannot be imported: {type(error).__name__}: {error}. "
            f"Module {module_name} must be importable from the folder the run starts in "
            "or from PYTHONPATH"
            " [RL2009]"
        ) from error


def _check_signature(label: str, function: object) -> None:
    expected = "expected a function (response: str, answer: object, **columns) -> float"
    if callable(function) and takes_group(function, label):
        expected = (
            "takes_group=True: expected a function "
            "(responses: list[str], answer: object, **columns) -> list[float]"
        )
    if not callable(function):
        raise ValueError(f"{label}: {expected}, found {function!r} [RL2009]")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{label}: {expected}, found an async function [RL2009]")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: the first call will tell
        return
    keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    try:
        signature.bind_partial("response", "answer")
    except TypeError:
        keywords = False
    if not keywords:
        raise ValueError(f"{label}: {expected}, found {signature} [RL2009]")

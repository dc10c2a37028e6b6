"""``rltrain bench compare OLD NEW``: what became worse between two results of ``benchmarks/``.

A file holds ``ratios`` and ``measured`` numbers. A ratio is a median with its 95 % interval; larger
is better. The name of a measured number ends in its unit. A number is worse if the two intervals do
not overlap. A number without an interval is judged only if it is exact, as bytes are.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALLER_IS_BETTER = ("_seconds", "_s", "_ms", "_us", "_bytes", "_mb", "_gb", "_gib")
LARGER_IS_BETTER = ("_per_second", "_per_s", "_busy_fraction")
PARTS = ("benchmark", "settings", "measured", "ratios", "machine")
MACHINE = ("gpu", "num_gpus", "cpu")


@dataclass(frozen=True)
class Change:
    """One number, before and after; ``worse`` is None where no judgement is possible."""

    name: str
    old: str
    new: str
    worse: bool | None
    better: bool = False


def compare(old_path: Path, new_path: Path) -> int:
    """Exit status 1 when something has become worse.

    Args:
        old_path, new_path: a result, or a folder of them
    """
    old, new = read_results(old_path), read_results(new_path)
    if missing := sorted(old.keys() - new.keys()):
        raise ValueError(
            f"{new_path}: expected results of {missing} too, as in {old_path} [RL7005]"
        )
    changes_of = {name: compare_results(old[name], new[name]) for name in sorted(old)}
    for name, changes in changes_of.items():
        sys.stdout.write(
            "\n".join([name, *notes(old[name], new[name]), *map(change_line, changes)]) + "\n"
        )
    return int(any(change.worse for changes in changes_of.values() for change in changes))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results by the name of their benchmark.

    Raises:
        ValueError: a file is not one, or a folder has none, or two of one benchmark.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    results: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            content = json.loads(file.read_text())
            result = {key: content[key] for key in PARTS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}: expected what a command of benchmarks/ writes with --out, found "
                f"{type(error).__name__}: {error}"
                " [RL7005]"
            ) from error
        name = result["benchmark"]
        if name in results:
            raise ValueError(
                f"{path}: expected one result of {name}, found two; name the files [RL7005]"
            )
        results[name] = result
    if not results:
        raise ValueError(
            f"{path}: expected a result of benchmarks/ or a folder of them, found none [RL7005]"
        )
    return results


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Ratios and, of one and the same machine, what was measured.

    Raises:
        ValueError: their settings differ.
    """
    settings = old["settings"], new["settings"]
    names = {**settings[0], **settings[1]}
    if differ := [n for n in names if settings[0].get(n) != settings[1].get(n)]:
        was, is_now = ({name: s.get(name) for name in differ} for s in settings)
        raise ValueError(
            f"{old['benchmark']}: expected the same settings, found {was} and {is_now} [RL7005]"
        )
    changes = [_judge(n, was, now, 1) for n, was, now in _pairs(old["ratios"], new["ratios"])]
    if not _other_machine(old, new):
        pairs = _pairs(old["measured"], new["measured"])
        changes += [_judge(n, was, now, _sign(n)) for n, was, now in pairs]
    return changes


def notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed besides the code."""
    machines = old["machine"], new["machine"]
    names = sorted({**machines[0], **machines[1]})
    lines = [
        f"  {n}: {machines[0].get(n)} -> {machines[1].get(n)}"
        for n in names
        if machines[0].get(n) != machines[1].get(n)
    ]
    if _other_machine(old, new):
        lines.append("  another machine: only ratios are compared")
    return lines


def change_line(change: Change) -> str:
    verdict = "WORSE" if change.worse else "better" if change.better else ""
    return f"  {change.name:<40} {change.old:>30} -> {change.new:<30} {verdict}".rstrip()


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in {**old, **new}:
        yield name, old.get(name), new.get(name)


def _judge(name: str, old: Any, new: Any, sign: int) -> Change:
    """A number that disappears is reported as worse: it could hide a regression."""
    if old is None or new is None:
        return Change(name, _show(old), _show(new), worse=new is None)
    exact = name.endswith("_bytes")
    known = all(isinstance(value, Mapping) or exact for value in (old, new))
    (old_low, old_high), (new_low, new_high) = _bounds(old), _bounds(new)
    lower, higher = new_high < old_low, new_low > old_high
    worse, better = (lower, higher) if sign > 0 else (higher, lower)
    comparable = known and sign != 0
    return Change(
        name, _show(old), _show(new), worse if comparable else None, comparable and better
    )


def _sign(name: str) -> int:
    return 1 if name.endswith(LARGER_IS_BETTER) else -1 if name.endswith(SMALLER_IS_BETTER) else 0


def _bounds(value: Any) -> tuple[float, float]:
    return (value["low"], value["high"]) if isinstance(value, Mapping) else (value, value)


def _show(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, Mapping):
        return f"{value['value']:.4g} ({value['low']:.4g} to {value['high']:.4g})"
    return f"{value:.6g}"


def _other_machine(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return any(old["machine"].get(name) != new["machine"].get(name) for name in MACHINE)

"""Training rollouts and evaluation samples for the page, chosen so that the page stays small."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_BYTES = 700_000
MAX_EVALUATION_BYTES = 300_000
MAX_TOKENS = 1_500
SAMPLE_TEXTS = ("prompt", "response", "answer", "finish_reason")
TOKEN_VALUES = ("rollout_logprobs", "old_logprobs", "ratio", "flipped", "loss_mask")
STEP = re.compile(rb'^\{"step": ?(\d+)[,}]')


def read_rollouts(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rollouts of steps spread over the run, as many as fit, and a sentence about what did not.

    Raises:
        ValueError: when a line other than a torn last one is no rollout.
    """
    lines = _lines_by_step(path)
    if not lines:
        return [], ""
    chosen: dict[int, list[dict[str, Any]]] = {}
    size = 0
    for step in spread(sorted(lines)):
        rollouts = [_rollout(path, *line) for line in lines[step]]
        bytes_needed = sum(len(json.dumps(rollout)) for rollout in rollouts)
        if chosen and size + bytes_needed > MAX_BYTES:
            continue
        chosen[step] = rollouts
        size += bytes_needed
    shown = [rollout for step in sorted(chosen) for rollout in chosen[step]]
    if len(chosen) == len(lines):
        return shown, ""
    return shown, f"{len(chosen)} of {len(lines)} steps with kept rollouts are on this page."


def spread(items: Sequence[int]) -> Iterable[int]:
    """All items, the last and the first before those halfway between what came before."""
    if not items:
        return
    order = [len(items) - 1, 0]
    spans = [(0, len(items) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    yield from dict.fromkeys(items[i] for i in order)


def _lines_by_step(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Of each step the (offset, length) of its lines; a torn last line is left out."""
    lines: dict[int, list[tuple[int, int]]] = {}
    if not path.is_file():
        return lines
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                match = STEP.match(line)
                step = int(match[1]) if match else _parse(path, number, line).get("step")
                if not isinstance(step, int):
                    raise ValueError(
                        f"{path}:{number}: expected an int 'step', found {step!r} [RL7002]"
                    )
                lines.setdefault(step, []).append((offset, len(line)))
            offset += len(line)
    return lines


def _rollout(path: Path, offset: int, length: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(offset)
        rollout = _parse(path, f"byte {offset}", file.read(length))
    return compact(rollout)


def _parse(path: Path, place: int | str, line: bytes) -> dict[str, Any]:
    try:
        rollout = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}:{place}: expected a JSON object, found {line[:80]!r} [RL7002]"
        ) from error
    if not isinstance(rollout, dict):
        raise ValueError(f"{path}:{place}: expected a JSON object, found {line[:80]!r} [RL7002]")
    return rollout


def compact(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a rollout: its first tokens, numbers of four digits."""
    tokens = [str(token) for token in rollout.get("tokens") or []]
    parts = rollout.get("reward_parts")
    return {
        "step": rollout["step"],
        **{name: rollout.get(name) for name in ("group", "sample")},
        **{name: str(rollout.get(name, "")) for name in ("prompt", "response", "answer")},
        "finish_reason": str(rollout.get("finish_reason", "")),
        **{name: _rounded(rollout.get(name)) for name in ("reward", "advantage")},
        "reward_parts": {str(k): _rounded(v) for k, v in parts.items()} if parts else {},
        "tokens": tokens[:MAX_TOKENS],
        "num_tokens": len(tokens),
        **{name: _values(rollout.get(name), len(tokens)) for name in TOKEN_VALUES},
    }


def _values(values: Any, count: int) -> list[float | None] | None:
    """One number per token; None where there are none, or not as many as tokens."""
    if not isinstance(values, list) or len(values) != count:
        return None
    return [_rounded(value) for value in values[:MAX_TOKENS]]


def _rounded(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def evaluation_samples(
    samples: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[int, list[Mapping[str, Any]]]], str]:
    """Samples of each evaluation, the newest first; and a sentence about what is left out."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in samples:
        shown = {name: row.get(name, "") for name in SAMPLE_TEXTS}
        by_step.setdefault(row["step"], []).append({**shown, "reward": row.get("reward")})
    chosen: list[int] = []
    size = 0
    for step in spread(sorted(by_step)):
        size += sum(len(str(row)) for row in by_step[step])
        if chosen and size > MAX_EVALUATION_BYTES:
            break
        chosen.append(step)
    newest = [(step, by_step[step]) for step in sorted(chosen, reverse=True)]
    if len(chosen) == len(by_step):
        return newest, ""
    return newest, f"{len(chosen)} of {len(by_step)} evaluations are on this page."

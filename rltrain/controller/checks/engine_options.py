"""Options of vLLM and Megatron that the installed version does not have, found before a start.

Neither package is imported, which would take many seconds: the fields are read in their source.
"""

import ast
import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rltrain.config import Config

VLLM = ("vllm", ("engine/arg_utils.py",), ("EngineArgs", "AsyncEngineArgs"))
MEGATRON = (
    "megatron.core",
    ("model_parallel_config.py", "transformer/transformer_config.py"),
    ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig"),
)
"""Package, files in it, and the classes that have the fields."""


def check_engine_options(config: Config) -> None:
    """Every key of ``rollout.engine_args`` and ``policy.megatron_args`` is an option here. With
    ``cluster.address`` the workers may have other versions, and find out themselves.

    Raises:
        ValueError: one is not; with the nearest name.
    """
    if config.cluster.address is not None:
        return
    _check(config.rollout.engine_args, "rollout.engine_args", "vLLM", "RL1013", *VLLM)
    _check(config.policy.megatron_args, "policy.megatron_args", "Megatron", "RL1014", *MEGATRON)


def _check(
    names: Iterable[str],
    key: str,
    title: str,
    code: str,
    package: str,
    files: tuple[str, ...],
    classes: tuple[str, ...],
) -> None:
    names = list(names)
    known = declared_fields(package, files, classes) if names else ()
    for name in names if known else ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ValueError(
                f"{key}.{name}: the installed {title} has no such option; {hint} [{code}]"
            )


def declared_fields(package: str, files: Iterable[str], classes: Iterable[str]) -> tuple[str, ...]:
    """The annotated fields of these classes; none where the package is not installed, or declares
    them in another way, so that a run finds out itself."""
    spec = find_spec(package.partition(".")[0])
    if spec is None or not spec.submodule_search_locations:
        return ()
    inside = Path(*package.split(".")[1:])
    folders = [Path(location, inside) for location in spec.submodule_search_locations]
    sources = [f / file for f in folders for file in files if (f / file).is_file()]
    bodies = {
        node.name: node.body
        for source in sources
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    if not set(classes) <= bodies.keys():
        return ()
    return tuple(
        statement.target.id
        for name in classes
        for statement in bodies[name]
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )

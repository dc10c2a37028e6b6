"""How long it takes to place the ranks of 4,096 GPUs on 512 nodes. Pure: nothing is started.

    python -m benchmarks.placement --out result.json

Three clusters: all GPUs free; some nodes partly occupied; and one with an engine too many, where
every way of packing fails, also with blocks of ranks cut, before the error is said.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Result
from rltrain.config import Config
from rltrain.planning.nodes import Node, planned_nodes
from rltrain.planning.place import place
from rltrain.planning.placement import Placement

NODES, PER_NODE = 512, 8
LAYOUT = {"tp": 4, "pp": 8, "dp": 64, "ep": 8}


def config(engines: int, **layout: int) -> Config:
    values: dict[str, Any] = {
        "policy": {"parallel": LAYOUT | layout},
        "rollout": {"num_engines": engines, "tensor_parallel": 4},
        "cluster": {"device": "cuda", "placement": "disaggregated"},
    }
    return Config.model_validate(values)


def occupied(seed: int) -> list[Node]:
    """Every fourth node has lost between one and seven of its GPUs to others."""
    rng = random.Random(seed)
    free = [PER_NODE - (rng.randint(1, 7) if n % 4 == 0 else 0) for n in range(NODES)]
    return [Node(f"node-{n}", gpus=gpus, total_gpus=PER_NODE) for n, gpus in enumerate(free)]


def timed(run: Config, nodes: list[Node]) -> tuple[float, Placement | None]:
    began = time.perf_counter()
    try:
        placed = place(run, nodes)
    except ValueError:
        placed = None
    return time.perf_counter() - began, placed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    ranks = LAYOUT["tp"] * LAYOUT["pp"] * LAYOUT["dp"]
    full = (NODES * PER_NODE - ranks) // 4
    result = Result("placement", settings={"nodes": NODES, "gpus": NODES * PER_NODE, **LAYOUT})
    seconds, placed = timed(config(full), planned_nodes(NODES * PER_NODE, PER_NODE))
    assert placed is not None and placed.num_gpus == NODES * PER_NODE
    result.measure("all_free_s", seconds)
    nodes = occupied(seed=1)
    engines = sum(node.gpus // 4 for node in nodes) - ranks // 4
    seconds, placed = timed(config(engines, ep=2), nodes)
    assert placed is not None
    result.measure("partly_occupied_s", seconds)
    seconds, placed = timed(config(sum(node.gpus for node in nodes) // 4, ep=2), nodes)
    assert placed is None
    result.measure("too_few_s", seconds)
    if out is not None:
        result.write(out)
    for name, value in result.measured.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()

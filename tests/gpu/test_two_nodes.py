"""A run over two nodes: the policy on one, the engine on the other. Each has a GPU of its own where
there are two, else they share one.

    python tests/gpu/test_two_nodes.py FOLDER [name=value ...]       # where there is no pytest

Each node is a host of tests/hosts, with its own network, /tmp and /dev/shm, and offers the GPU to
Ray. NCCL takes the two for machines, since their names differ, and goes over sockets. Packages on
PYTHONPATH must not lie in /tmp, of which each host has its own.
"""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rltrain.tracking.gpus import read_gpus
from tests.hosts import ray_nodes
from tests.hosts.namespaces import Host, host, switch, why_not

LIMIT_S = 560.0
RUN = (
    "+recipe=grpo_moe_r3",
    "trainer.steps=3",
    "trainer.eval_every=0",
    "trainer.check_weight_sync=true",
    "model.tiny.warm_start.steps=30",
    "model.tiny.warm_start.num_problems=1000",
    "data.size=2000",
    "data.eval_size=32",
    "rollout.enforce_eager=true",
    "rollout.gpu_memory_utilization=0.25",
    "cluster.placement=disaggregated",
    "tracking.backends=[]",
)


def run(folder: Path, overrides: tuple[str, ...] = ()) -> dict[str, object]:
    """Three steps over two nodes; what crossed between them."""
    folder.mkdir(parents=True, exist_ok=True)
    ray_nodes.RAY = str(ray_command(folder))
    with ExitStack() as stack:
        network = stack.enter_context(switch())
        nodes = [
            with_packages(stack.enter_context(host(network, n + 1, folder)), gpu)
            for n, gpu in enumerate(gpus_of_nodes())
        ]
        address = f"{nodes[0].address}:{ray_nodes.PORT}"
        head = ["--head", f"--port={ray_nodes.PORT}", "--include-dashboard=false"]
        for node, place in zip(nodes, (head, [f"--address={address}"]), strict=True):
            ray_nodes.start_raylet(node, [*place, "--num-cpus=8", "--num-gpus=1"])
        out = folder / "run"
        where = [f"cluster.address={address}", f"trainer.output_dir={out}"]
        models = f"model.cache_dir={folder / 'models'}"
        argv = [sys.executable, "-m", "rltrain.main", *RUN, models, *where, *overrides]
        with (folder / "terminal.log").open("w") as log:
            process = nodes[0].start(argv, log, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET")
        try:
            status = process.wait(LIMIT_S)
        finally:
            process.kill()
        said = (folder / "terminal.log").read_text()
        assert status == 0, said
    return crossed(out, said)


def crossed(out: Path, said: str) -> dict[str, object]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3], rows
    assert all(row["routing/coverage"] == 1.0 for row in rows)
    assert all(row["routing/bytes_between_nodes"] > 0 for row in rows)
    assert all(row["weights/bytes_between_nodes"] > 0 for row in rows[:-1])
    logs = "".join(file.read_text(errors="replace") for file in (out / "logs").glob("*.log"))
    assert "NET/Socket" in logs, "NCCL did not go over sockets"
    samples = read_gpus(out / "gpus.csv")
    nodes = sorted({(sample.node, sample.gpu) for sample in samples})
    assert len({node for node, _ in nodes}) == 2, f"samples of GPUs are of {nodes} alone"
    shown = ("step", "routing/bytes_between_nodes", "weights/bytes_between_nodes", "mismatch/k3")
    return {
        "placement": [line for line in said.splitlines() if "placement: " in line],
        "steps": [{name: row[name] for name in shown if name in row} for row in rows],
        "sampled (node, GPU)": nodes,
        "time/weight_sync": [row.get("time/weight_sync") for row in rows],
        "nccl": sorted(
            {line.partition("NCCL INFO ")[2] for line in logs.splitlines() if "NET/" in line}
        )[:8],
    }


def ray_command(folder: Path) -> Path:
    """Ray's command, also where its package lies on PYTHONPATH alone."""
    command = folder / "ray"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    command.chmod(0o755)
    return command


def gpus_of_nodes() -> tuple[int, int]:
    """The GPU of each of the two."""
    import torch

    return 0, min(1, torch.cuda.device_count() - 1)


def with_packages(node: Host, gpu: int) -> Host:
    """The host, where programs find what this process finds, and this GPU alone."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    found = ":".join([*paths, node.environment["PYTHONPATH"]])
    kept |= {"PYTHONPATH": found, "CUDA_VISIBLE_DEVICES": str(gpu)}
    return replace(node, environment={**node.environment, **kept})


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(run(Path(sys.argv[1]).absolute(), tuple(sys.argv[2:])), indent=2) + "\n"
    )
else:
    import pytest
    import torch

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(900),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ]

    def test_two_nodes(tmp_path: Path) -> None:
        if reason := why_not():
            pytest.skip(f"no hosts can be made: {reason}")
        run(tmp_path)

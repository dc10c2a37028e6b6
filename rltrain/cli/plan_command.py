"""``rltrain plan``: what a configuration needs, before anything is started. No GPU, and no Ray
without ``--cluster``.

It plans for GPUs with ``--gpus``, ``--nodes`` or ``cluster.device=cuda``, or if this machine has
GPUs. Else it plans for the CPU of this machine.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rltrain.algorithms.advantages import needs_critic
from rltrain.cli.plan_nodes import AskedNodes
from rltrain.config import Config
from rltrain.config.hydra_groups import conf_folder
from rltrain.controller.checks.engine_shapes import Device, check_cpu_heads, check_tensor_parallel
from rltrain.controller.checks.model_checks import (
    check_layout,
    check_lengths,
    check_replay,
    read_model,
)
from rltrain.planning.machine import GpuMachine, device
from rltrain.planning.memory_terms import GIB
from rltrain.planning.nodes import Node
from rltrain.planning.plan_cpu import Host, describe_cpu
from rltrain.planning.plan_text import describe_gpus
from rltrain.weights.architecture.decoder import Architecture


def plan(config: Config, asked: AskedNodes, gpu_memory_gib: float) -> int:
    """Print placement, batch and memory; the exit status is 1 when the run does not fit.

    Args:
        gpu_memory_gib: of each GPU

    Raises:
        ValueError: the configuration does not go with the model.
        RuntimeError: the cluster that was asked for cannot be joined.
    """
    config, note = with_architecture(config)
    nodes, driver = asked.read(config)
    # Nodes that are asked for are those of other machines.
    where = device(config.cluster) if nodes is None else _device(config, nodes)
    arch = check_plan(config, where)
    has_critic = needs_critic(config.algorithm)
    if where == "cuda":
        machine = GpuMachine(nodes, int(gpu_memory_gib * GIB))
        text, fits = describe_gpus(
            config, arch, machine, note, has_critic=has_critic, driver=driver
        )
    else:
        host = Host.this()
        text, fits = describe_cpu(
            config, arch, host, note, has_critic=has_critic, nodes=nodes, driver=driver
        )
    sys.stdout.write(text)
    return 0 if fits else 1


def _device(config: Config, nodes: Sequence[Node]) -> Device:
    wanted = config.cluster.device
    if wanted == "auto":
        return "cuda" if any(node.total_gpus for node in nodes) else "cpu"
    return wanted


def with_architecture(config: Config) -> tuple[Config, str]:
    """``config`` with a ``model.path`` that has a ``config.json``, and what there is to say of it.

    Where the user's folder is not there yet, rltrain's own copy of a model's ``config.json`` stands
    in, by the folder's name.
    """
    path = config.model.path
    if path is None:
        return config, "the tiny model"
    shipped = conf_folder() / "model" / Path(path).name
    if Path(path).expanduser().is_dir() or not (shipped / "config.json").is_file():
        return config, path
    model = config.model.model_copy(update={"path": str(shipped)})
    note = f"{path} is no folder here: sizes from conf/model/{shipped.name}/config.json"
    return config.model_copy(update={"model": model}), note


def check_plan(config: Config, device: Device) -> Architecture:
    """The architecture of the model, which layout, lengths and replay go with.

    Raises:
        ValueError: as preflight raises it.
    """
    model = read_model(config)
    check_layout(config, model)
    if config.algorithm.type == "rl":
        check_lengths(config, model)
        check_replay(config, model)
        check_tensor_parallel(config.rollout, model)
        if device == "cpu":
            check_cpu_heads(model, config.model.path)
    return model

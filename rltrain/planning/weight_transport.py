"""How the policy's weights travel to the engines. Pure."""

from typing import Literal

from rltrain.config import Config
from rltrain.config.rollout import Transport
from rltrain.planning.placement import Placement


def check_transfer(config: Config, placement: Placement) -> None:
    """Raises ValueError as `choose_transport` does, if there are engines."""
    if config.engine_ranks:
        choose_transport(config.rollout.weight_transfer, placement)


def choose_transport(wanted: Literal["auto", Transport], placement: Placement) -> Transport:
    """What ``rollout.weight_transfer`` means where the run was placed.

    Raises:
        ValueError: that transport does not work with this placement.
    """
    device, colocated = placement.device, placement.colocated
    if wanted == "auto":
        return "ipc" if device == "cuda" and colocated else "broadcast"
    if wanted == "ipc" and (device == "cpu" or not colocated):
        actual = "a run on CPUs" if device == "cpu" else "engines on GPUs of their own"
        raise ValueError(
            "rollout.weight_transfer=ipc: expected engines that share the policy's GPUs, found "
            f"{actual}. Use rollout.weight_transfer=auto, or cluster.placement=colocated on GPUs"
            " [RL4010]"
        )
    if wanted == "broadcast" and device == "cuda" and colocated:
        raise ValueError(
            "rollout.weight_transfer=broadcast: expected engines on GPUs of their own, found some "
            "that share the policy's, and NCCL refuses two ranks on one GPU. Use "
            "rollout.weight_transfer=auto, or cluster.placement=disaggregated"
            " [RL4010]"
        )
    return wanted

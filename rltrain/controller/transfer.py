"""How the policy's weights travel to the engines. Pure."""

from typing import Literal

from rltrain.config.rollout import Carrier


def choose_carrier(
    wanted: Literal["auto"] | Carrier, device: Literal["cpu", "cuda"], *, colocated: bool
) -> Carrier:
    """What ``rollout.weight_transfer`` means where the run was placed.

    Raises:
        ValueError: the bytes cannot take that way there.
    """
    if wanted == "auto":
        if device == "cpu":
            return "shm"
        return "ipc" if colocated else "broadcast"
    if wanted == "ipc" and (device == "cpu" or not colocated):
        found = "a run on CPUs" if device == "cpu" else "engines on GPUs of their own"
        raise ValueError(
            "rollout.weight_transfer=ipc: expected engines that share the policy's GPUs, found "
            f"{found}. Use rollout.weight_transfer=auto, or cluster.placement=colocated on GPUs"
        )
    if wanted == "broadcast" and device == "cuda" and colocated:
        raise ValueError(
            "rollout.weight_transfer=broadcast: expected engines on GPUs of their own, found some "
            "that share the policy's, and NCCL refuses two ranks on one GPU. Use "
            "rollout.weight_transfer=auto, or cluster.placement=disaggregated"
        )
    return wanted

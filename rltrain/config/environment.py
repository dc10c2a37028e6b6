"""The environment variables of every actor: ``cluster.env``, and what the driver's own brings."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rltrain.config.redact import URL_LOGIN
from rltrain.config.secret_names import is_secret

PREFIXES = ("NCCL_", "GLOO_", "HF_", "VLLM_", "TOKENIZERS_")
"""Variables of the driver that reach the actors on every node, as if they were in cluster.env."""
OF_ONE_NODE = frozenset({"VLLM_HOST_IP"})
"""Those of them that differ from node to node."""
OWNED = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "TOKENIZERS_PARALLELISM",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_HOST_IP",
        "VLLM_NO_USAGE_STATS",
        "WORLD_SIZE",
    }
)
"""Variables that the trainer sets, or that are another one in every process."""
OWNED_PREFIXES = ("RAY_", "RLTRAIN_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ActorEnvironment(NamedTuple):
    """Ray writes an actor's ``runtime_env`` into its logs, so secrets take another way."""

    plain: dict[str, str]
    secret: dict[str, str]


def actor_environment(
    env: Mapping[str, Any], driver: Mapping[str, str], *, joined: bool
) -> ActorEnvironment:
    """What every actor has in its environment beside what its node has.

    Args:
        env: ``cluster.env``
        driver: the environment of this process
        joined: whether the run joined a cluster. Otherwise all processes inherit this one's.
    """
    inherited = {
        name: value
        for name, value in driver.items()
        if joined and name.startswith(PREFIXES) and name not in OF_ONE_NODE
    }
    values = inherited | {name: str(value) for name, value in env.items()}
    secret = {n: v for n, v in values.items() if is_secret(n) or URL_LOGIN.search(v)}
    plain = {name: value for name, value in values.items() if name not in secret}
    return ActorEnvironment(plain, secret)


def check_env(env: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: a name or a value of ``cluster.env`` cannot be used. A value is never shown.
    """
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"env.{name}: expected the name of an environment variable")
        if name in OWNED or name.startswith(OWNED_PREFIXES):
            raise ValueError(
                f"env.{name}: the trainer or Ray sets it for each process: leave it out"
            )
        # A number is not redacted: experts_per_token is one.
        allowed, said = (str, "text") if is_secret(name) else (str | int, "text or an integer")
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(
                f"env.{name}: expected {said}, found {type(value).__name__}: write what programs "
                f"shall read, such as \"cluster.env.{name}='1'\""
            )
        if "\0" in str(value):
            raise ValueError(f"env.{name}: a value cannot hold the character NUL")

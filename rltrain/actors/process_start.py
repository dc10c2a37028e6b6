"""What every actor of a run does first in its process."""

import faulthandler
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from secrets import token_hex

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_initialized,
    _internal_kv_put,
)

from rltrain.actors.actor_log import redirect_output
from rltrain.actors.run_nodes import lost_node
from rltrain.actors.run_processes import DUMP
from rltrain.actors.run_temp import own_token
from rltrain.actors.shared_memory import name_semaphores

SECRETS = "RLTRAIN_SECRETS"
"""Environment variable of an actor's process: under which key of Ray's store its secrets are."""
NAMESPACE = b"rltrain"


def begin_process() -> None:
    """Take the secrets of the run into the environment, and write to the actor's log."""
    key = os.environ.get(SECRETS)
    if key and _internal_kv_initialized():
        stored = _internal_kv_get(key.encode(), namespace=NAMESPACE)
        os.environ.update(json.loads(stored) if stored else {})
    redirect_output()
    if token := own_token():
        name_semaphores(token)
    faulthandler.register(DUMP, file=2, all_threads=True)


@contextmanager
def secrets_kept(secrets: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Keep the secrets in the memory of Ray's head within.

    Ray writes the environment of actors into its logs and shows it in its dashboard; this store it
    does not.

    Yields:
        what an actor needs in its environment to find them
    """
    if not secrets:
        yield {}
        return
    key = token_hex(16)
    _internal_kv_put(key.encode(), json.dumps(dict(secrets)).encode(), namespace=NAMESPACE)
    try:
        yield {SECRETS: key}
    finally:
        if lost_node() is None:  # else nobody would answer, and they are lost with it
            _internal_kv_del(key.encode(), namespace=NAMESPACE)

"""Runs a function on several ranks, each a CPU process with Megatron's shim applied.

Ranks are forked from a server that has imported torch and Megatron once for the whole test session.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOAD = ["rltrain.policy.optimizer", "rltrain.weights.load", "rltrain.weights.sender"]


def run_ranks(
    fn: Callable[..., None], world_size: int, folder: Path, *args: Any, timeout_s: float = 240
) -> None:
    """Calls ``fn(rank, folder, *args)`` on every rank; results come back as files in ``folder``.

    ``fn`` is a function of an importable module. It lays its own grids, with a rendezvous file in
    ``folder`` each: see `rendezvous`. Fails with the traceback of the first rank that does.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ranks = [
        context.Process(target=_run, args=(fn, rank, folder, args), name=f"rank {rank}")
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        _wait(ranks, folder, time.monotonic() + timeout_s)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def rendezvous(folder: Path, name: str) -> str:
    """The ``init_method`` of a world of its own."""
    return f"file://{folder / name}.rendezvous"


def _wait(ranks: list[BaseProcess], folder: Path, deadline: float) -> None:
    while any(rank.is_alive() for rank in ranks):
        failed = any(rank.exitcode not in (None, 0) for rank in ranks)
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
    codes = {rank.name: rank.exitcode for rank in ranks}
    assert not errors, "\n".join(errors)
    assert set(codes.values()) == {0}, f"exit codes (None is still running): {codes}"


def _run(fn: Callable[..., None], rank: int, folder: Path, args: tuple[Any, ...]) -> None:
    import torch

    from rltrain.patches.megatron import apply_cpu

    torch.set_num_threads(1)
    try:
        apply_cpu()
        fn(rank, folder, *args)
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise

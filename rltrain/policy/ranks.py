"""Runs a function on several ranks without Ray. Each rank is a process of its own.

On a CPU, ranks are forked from a server that imports torch and Megatron once, since that takes
seconds. No process group is made.
"""

import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rltrain.actors.network import set_variables
from rltrain.parallel.rendezvous import LOOPBACK, Address, Member, Rendezvous, listen, serve

_PRELOAD = [
    "rltrain.policy.optimizer",
    "rltrain.policy.worker",
    "rltrain.verification.one_rank_oracle",
]
_POLL_S = 0.05
_here: Rendezvous | None = None
"""Where this process meets the other ranks, if it is one."""


class RanksFailed(RuntimeError):
    """A rank raised, died or was too slow. The message has the tracebacks."""


def run_ranks(
    fn: Callable[..., None],
    world_size: int,
    folder: Path,
    *args: Any,
    timeout_s: float = 240,
    device: str = "cpu",
    on_poll: Callable[[], bool] = lambda: False,
) -> None:
    """Calls ``fn(rank, folder, *args)`` on every rank. Ranks return results as files in ``folder``.

    Args:
        fn: a function of an importable module. It calls ``init_mesh`` itself, with `rendezvous`
        timeout_s: the longest time without news
        on_poll: called repeatedly while the ranks run; returns whether there was news

    Raises:
        RanksFailed: a rank failed. The other ranks are killed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # Megatron's imports initialize CUDA, and a process with a CUDA context cannot be forked.
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(_PRELOAD)
    for stale in folder.glob("*.error"):
        stale.unlink()
    sock = listen(LOOPBACK)
    members = tuple(Member(f"rank {rank}", LOOPBACK) for rank in range(world_size))
    here = Rendezvous(Address(*sock.getsockname()), "", members)
    ranks: list[BaseProcess] = [
        context.Process(
            target=_run,
            args=(fn, rank, folder, args, device, here, sock if rank == 0 else None),
            name=f"rank {rank}",
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    sock.close()
    try:
        _wait(ranks, folder, timeout_s, on_poll)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def rendezvous(folder: Path, name: str) -> Rendezvous:
    """Where the ranks of one process group meet; each needs its own ``name`` in ``folder``.

    In a process that is no rank of `run_ranks`, that of a group of this process alone.
    """
    return replace(_here, group=f"{folder / name}") if _here else Rendezvous.local(1)


def _wait(
    ranks: list[BaseProcess], folder: Path, timeout_s: float, on_poll: Callable[[], bool]
) -> None:
    last_news = time.monotonic()
    while any(rank.is_alive() for rank in ranks):
        if on_poll():
            last_news = time.monotonic()
        failed = any(rank.exitcode not in (None, 0) for rank in ranks)
        if failed or time.monotonic() > last_news + timeout_s:
            break
        time.sleep(_POLL_S)
    on_poll()
    if errors := [file.read_text() for file in sorted(folder.glob("*.error"))]:
        raise RanksFailed("\n".join(errors))
    codes = {rank.name: rank.exitcode for rank in ranks}
    if set(codes.values()) != {0}:
        raise RanksFailed(
            f"no news for {timeout_s:g} s, or a rank died; exit codes (None: it hangs) are {codes}"
        )


def _run(
    fn: Callable[..., None],
    rank: int,
    folder: Path,
    args: tuple[Any, ...],
    device: str,
    here: Rendezvous,
    sock: socket.socket | None,
) -> None:
    """
    Args:
        here: the group's name is still missing
        sock: where the ranks will meet, for the one that serves
    """
    global _here
    # Imported here: the parent process needs neither torch nor Megatron.
    import torch

    from rltrain.patches.megatron import patch_megatron
    from rltrain.patches.megatron_cpu import patch_megatron_for_cpu

    # Warnings of these packages would interrupt what the parent prints.
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
    try:
        _here = here
        if sock is not None:
            serve(LOOPBACK, sock=sock)
        set_variables("lo", LOOPBACK)
        if device == "cpu":
            torch.set_num_threads(1)
            patch_megatron_for_cpu()
        patch_megatron()
        fn(rank, folder, *args)
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise

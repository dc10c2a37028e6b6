"""The sender's end of a weight sync by broadcast, where the engine runs in this process."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from vllm import LLM

from rltrain.weights.sync.broadcast import BroadcastGroup

CPU = torch.device("cpu")


def join(engine: LLM) -> BroadcastGroup:
    """A group of this process and the engine, which a next one replaces."""
    # Kept: a store still writes to its file when it ends.
    file = str(Path(tempfile.mkdtemp(prefix="rltrain-broadcast-")) / "group")
    info = {"file": file, "first_rank": 1, "size": 2, "timeout_s": 60.0}
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(BroadcastGroup, file, 0, 2, CPU, 60.0)
        engine.init_weight_transfer_engine({"init_info": info})
        return joining.result()

"""The sender's end of a weight sync by broadcast, where the engine runs in this process."""

from concurrent.futures import ThreadPoolExecutor

import torch
from vllm import LLM

from rltrain.controller.cluster.rendezvous import rendezvous_file
from rltrain.weights.sync.broadcast import BroadcastGroup

CPU = torch.device("cpu")


def join(engine: LLM) -> BroadcastGroup:
    """A group of this process and the engine, which a next one replaces."""
    file = str(rendezvous_file(engine))
    info = {"file": file, "first_rank": 1, "size": 2, "timeout_s": 60.0}
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(BroadcastGroup, file, 0, 2, CPU, 60.0)
        engine.init_weight_transfer_engine({"init_info": info})
        return joining.result()

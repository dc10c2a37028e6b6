"""The sender's end of a weight sync by broadcast, where the engine runs in this process."""

from concurrent.futures import ThreadPoolExecutor

import torch
from vllm import LLM

from rltrain.parallel.rendezvous import Rendezvous
from rltrain.weights.sync.broadcast import BroadcastGroup
from tests.integration.sync_links import links

CPU = torch.device("cpu")


def join(engine: LLM) -> BroadcastGroup:
    """A group of this process and the engine, which a next one replaces."""
    meeting = Rendezvous.local(2)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(BroadcastGroup, meeting, 0, CPU, 60.0, 60.0)
        engine.init_weight_transfer_engine({"init_info": links(meeting)})
        return joining.result()

"""How an engine with one worker meets a single sender. Imports no vLLM."""

from dataclasses import asdict

from rltrain.parallel.rendezvous import Rendezvous
from rltrain.weights.sync.links import EngineLinks, GroupLink

NODE = "10.0.0.1"


def links(meeting: Rendezvous) -> EngineLinks:
    """Of an engine with one worker, which joins a single sender, of stage 0. For other stages it
    reads the memory of its node."""
    group = GroupLink(stage=0, rendezvous=asdict(meeting), ranks=[1])
    return EngineLinks(
        node=NODE, shares=False, groups=[group], start_timeout_s=60.0, timeout_s=60.0
    )

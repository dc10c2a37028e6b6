"""How an engine with one worker meets a single sender. Imports no vLLM."""

from rltrain.weights.sync.links import EngineLinks, GroupLink


def links(file: str) -> EngineLinks:
    """Of an engine with one worker, which a single sender serves."""
    group = GroupLink(stage=0, file=file, size=2, ranks=[1])
    return EngineLinks(node=None, shares=False, groups=[group], timeout_s=60.0)

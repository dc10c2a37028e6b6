"""The part of ``rltrain plan`` about nodes: who is where, and what they send one another. Pure."""

from collections import Counter
from collections.abc import Iterable

from rltrain.config import Config
from rltrain.planning.memory_terms import GIB, gib
from rltrain.planning.node_layout import NodeLayout
from rltrain.planning.node_traffic import Step, flows, longest_tokens
from rltrain.planning.nodes import Node
from rltrain.planning.placement import Placement
from rltrain.weights.architecture.decoder import Architecture


def map_lines(config: Config, placement: Placement, nodes: Iterable[Node] = ()) -> list[str]:
    """Node by node, its ranks, stages and engines; of ``nodes`` also those without any."""
    lines = ["nodes"]
    known = {node.address: node for node in nodes}
    for address in placement.nodes:
        held = _held(known[address]) if address in known else ""
        lines.append(f"  {address}: {_on_node(config, placement, address)}{held}")
    unused = [node for node in nodes if node.address not in placement.nodes]
    lines += [f"  {node.address}: nothing; {_free(node)}{_held(node)}" for node in unused]
    layout = NodeLayout(config.policy.parallel, [slot.node for slot in placement.policy])
    lines += [
        f"  {name} groups cross nodes: none has room for one of {getattr(layout.parallel, name)} "
        "ranks, and every layer waits for the network"
        for name in layout.crossing()
    ]
    return lines


def _on_node(config: Config, placement: Placement, node: str) -> str:
    layout, parts = config.policy.parallel, []
    size = layout.world_size // layout.pp
    for name, slots in (("policy", placement.policy), ("critic", placement.critic)):
        ranks = [rank for rank, slot in enumerate(slots) if slot.node == node]
        if ranks:
            stages = sorted({rank // size for rank in ranks})
            word = "stage" if len(stages) == 1 else "stages"
            parts.append(f"{name} {_spans(ranks)} ({word} {_spans(stages)})")
    engines = [n for n, slots in enumerate(placement.engines) if slots[0].node == node]
    if engines:
        parts.append(f"engines {_spans(engines)}")
    gpus = placement.gpus_on(node)
    return ", ".join(parts) + (f"; {_gpus(gpus)}" if gpus else "")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _free(node: Node) -> str:
    return f"{_gpus(node.gpus)} and {node.cpus:g} CPUs free"


def _held(node: Node) -> str:
    return f"; others hold {'; '.join(node.holders)}" if node.holders else ""


def _amount(nbytes: int) -> str:
    return gib(nbytes) if nbytes >= GIB / 10 else f"{nbytes / 2**20:.2f} MiB"


def _spans(numbers: list[int]) -> str:
    """``0-3, 8`` of 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def traffic_lines(
    config: Config, arch: Architecture, placement: Placement, driver: str | None = None
) -> list[str]:
    """What a step moves between nodes; none where there is one.

    Args:
        driver: the node of the driver; the first that has ranks where it is None
    """
    driver = driver or placement.nodes[0]
    if set(placement.nodes) == {driver}:
        return []
    step = Step(config, arch, placement, driver, longest_tokens(config))
    moved = flows(step)
    lines = ["bytes between nodes in a step, if every sequence has the largest length"]
    lines += [f"  {flow.nbytes / GIB:9.3f} GiB  {flow.name}: {flow.formula}" for flow in moved]
    lines.append(f"  {sum(flow.nbytes for flow in moved) / GIB:9.3f} GiB")
    sent, received = Counter[str](), Counter[str]()
    for flow in moved:
        for (source, target), nbytes in flow.links.items():
            sent[source] += nbytes
            received[target] += nbytes
    if sent:
        most = [counts.most_common(1)[0] for counts in (sent, received)]
        (sender, out), (receiver, into) = most
        lines.append(
            f"  most is sent by {sender}: {_amount(out)}; received by {receiver}: {_amount(into)}"
        )
    lines.append("  without responses on their way to the driver, and checkpoints")
    return lines

"""What the nodes of a run send one another in a step, at the longest sequences. Pure.

Routes, weights, activations and the batch follow from shapes. Gradients and the exchange among
experts are estimates: rings in the order of ranks, and tokens spread evenly over experts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config
from rltrain.config.policy import ParallelConfig
from rltrain.parallel.layer_map import Pipeline
from rltrain.planning import policy_memory as memory
from rltrain.planning.node_layout import NodeLayout
from rltrain.planning.placement import Placement
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.rank_share import rank_parameters
from rltrain.weights.sync.stage_plan import plan_senders

Links = Counter[tuple[str, str]]
"""Bytes by (sending node, receiving node)."""
BATCH = 27
"""Bytes a token of the fields that a rank gets: ids, masks and numbers a token."""


@dataclass(frozen=True)
class Flow:
    name: str
    formula: str
    links: Links

    @property
    def nbytes(self) -> int:
        return self.links.total()


@dataclass(frozen=True)
class Step:
    """A step of a run on these nodes."""

    config: Config
    arch: Architecture
    placement: Placement
    driver: str
    tokens: int
    """At most, in all sequences."""

    @property
    def policy(self) -> NodeLayout:
        nodes = [slot.node for slot in self.placement.policy]
        return NodeLayout(self.config.policy.parallel, nodes)

    @property
    def models(self) -> list[tuple[NodeLayout, int]]:
        """Policy and critic, and how many passes without gradients each makes."""
        algorithm = self.config.algorithm
        scored = (not algorithm.bypass_old_logprobs) + (algorithm.kl.coef > 0)
        found = [(self.policy, scored if algorithm.type == "rl" else 0)]
        if needs_critic(algorithm):
            nodes = [slot.node for slot in self.placement.critic]
            found.append((NodeLayout(self.config.policy.parallel, nodes), 1))
        return found

    @property
    def width(self) -> int:
        """Bytes of a parameter of the trainer."""
        wanted = self.config.policy.precision.params
        in_fp32 = wanted == "fp32" or (wanted == "auto" and self.placement.device == "cpu")
        return 4 if in_fp32 else 2

    def stage_layers(self, stage: int) -> tuple[int, ...]:
        pipeline = Pipeline.of(self.config.policy.parallel)
        return pipeline.stage_layers(self.arch.num_layers, stage)


def longest_tokens(config: Config) -> int:
    """Tokens of a step if every sequence has the largest length."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return memory.sequences_per_update(config) * config.trainer.mini_batches * longest


def flows(step: Step) -> list[Flow]:
    """All that a step moves between nodes, without what is nothing."""
    found = [_batch(step), _activations(step), _gradients(step), _experts(step)]
    if step.placement.engines:
        found = [_routes(step), _weights(step), *found]
    return [flow for flow in found if flow.nbytes]


def _links(sent: Iterable[tuple[str, str, float]]) -> Links:
    """Of (from, to, bytes); what stays on its node is left out."""
    links: dict[tuple[str, str], float] = defaultdict(float)
    for source, target, nbytes in sent:
        if source != target:
            links[source, target] += nbytes
    return Counter({link: round(nbytes) for link, nbytes in links.items()})


def _routes(step: Step) -> Flow:
    arch, policy, dp = step.arch, step.policy, step.config.policy.parallel.dp
    width = 1 if arch.num_experts <= 256 else 2
    engines = Counter(slots[0].node for slots in step.placement.engines)
    sent = []
    captured = bool(arch.num_experts and step.config.routing_replay.capture)
    for stage in range(step.config.policy.parallel.pp if captured else 0):
        layers = len(set(step.stage_layers(stage)) & set(arch.moe_layers))
        rows = step.tokens / dp * layers * arch.experts_per_token * width / engines.total()
        for shard in range(dp):
            for target in policy.shard_nodes(stage, shard):
                sent += [(source, target, n * rows) for source, n in engines.items()]
    formula = (
        f"{step.tokens:,} tokens x {len(arch.moe_layers)} layers x {arch.experts_per_token} experts"
        f" x {width}, those of a stage to each of its nodes, if made on another"
    )
    return Flow("routes", formula, _links(sent))


def _weights(step: Step) -> Flow:
    config, policy = step.config, step.policy
    width = {"bfloat16": 2, "float32": 4}[config.rollout.dtype]
    parallel = config.policy.parallel
    senders = plan_senders(
        [policy.stage(stage) for stage in range(parallel.pp)],
        policy.nodes,
        [slots[0].node for slots in step.placement.engines],
        [len(slots) for slots in step.placement.engines],
        shares_memory=step.placement.device == "cpu",
    )
    numbers = [_stage_numbers(step, stage) for stage in range(parallel.pp)]
    sent: list[tuple[str, str, float]] = []
    block = parallel.ep * parallel.etp
    for sender in senders:
        nbytes = sum(numbers[sender.stage].values()) * width
        sent += [(sender.node, node, nbytes) for node in sender.served]
        group = range(sender.rank // block * block, (sender.rank // block + 1) * block)
        share = numbers[sender.stage]["experts"] * width / block
        sent += [(policy.nodes[rank], sender.node, share) for rank in group]
    whole = sum(sum(held.values()) for held in numbers)
    formula = (
        f"{whole:,} parameters x {width}, each stage from one of its ranks to every node with "
        "engines and none of them"
    )
    return Flow("weights, a sync", formula, _links(sent))


def _stage_numbers(step: Step, stage: int) -> Counter[str]:
    """Elements of a stage in experts and in the rest."""
    p, held = step.config.policy.parallel, Counter[str]()
    alone = ParallelConfig(
        pp=p.pp,
        vpp=p.vpp,
        first_stage_layers=p.first_stage_layers,
        last_stage_layers=p.last_stage_layers,
    )
    for chunk in range(p.vpp):
        for tensor in rank_parameters(step.arch, alone, stage, chunk):
            held["experts" if tensor.part == "experts" else "rest"] += tensor.numel
    return held


def _batch(step: Step) -> Flow:
    shard = step.tokens / step.config.policy.parallel.dp * BATCH
    p, sent = step.config.policy.parallel, []
    for layout, _ in step.models:
        for number in range(p.dp):
            stages = range(p.pp)
            nodes = set[str]().union(*(layout.shard_nodes(stage, number) for stage in stages))
            sent += [(step.driver, node, shard) for node in nodes]
    formula = f"{step.tokens:,} tokens x {BATCH}, to each node with ranks that train on them"
    return Flow("batch, from the driver", formula, _links(sent))


def _activations(step: Step) -> Flow:
    hidden, sent, passes = step.arch.hidden_size, [], 0
    for layout, scored in step.models:
        share = step.tokens / layout.stage_size * hidden * step.width
        passes += scored + 2
        for source, target in layout.hops():
            sent += [(source, target, (scored + 1) * share), (target, source, share)]
    formula = (
        f"{step.tokens:,} tokens x {hidden:,} x {step.width} x {passes} passes forward and "
        "backward, over each border of stages between nodes"
    )
    return Flow("activations of the pipeline", formula, _links(sent))


def _gradients(step: Step) -> Flow:
    p, updates = step.config.policy.parallel, step.config.trainer.mini_batches
    sent = []
    for layout, _ in step.models:
        for stage in range(p.pp):
            held = memory.count(step.config, step.arch, stage)
            for numbers, width in ((held.dense, p.tp), (held.experts, p.ep * p.etp)):
                for group in layout.copies(stage, width):
                    size = len(group)
                    each = numbers * (size - 1) / size * (4 + step.width) * updates
                    ring = zip(group, (*group[1:], group[0]), strict=True)
                    sent += [(layout.nodes[a], layout.nodes[b], each) for a, b in ring]
    formula = (
        f"of each ring of n ranks (n-1)/n of its parameters x (4 reduced + {step.width} gathered) "
        f"over every link between nodes, x {updates} updates"
    )
    return Flow("gradients and parameters, data-parallel (estimate)", formula, _links(sent))


def _experts(step: Step) -> Flow:
    arch, p, sent = step.arch, step.config.policy.parallel, []
    block = p.ep * p.etp
    again = step.config.policy.recompute != "none"
    for layout, scored in (
        step.models if arch.num_experts and "ep" in step.policy.crossing() else []
    ):
        for stage in range(p.pp):
            layers = len(set(step.stage_layers(stage)) & set(arch.moe_layers))
            rows = step.tokens / layout.stage_size * arch.experts_per_token / p.ep
            each = rows * arch.hidden_size * step.width * layers * 2 * (scored + 2 + again)
            ranks = layout.stage(stage)
            for first in range(0, len(ranks), block):
                group = [layout.nodes[rank] for rank in ranks[first : first + block]]
                sent += [(a, b, each) for a in group for b in group]
    formula = (
        f"{step.tokens:,} tokens x {arch.experts_per_token} experts x {arch.hidden_size:,} x "
        f"{step.width} x 2 ways, for each layer and pass, by the share of ranks on other nodes"
    )
    return Flow("exchange among experts (estimate)", formula, _links(sent))

"""Routing replay on Megatron's routers.

While `tapped` is open, every router of the forwarded model asks its `RouterTap` instead of
Megatron's own ``RouterReplay.get_replay_topk``, whose queue trusts the schedule's order and checks
nothing. Taps are found by walking the decoder and keyed by layer, so neither construction order
nor another model in the process can shift them. Invariants, each checked:

- a forward pass consults every router exactly once, with as many rows as its target has;
- what a forward pass chose belongs to its micro-batch: recomputation repeats it exactly, whatever
  order the schedule runs backward passes in;
- on a clean exit nothing is left over: every micro-batch ran forward once, and was recomputed as
  often as the configured recomputation reruns a router.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from rltrain.routing.agreement import choice_margin, gate_mass
from rltrain.routing.codec import decode
from rltrain.routing.deficits import Deficits, deficits
from rltrain.routing.expert_groups import BEST_OF_GROUP
from rltrain.routing.gate_admission import admitted

_UPSTREAM = ("scores", "topk", "num_groups", "group_topk", "default_compute_topk")


@dataclass(frozen=True)
class Target:
    """What one router must choose for one micro-batch."""

    experts: Tensor  # [S, K] as `rltrain.routing.codec` stores them
    replayed: Tensor | None  # [S] bool, False lets the row choose live; None: no row does


@dataclass(frozen=True)
class RouterRecord:
    """What one router did in one micro-batch."""

    native: Tensor  # what it would have chosen itself  # [S, K]
    used: Tensor  # what it was made to choose  # [S, K]
    gate_mass: Tensor  # of what was used over that of the native choice, by its own gates  # [S]
    margin: Tensor  # of the native choice; see `rltrain.routing.agreement.choice_margin`  # [S]
    deficits: Deficits | None = None  # of its target's experts, where they are to be compared


class RouterTap:
    """Decides for one router: replays its target, notes what it would have chosen itself."""

    def __init__(
        self,
        layer: int,
        recomputations: int,
        scores_are_logits: bool,
        expert_bias: Tensor | None = None,
        best_of_group: int = 2,
        sigmoid: bool = False,
        min_gate_ratio: float = 0.0,
    ) -> None:
        self.layer = layer
        self.recomputations = recomputations
        self.scores_are_logits = scores_are_logits
        self.expert_bias = expert_bias
        self.best_of_group = best_of_group
        self.sigmoid = sigmoid
        self.min_gate_ratio = min_gate_ratio
        self.recording = False
        self.comparing = False
        self.running: int | None = None  # the micro-batch whose forward pass is under way
        self.target: Target | None = None
        self.recomputing: int | None = None  # the micro-batch whose backward pass is under way
        self.forwarded: set[int] = set()  # micro-batches
        self.num_recomputed = 0
        self.recorded: dict[int, RouterRecord] = {}  # by micro-batch
        self.owed: dict[int, Tensor] = {}  # micro-batch -> [S, K], until recomputed

    def __call__(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As upstream: the scores at the chosen experts, and their ids.  # [S, K] each"""
        if self.running is None:
            experts = self._recompute(scores)
            return scores.gather(1, experts), experts
        native = None
        chooses = self.target is None or self.target.replayed is not None or self.min_gate_ratio > 0
        if self.recording or chooses:
            assert default_compute_topk is not None
            _, native = default_compute_topk(scores, topk, num_groups, group_topk)
        experts = self._forward(self.running, scores, topk, native)
        if self.recording:
            assert native is not None
            margin = choice_margin(
                scores.detach(), topk, num_groups, group_topk, self.best_of_group
            )
            compared = self._deficits(scores.detach(), num_groups, group_topk)
            self.recorded[self.running] = self._record(
                scores.detach(), native, experts, margin, compared
            )
        return scores.gather(1, experts), experts

    def _forward(
        self, micro_batch: int, scores: Tensor, topk: int, native: Tensor | None
    ) -> Tensor:
        """The experts of a micro-batch; ``native`` may be None where no row chooses live."""
        if micro_batch in self.forwarded:
            raise RuntimeError(
                f"layer {self.layer}: micro-batch {micro_batch} ran forward twice [RL5007]"
            )
        self.forwarded.add(micro_batch)
        experts = self._chosen(micro_batch, scores.detach(), topk, native)
        if self.recomputations:
            self.owed[micro_batch] = experts
        return experts

    def _chosen(self, micro_batch: int, scores: Tensor, topk: int, native: Tensor | None) -> Tensor:
        target, shape = self.target, (len(scores), topk)
        if target is None:
            assert native is not None
            return native
        if target.experts.shape != shape:
            raise RuntimeError(
                f"layer {self.layer}, micro-batch {micro_batch}: the router sees rows and "
                f"experts {shape}, but the routes to replay are {tuple(target.experts.shape)}"
                " [RL5007]"
            )
        experts = decode(target.experts)
        if self.min_gate_ratio > 0:
            assert native is not None
            experts = admitted(self._all_gates(scores), experts, native, self.min_gate_ratio)
        if target.replayed is None:
            return experts
        assert native is not None
        return torch.where(target.replayed.unsqueeze(1), experts, native)

    def _record(
        self,
        scores: Tensor,
        native: Tensor,
        experts: Tensor,
        margin: Tensor,
        compared: Deficits | None,
    ) -> RouterRecord:
        mass = gate_mass(self._all_gates(scores), experts, native)
        return RouterRecord(native, experts, mass, margin, compared)

    def _all_gates(self, scores: Tensor) -> Tensor:
        """Of all experts  # [S, E]"""
        return scores.float().softmax(dim=-1) if self.scores_are_logits else self._gates(scores)

    def _gates(self, scores: Tensor) -> Tensor:
        """Of scores that are no logits. A bias moves the choice and is no part of a gate."""
        return scores.float() if self.expert_bias is None else scores.float() - self.expert_bias

    def _deficits(
        self, scores: Tensor, num_groups: int | None, group_topk: int | None
    ) -> Deficits | None:
        if not self.comparing or self.target is None:
            return None
        gates = self._gates(scores) if self.sigmoid else None
        if not self.sigmoid and not self.scores_are_logits:
            scores = scores.float().clamp_min(torch.finfo(torch.float32).tiny).log()
        return deficits(
            scores,
            decode(self.target.experts),
            gates=gates,
            num_groups=num_groups,
            group_topk=group_topk,
            best=self.best_of_group,
        )

    def _recompute(self, scores: Tensor) -> Tensor:
        micro_batch = self.recomputing
        if micro_batch is None or micro_batch not in self.owed:
            raise RuntimeError(
                f"layer {self.layer}: a router ran outside of a forward pass, and micro-batch "
                f"{micro_batch} owes it no recomputation. The recomputation configured and the one "
                "that runs disagree"
                " [RL5007]"
            )
        experts = self.owed.pop(micro_batch)
        if len(experts) != len(scores):
            raise RuntimeError(
                f"layer {self.layer}, micro-batch {micro_batch}: recomputation sees {len(scores)} "
                f"rows, the forward pass saw {len(experts)}"
                " [RL5007]"
            )
        self.num_recomputed += 1
        return experts

    def check_consumed(self, num_micro_batches: int) -> None:
        expected = (num_micro_batches, num_micro_batches * self.recomputations)
        counts = (len(self.forwarded), self.num_recomputed)
        if counts != expected:
            raise RuntimeError(
                f"layer {self.layer}: expected {expected[0]} forward passes and {expected[1]} "
                f"recomputations of its router, found {counts[0]} and {counts[1]}"
                " [RL5007]"
            )


class RoutingTaps:
    """The taps of one model chunk's routers, by layer."""

    def __init__(self, taps: Mapping[int, RouterTap]) -> None:
        self._taps = taps

    @property
    def layers(self) -> list[int]:
        return sorted(self._taps)

    @contextmanager
    def forward(self, micro_batch: int, targets: Mapping[int, Target] | None) -> Iterator[None]:
        """Run the model's forward pass of one micro-batch inside this block.

        Args:
            targets: by layer, for every layer that has a router; None routes natively.
        """
        if targets is not None and set(targets) != set(self._taps):
            raise RuntimeError(
                f"routes are given for layers {sorted(targets)}, but the model routes in "
                f"{self.layers}"
                " [RL5007]"
            )
        for layer, tap in self._taps.items():
            tap.running, tap.target = micro_batch, targets[layer] if targets is not None else None
        try:
            yield
        finally:
            for tap in self._taps.values():
                tap.running = tap.target = None

    def mark_backward(self, micro_batch: int, output: Tensor) -> None:
        """Tell the taps, when ``output``'s backward pass begins, whose recomputation follows."""

        def begin(_: Tensor) -> None:
            for tap in self._taps.values():
                tap.recomputing = micro_batch

        if output.requires_grad:
            output.register_hook(begin)

    def recorded(self, micro_batch: int) -> dict[int, RouterRecord]:
        """What the routers did, by layer; once."""
        return {layer: tap.recorded.pop(micro_batch) for layer, tap in self._taps.items()}


@contextmanager
def tapped(
    routers: Mapping[int, TopKRouter],
    *,
    num_micro_batches: int,
    recomputations: Mapping[int, int] | None = None,
    record: bool = False,
    compare: bool = False,
    min_gate_ratio: float = 0.0,
) -> Iterator[RoutingTaps]:
    """Route one pass of ``num_micro_batches`` through taps; nothing of it outlives the block.

    Args:
        routers: the routers of one forwarded chunk, by layer
        recomputations: by layer, how often the backward pass reruns its router
            (`rltrain.policy.passes.recompute`); None where there is no backward pass
        record: keep what every router did for `RoutingTaps.recorded`
        compare: with ``record``, also how far its targets lie below its own choice
        min_gate_ratio: see `rltrain.routing.gate_admission.admitted`; 0 keeps all targets

    Raises:
        RuntimeError: a router was skipped, ran twice, or saw other rows than its routes have.
    """
    reruns = recomputations or dict.fromkeys(routers, 0)
    taps = {
        layer: RouterTap(
            layer,
            reruns[layer],
            _scores_are_logits(router),
            router.expert_bias,
            BEST_OF_GROUP[router.config.moe_router_score_function],
            sigmoid=router.config.moe_router_score_function == "sigmoid",
            min_gate_ratio=min_gate_ratio,
        )
        for layer, router in routers.items()
    }
    replays: dict[int, Any] = {
        layer: _replay_of(layer, router) for layer, router in routers.items()
    }
    for layer, replay in replays.items():
        taps[layer].recording, taps[layer].comparing = record, compare
        replay.get_replay_topk = taps[layer]
    try:
        yield RoutingTaps(taps)
    finally:
        for replay in replays.values():
            del replay.get_replay_topk  # uncovers the class's own
    for tap in taps.values():
        tap.check_consumed(num_micro_batches)


def _scores_are_logits(router: TopKRouter) -> bool:
    """Megatron hands logits to `get_replay_topk` where softmax follows the choice, gates else."""
    config = router.config
    softmax = config.moe_router_score_function == "softmax"
    return softmax and not config.moe_router_pre_softmax


def _replay_of(layer: int, router: TopKRouter) -> RouterReplay:
    replay = router.router_replay
    if replay is None:
        raise RuntimeError(
            f"layer {layer}: Megatron built this router without RouterReplay; build the model with "
            "moe_enable_routing_replay=True"
            " [RL5007]"
        )
    assert "get_replay_topk" not in vars(replay), f"layer {layer}: its router is already tapped"
    parameters = tuple(inspect.signature(RouterReplay.get_replay_topk).parameters)[1:]
    if parameters != _UPSTREAM:
        raise RuntimeError(
            f"Megatron's RouterReplay.get_replay_topk takes {parameters}, but rltrain was written "
            f"against {_UPSTREAM}: install a megatron-core version that docs/install.md names"
            " [RL4006]"
        )
    return replay

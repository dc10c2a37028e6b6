"""Which of a run's parts draw what they do in its timeline."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.controller.weight_sync import WeightSync
from rltrain.rollout.generator import Generator
from rltrain.tracking.timeline import Timeline


def draw_calls(timeline: Timeline, models: Sequence[WorkerGroup[Any]]) -> None:
    """From now on the calls that a model's ranks get together, until each has answered. Buckets of
    weights are left out: a sync has many."""
    for model in models:
        model.on_answer = partial(timeline.answered, model.role)


def draw_engines(timeline: Timeline, generator: Generator, weight_sync: WeightSync) -> None:
    """From now on the requests that engines have, and what brings them weights."""
    generator.watch(timeline.load)
    engines, ranks = len(generator.engines), len(weight_sync.policy.nodes)
    weight_sync.watch = partial(timeline.weight_sync, engines, ranks)

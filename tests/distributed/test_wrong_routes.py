"""Well-formed routes of other rows, samples, layers or weights do not get past the first step.

A real worker scores its own native routes, which are right by definition. Then it scores the same
routes in wrong places, as an engine, a store or a trainer would misplace them. All are well-formed:
distinct experts in range, one row per token. Malformed routes are in ``tests/unit/routing``.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.batch import Batch, SampleRoutes
from rltrain.config import Config
from rltrain.config.routing import RoutingReplayConfig
from rltrain.controller.checks.route_gate import (
    flip_metrics,
    narrow_bins,
    noise_scales,
    wrong_routes,
)
from rltrain.controller.stages import check_overlap
from rltrain.policy.types import Agreement
from rltrain.routing.agreement import num_shared, spread_experts
from rltrain.routing.align import last_rows
from rltrain.routing.codec import RouteIds, token_checksum
from rltrain.routing.integrity import CheckedRoutes, RouteShape
from rltrain.routing.objects import pack_routes
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny_folder import save_tiny_moe

pytestmark = pytest.mark.integration

LENGTHS = (30, 30, 5)
DENSE, MOE = (0,), (1, 2, 3)
EXPERTS, K, VOCAB = 8, 2, 61
MIN_OVERLAP = RoutingReplayConfig().min_overlap
VERSION = 5


def garbage(num_rows: int) -> Tensor:
    return spread_experts(num_rows, K, EXPERTS).to(torch.uint8)


def by_sample(put: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``put`` applied to the captured rows of each sample."""

    def everywhere(routes: Tensor) -> Tensor:
        samples = routes.split(list(LENGTHS))
        return torch.cat([torch.cat([put(rows[:-1]), rows[-1:]]) for rows in samples])

    return everywhere


def left_padded(rows: Tensor) -> Tensor:
    """As read from the front of a row that was padded there to the longest sample's length."""
    padding = max(LENGTHS) + 4 - len(rows)
    return torch.cat([garbage(padding)[:, None].expand(-1, rows.shape[1], -1), rows])[: len(rows)]


def by_ordinal(routes: Tensor) -> Tensor:
    """Engines report dense layers, too: the n-th router reads layer n instead of ``MOE[n]``."""
    dense = garbage(len(routes))[:, None].expand(-1, len(DENSE), -1)
    return torch.cat([dense, routes], dim=1)[:, : len(MOE)]


def swapped(routes: Tensor) -> Tensor:
    first, second, third = routes.split(list(LENGTHS))
    return torch.cat([second, first, third])


def first_overwritten(routes: Tensor) -> Tensor:
    """A draft model's only MoE layer has the number of the target's first (vllm#48622)."""
    return torch.cat([garbage(len(routes))[:, None], routes[:, 1:]], dim=1)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows one early": by_sample(lambda rows: rows.roll(-1, 0)),
    "rows one late": by_sample(lambda rows: rows.roll(1, 0)),
    "two samples swapped": swapped,
    "layers rotated": lambda routes: routes.roll(1, 1),
    "layers reversed": lambda routes: routes.flip(1),
    "layers by ordinal": by_ordinal,
    "first layer of a draft model": first_overwritten,
    "left padding": by_sample(left_padded),
    "rows reversed": by_sample(lambda rows: rows.flip(0)),
}
"""True routes -> the same ones, misplaced.  # [N, L, K]"""
STALE = "stale weights"


# What a mean over all rows does not see, each a tenth of the size at which it was reported

MANY, LENGTH = 64, 41
"""Samples of one length, so that faults are slices of  # [MANY, LENGTH - 1, L, K]"""


def one_sample_swapped(routes: Tensor) -> None:
    routes[17] = routes[18].clone()


def one_sample_late(routes: Tensor) -> None:
    routes[17] = routes[17].roll(1, 0)


def some_rows(routes: Tensor) -> Tensor:
    """3 % of them, anywhere.  # bool [MANY, LENGTH - 1]"""
    chosen: Tensor = torch.rand(routes.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.03
    chosen[:, 0] = False
    return chosen


def rows_random(routes: Tensor) -> None:
    chosen = some_rows(routes)
    scores = torch.rand(
        int(chosen.sum()), len(MOE), EXPERTS, generator=torch.Generator().manual_seed(3)
    )
    routes[chosen] = scores.topk(K).indices.to(routes.dtype)


def rows_stale(routes: Tensor) -> None:
    chosen = some_rows(routes)
    routes[chosen] = routes.roll(1, 1)[chosen]


def every_37th_row_stale(routes: Tensor) -> None:
    rows = routes.flatten(0, 1).clone()
    rows[37::37] = rows[36:-1:37]
    routes.copy_(rows.view_as(routes))


def first_rows_late(routes: Tensor) -> None:
    routes[:, 1:3] = routes[:, 0:2].clone()


def last_rows_late(routes: Tensor) -> None:
    routes[:, -1:] = routes[:, -2:-1].clone()


def a_column_of_a_layer(routes: Tensor) -> None:
    """The next free id above each row's other one."""
    other = routes[:, :, 1, 0].long()
    draw = torch.randint(1, EXPERTS, other.shape, generator=torch.Generator().manual_seed(4))
    routes[:, :, 1, 1] = ((other + draw) % EXPERTS).to(routes.dtype)


def two_ids_exchanged(routes: Tensor) -> None:
    ids = torch.arange(EXPERTS, dtype=routes.dtype)
    ids[[3, 5]] = ids[[5, 3]]
    routes[:, :, 1] = ids[routes[:, :, 1].long()]


TENTHS: dict[str, tuple[Callable[[Tensor], None], str]] = {
    "one sample of 64 swapped": (one_sample_swapped, "wrong. sample 17 of 64"),
    "one sample of 64 late": (one_sample_late, "wrong. sample 17 of 64"),
    "3 % of rows random": (rows_random, "wrong. rows all over the step"),
    "3 % of rows stale": (rows_stale, "wrong. rows all over the step"),
    "every 37th row stale": (every_37th_row_stale, "wrong. rows all over the step"),
    "first 5 % late": (first_rows_late, "wrong. (row [12] of every sample|rows from 0% to 6%)"),
    "last 2.5 % late": (last_rows_late, "wrong. (the last row of every|rows from 94% to 100%)"),
    "one column of a layer": (a_column_of_a_layer, "wrong. layer 2, column 1: "),
    "two ids exchanged in a layer": (two_ids_exchanged, "wrong. layer 2, expert [35]: "),
}
"""Changes true routes in place; where the gate finds it."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("wrong")
    sizes: dict[str, Any] = {"num_layers": 4, "num_experts": EXPERTS, "k": K, "vocab": VOCAB}
    save_tiny_moe(folder / "model", **sizes, dense_layers=DENSE)
    run_ranks(run_faults, 1, folder)
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


def gate(shared: dict[str, int], num_rows: int = sum(LENGTHS) - len(LENGTHS)) -> dict[int, float]:
    """Overlap by layer, once the gate has let it pass."""
    none = torch.zeros(0)
    by_layer = {int(layer): count for layer, count in shared.items()}
    agreement = Agreement(num_rows, by_layer, {}, (), (), flipped=none, first_flip=none)
    check_overlap(agreement, K, EXPERTS, MIN_OVERLAP)
    return {layer: count / (num_rows * K) for layer, count in by_layer.items()}


def test_true_routes_pass(found: dict[str, Any]) -> None:
    assert gate(found["true"]) == dict.fromkeys(MOE, 1.0)


def test_nearly_the_same_weights_pass(found: dict[str, Any]) -> None:
    """An engine's rounding, or one update: the gate is no test of equality."""
    overlap = gate(found["nearly the same weights"])
    assert 0.9 < min(overlap.values()) < 1.0


@pytest.mark.parametrize("fault", [*FAULTS, STALE])
def test_a_fault_trips_the_gate(found: dict[str, Any], fault: str) -> None:
    shared, owed = found[fault], K * (sum(LENGTHS) - len(LENGTHS))
    below = [layer for layer, count in shared.items() if count < MIN_OVERLAP * owed]
    with pytest.raises(
        RuntimeError, match=rf"layer {below[0]}: native routing shares 0\."
    ) as error:
        gate(shared)
    assert f"routing_replay.min_overlap={MIN_OVERLAP}" in str(error.value)
    assert "chance is 0.250" in str(error.value)


def test_every_fault_is_well_formed_and_changes_most_rows() -> None:
    """Otherwise something else would stop it, or there would be nothing to find."""
    n = sum(LENGTHS)
    routes = torch.rand(n, len(MOE), EXPERTS, generator=torch.Generator().manual_seed(0))
    true = routes.topk(K).indices.to(torch.uint8)
    for name, put in FAULTS.items():
        wrong = put(true)
        assert wrong.shape == true.shape and wrong.dtype == true.dtype, name
        assert (num_shared(wrong.long(), wrong.long()) == K).all(), name
        assert ((wrong != true).any(2).float().mean(0) > 0.4).any(), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_engine_that_rounds_passes(found: dict[str, Any], precision: str) -> None:
    measured = found["tenths"][precision]["none"]
    assert measured["wrong"] is None
    assert measured["wide"] < 1e-3
    # It does round, so there is something to tell faults from.
    assert (measured["overlap"] < 1.0) == (precision != "fp32")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fault", TENTHS)
def test_a_tenth_of_a_fault_is_found_and_located(
    found: dict[str, Any], fault: str, precision: str
) -> None:
    measured = found["tenths"][precision][fault]
    assert re.search(TENTHS[fault][1], measured["wrong"] or "passed"), measured
    if "column" not in fault:  # one of two experts: the mean sees that, too
        assert measured["overlap"] > MIN_OVERLAP


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("refs swapped", "sample 0, routes by test at weight version 5: .* for other tokens"),
        ("refs of other weights", "sample 1, .*version 4: its tokens were sampled at .* version 5"),
        ("blocks swapped", "routes, block 0, rows 0 to 29: checksum"),
        ("rows of an object shifted", "routes, block 0, rows 0 to 29: checksum"),
        ("mixed up in the worker", r"scoring the policy, sample 0 .*layers \[1\]: .*other experts"),
        ("one expert changed in the worker", r"sample 2 .*layers \[2, 3\]: .*other experts"),
        ("in the update", r"the update, sample 0 by .*layers \[1\]: .*other experts"),
    ],
)
def test_checksums_stop_what_was_mixed_up_on_the_way(
    found: dict[str, Any], fault: str, answer: str
) -> None:
    with pytest.raises(RuntimeError, match=answer):
        raise RuntimeError(found["errors"][fault])


def test_an_update_repeats_what_was_recorded(found: dict[str, Any]) -> None:
    """With ``fallback=r2``, in rows without a captured route, whose stored experts mean nothing."""
    repeated = found["fallback=r2"]
    assert repeated["stored is recorded"] is False
    assert repeated["scored again"] == "" and repeated["moved"] < 1e-6
    assert repeated["update"] == ""
    assert re.search(r"the update, sample 0 .*rows 5 to 8: .*pass recorded", repeated["changed"])


def test_true_refs_pass_every_checksum(found: dict[str, Any]) -> None:
    assert found["errors"]["none"] == ""
    assert gate(found["true refs"]) == dict.fromkeys(MOE, 1.0)


def test_what_the_engine_itself_mixed_up_is_for_the_gate(found: dict[str, Any]) -> None:
    """Its checksums are those of what it sent, so they agree; the gate does not."""
    assert found["errors"]["swapped by the engine"] == ""
    assert found["swapped by the engine"] == found["two samples swapped"]


def test_a_reference_is_scored_on_the_actors_routes_where_asked(found: dict[str, Any]) -> None:
    """Only then does it equal the actor before the first update; neither touches the other."""
    reference = found["reference"]
    assert reference["replayed"] < 1e-6, "same weights, same routes"
    assert reference["native"] > 0.1
    assert reference["native of the actor, before and after"] == 0.0


# On the rank


def run_faults(rank: int, folder: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    cpu = torch.device("cpu")
    config = Config.model_validate({"algorithm": {"kl": {"coef": 0.1}}})
    worker = PolicyWorker(config, rank, rendezvous(folder, "one"), str(folder / "model"), cpu)
    found = _gated(worker) | {"tenths": _tenths(worker)} | {"reference": _reference(worker)}
    with pytest.MonkeyPatch.context() as patch:
        # The store itself is tested with Ray in tests/integration/test_route_store.py.
        patch.setattr(
            "rltrain.policy.passes.fetch_routes.ray.get",
            lambda held, timeout: [h.array for h in held],
        )
        found |= _checked(worker)
    destroy_mesh()
    (folder / "found.json").write_text(json.dumps(found))


def _batch() -> Batch:
    lens = torch.tensor(LENGTHS)
    n = int(lens.sum())
    return Batch(
        tokens=torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(0)),
        seq_lens=lens,
        response_mask=torch.ones(n, dtype=torch.bool),
        loss_weights=torch.ones(n) / n,
        weight_version=torch.full((len(lens),), VERSION),
        route_mask=~last_rows(lens),
    )


PLAN = [[0, 2], [1]]


@dataclass(frozen=True, eq=False)
class Held:
    """Stands for a reference into an object store."""

    array: RouteIds

    def hex(self) -> str:
        return str(id(self))


def _native_routes(worker: Any) -> Tensor:
    worker.begin_step(_batch())
    worker.score(PLAN, routing="native", record=True)
    return worker.recorded_routes


def _measured(worker: Any, routes: Any) -> dict[int, int]:
    """Begin a step with ``routes``; how much every layer natively shares with ``routes``."""
    worker.begin_step(_batch().with_fields(rollout_expert_indices=routes))
    return worker.score(PLAN, routing="rollout", measure=True).agreement.shared


def _gated(worker: Any) -> dict[str, Any]:
    """With routes as tensors, which bring no checksums."""
    from rltrain.policy.megatron.megatron_model import decoder_routers

    true = _native_routes(worker)
    found = {"true": _measured(worker, true)}
    found |= {name: _measured(worker, put(true)) for name, put in FAULTS.items()}
    weights = [router.weight for router in decoder_routers(worker.chunks[0]).values()]
    kept = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(1)
    for name, scale in (("nearly the same weights", 0.02), (STALE, 2.0)):
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                noise = torch.randn(weight.shape, generator=generator) * value.std()
                weight.copy_(value + scale * noise)
        found[name] = _measured(worker, true)
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    return found


def _tenths(worker: Any) -> dict[str, Any]:
    """By the engine's precision and by fault: what the gate says, and what the mean sees."""
    lens = torch.full((MANY,), LENGTH)
    n = MANY * LENGTH
    batch = Batch(
        tokens=torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(5)),
        seq_lens=lens,
        response_mask=torch.ones(n, dtype=torch.bool),
        route_mask=~last_rows(lens),
    )
    plan = [list(range(first, first + 16)) for first in range(0, MANY, 16)]
    found: dict[str, Any] = {}
    for name, dtype in PRECISIONS.items():
        true = _engine_routes(worker, batch, plan, dtype)
        found[name] = {"none": _judged(worker, batch, plan, true)}
        for fault, (put, _) in TENTHS.items():
            routes = true.clone()
            put(routes.view(MANY, LENGTH, len(MOE), K)[:, :-1])
            found[name][fault] = _judged(worker, batch, plan, routes)
    return found


def _engine_routes(worker: Any, batch: Batch, plan: Any, dtype: torch.dtype) -> Tensor:
    """The native routes of a worker whose matrices are rounded, but for the router's."""
    rounded = {
        name: parameter
        for name, parameter in worker.chunks[0].named_parameters()
        if parameter.dim() > 1 and "router" not in name
    }
    kept = {name: parameter.detach().clone() for name, parameter in rounded.items()}
    with torch.no_grad():
        for parameter in rounded.values():
            scale = parameter.abs().amax() / 448 if dtype.itemsize == 1 else 1.0
            parameter.copy_((parameter / scale).to(dtype).to(parameter.dtype) * scale)
        worker.begin_step(batch)
        worker.score(plan, routing="native", record=True)
        for name, parameter in rounded.items():
            parameter.copy_(kept[name])
    routes: Tensor = worker.recorded_routes
    return routes


def _judged(worker: Any, batch: Batch, plan: Any, routes: Tensor) -> dict[str, Any]:
    batch = batch.with_fields(rollout_expert_indices=routes)
    worker.begin_step(batch)
    agreement = worker.score(plan, routing="rollout", measure=True).agreement
    noise = noise_scales(agreement)
    flips = worker.wide_flips(narrow_bins(agreement, noise))
    return {
        "wrong": wrong_routes(batch, agreement, flips, K),
        "wide": flip_metrics(agreement, noise, flips)["routing/wide_flip_fraction"],
        "overlap": min(agreement.shared.values()) / (agreement.num_rows * K),
    }


def _reference(worker: Any) -> dict[str, float]:
    wrong = swapped(_native_routes(worker))
    worker.begin_step(_batch().with_fields(rollout_expert_indices=wrong))

    def score(routing: str, of: str = "policy") -> Tensor:
        logprobs: Tensor = worker.score(PLAN, routing=routing, of=of).logprobs
        return logprobs

    actor, native = score("rollout"), score("native")
    replayed, natively = score("rollout", "reference"), score("native", "reference")
    return {
        "replayed": float((replayed - actor).abs().max()),
        "native": float((natively - actor).abs().max()),
        "native of the actor, before and after": float((score("native") - native).abs().max()),
    }


def _checked(worker: Any) -> dict[str, Any]:
    """With routes as references to objects, and the trace on."""
    true = _native_routes(worker)
    worker.config = Config.model_validate({"routing_replay": {"mode": "r3", "trace": True}})
    refs = _refs(true)
    first, second, third = refs
    exchanged = (_with(first, blocks=second[0].blocks), second, third)
    late = _refs(FAULTS["rows one late"](true))
    shifted = (_with(first, blocks=late[0][0].blocks), second, third)
    one_expert = true.clone()
    other = next(e for e in range(EXPERTS) if e not in true[-2, 1])
    one_expert[-2, 1, 1] = other  # in the last captured row, layer 2
    found = {
        "true refs": _measured(worker, refs),
        "swapped by the engine": _measured(worker, _refs(swapped(true))),
    }
    errors = {
        "none": _error(lambda: _measured(worker, refs)),
        "swapped by the engine": _error(lambda: _measured(worker, _refs(swapped(true)))),
        "refs swapped": _error(lambda: _measured(worker, (second, first, third))),
        "refs of other weights": _error(
            lambda: _measured(worker, (first, _with(second, weight_version=4), third))
        ),
        "blocks swapped": _error(lambda: _measured(worker, exchanged)),
        "rows of an object shifted": _error(lambda: _measured(worker, shifted)),
        "mixed up in the worker": _error(lambda: _mixed_up(worker, refs, swapped(true))),
        "one expert changed in the worker": _error(lambda: _mixed_up(worker, refs, one_expert)),
        "in the update": _error(lambda: _mixed_up(worker, refs, swapped(true), update=True)),
    }
    return found | {"errors": errors, "fallback=r2": _repeated(worker, true)}


def _repeated(worker: Any, true: Tensor) -> dict[str, Any]:
    replay = {"mode": "r3", "trace": True, "fallback": "r2"}
    worker.config = Config.model_validate({"routing_replay": replay})
    stored = true.clone()
    stored[slice(*GAP)] = garbage(GAP[1] - GAP[0])[:, None]
    refs = _refs(stored)
    mask = ~last_rows(torch.tensor(LENGTHS))
    mask[slice(*GAP)] = False
    refs = (_with(refs[0], missing=(GAP,)), *refs[1:])
    worker.begin_step(_batch().with_fields(rollout_expert_indices=refs, route_mask=mask))
    first = worker.score(PLAN, routing="rollout", record=True).logprobs
    found = {"stored is recorded": torch.equal(worker.recorded_routes[:-1], stored[:-1])}
    again: list[Tensor] = []
    found["scored again"] = _error(
        lambda: again.append(worker.score(PLAN, routing="rollout").logprobs)
    )
    found["moved"] = float((again[0] - first).abs().max()) if again else torch.inf
    fields = {name: torch.zeros(sum(LENGTHS)) for name in ("old_logprobs", "advantages")}
    update = partial(worker.update, PLAN, fields, routing="rollout")
    found["update"] = _error(update)
    # As if what was sent to the device before were used again: it is of the same shape.
    worker._on_device = lambda _: stored
    found["changed"] = _error(update)
    del worker._on_device
    return found


GAP = (5, 9)
"""Rows of the first sample whose routes are missing."""


def _refs(routes: Tensor) -> tuple[SampleRoutes, ...]:
    """What an engine that captured ``routes`` sends: a block of layer 1, one of layers 2 and 3."""
    shape = RouteShape(len(DENSE) + len(MOE), MOE, EXPERTS, K)
    tokens = _batch().tokens.split(list(LENGTHS))
    checked = [
        CheckedRoutes(rows[:-1].numpy(), token_checksum(read.numpy()))
        for rows, read in zip(routes.split(list(LENGTHS)), tokens, strict=True)
    ]
    refs = []
    for sample in checked:  # an object of its own each, so that they can be exchanged
        objects, (ref,) = pack_routes([sample], shape, (1, 2), VERSION, "test")
        refs.append((replace(ref, blocks=tuple(map(Held, objects))),))
    return tuple(refs)


def _with(routes: SampleRoutes, **values: Any) -> SampleRoutes:
    (ref,) = routes
    return (replace(ref, **values),)


def _mixed_up(worker: Any, refs: Any, routes: Tensor, *, update: bool = False) -> None:
    """A fault behind the boundary: the shard's routes become others after they were checked."""
    worker.begin_step(_batch().with_fields(rollout_expert_indices=refs))
    worker.shard = worker.shard.with_fields(rollout_expert_indices=routes)
    if not update:
        worker.score(PLAN, routing="rollout")
        return
    zeros = torch.zeros(sum(LENGTHS))
    fields = {"old_logprobs": zeros, "advantages": zeros}
    worker.update(PLAN, fields, routing="rollout")


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""

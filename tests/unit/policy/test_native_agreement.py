"""What a worker measures, against a count over rows, layers and experts one by one."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.batch import Batch
from rltrain.policy.passes.native_agreement import agree
from rltrain.policy.passes.passes import Recorded
from rltrain.policy.types import NO_FLIP, NUM_PARTS, Agreement
from rltrain.routing.agreement import num_shared
from rltrain.routing.codec import decode, encode

K = 2


def case(
    lens: list[int], layers: tuple[int, ...], num_experts: int, seed: int
) -> tuple[Batch, Recorded]:
    """Routes that differ in about half of all rows and layers; some rows are missing."""
    rng = np.random.default_rng(seed)
    n, num_layers = sum(lens), len(layers)

    def draw() -> np.ndarray:
        return rng.random((n, num_layers, num_experts)).argsort(-1)[..., :K]

    captured = draw()
    native = np.where(rng.random((n, num_layers, 1)) < 0.5, captured[..., ::-1], draw())
    mask = torch.from_numpy(rng.random(n) < 0.8)
    mask[torch.tensor(lens).cumsum(0) - 1] = False
    stored = [torch.from_numpy(encode(ids, num_experts)) for ids in (captured, native)]
    batch = Batch(
        tokens=torch.zeros(n, dtype=torch.int64),
        seq_lens=torch.tensor(lens),
        response_mask=torch.from_numpy(rng.random(n) < 0.7),
        rollout_expert_indices=stored[0],
        route_mask=mask,
    )
    mass = torch.from_numpy(rng.random((n, num_layers))).float()
    return batch, Recorded(
        native=stored[1],
        used=stored[0],
        gate_mass=mass,
        margin=torch.full_like(mass, torch.nan),
        tokens=batch.tokens,
    )


def counted(
    batch: Batch, recorded: Recorded, layers: tuple[int, ...], num_layers: int
) -> Agreement:
    routes, mask = batch.require("rollout_expert_indices", "route_mask")
    captured, native = decode(routes).tolist(), decode(recorded.native).tolist()
    shared, mass = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0.0)
    rows_of, shared_of = [0] * NUM_PARTS, [0] * NUM_PARTS
    flipped, first = [], []
    for start, end in pairwise(batch.offsets.tolist()):
        differing = []  # of the rows of this sample: layers that differ
        for row in range(start, end):
            part = (row - start) * NUM_PARTS // (end - start)
            differing.append([])
            rows_of[part] += bool(mask[row])
            for i, layer in enumerate(layers if mask[row] else ()):
                same = len(set(captured[row][i]) & set(native[row][i]))
                shared[layer] += same
                shared_of[part] += same
                mass[layer] += float(recorded.gate_mass[row, i])
                if same < K:
                    differing[-1].append(layer)
            first.append(min(differing[-1], default=NO_FLIP))
        for t in range(end - start):
            earlier = [layer for row in differing[:t] for layer in row if layer < num_layers - 1]
            flipped.append(bool(earlier) or (t > 0 and bool(differing[t - 1])))
    return Agreement(
        num_rows=int(mask.sum()),
        shared=shared,
        gate_mass=pytest.approx(mass, rel=1e-4),
        part_rows=tuple(rows_of),
        part_shared=tuple(shared_of),
        flipped=torch.tensor(flipped),
        first_flip=torch.tensor(first),
    )


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([(), (0,), (1, 2), (0, 2, 3), (3,)]),
    st.sampled_from([4, 256, 300]),
    st.integers(0, 1000),
)
@example([1, 1], (0,), 4, 0)  # no row owes a route
@example([5, 3], (), 4, 0)  # a stage of dense layers
@example([9, 4], (2, 3), 300, 1)  # ids that take two bytes; the model's last layer
def test_agree_counts(lens: list[int], layers: tuple[int, ...], experts: int, seed: int) -> None:
    batch, recorded = case(lens, layers, experts, seed)
    found = agree(batch, recorded, layers, num_layers=4, num_experts=experts)
    expected = counted(batch, recorded, layers, num_layers=4)
    assert torch.equal(found.flipped, expected.flipped)
    assert torch.equal(found.first_flip, expected.first_flip)
    for name in ("num_rows", "shared", "gate_mass", "part_rows", "part_shared"):
        assert getattr(found, name) == getattr(expected, name), name
    routes, mask = batch.require("rollout_expert_indices", "route_mask")
    for i, layer in enumerate(layers):
        rows = decode(routes)[mask & batch.response_mask, i].flatten().tolist()
        assert found.load[layer].tolist() == [rows.count(e) for e in range(experts)]


def test_rows_without_a_route_hide_nothing_and_add_nothing() -> None:
    """What is stored in a missing row is arbitrary: other experts there change no number."""
    batch, recorded = case([9, 7], (0, 2), 8, seed=3)
    routes, mask = batch.require("rollout_expert_indices", "route_mask")
    assert not mask[:-1].all()
    other = torch.where(mask.view(-1, 1, 1), routes, (routes + 1) % 8)
    found = agree(batch, recorded, (0, 2), 4, 8)
    again = agree(batch.with_fields(rollout_expert_indices=other), recorded, (0, 2), 4, 8)
    assert found.shared == again.shared and found.part_shared == again.part_shared
    assert torch.equal(found.flipped, again.flipped)
    assert torch.equal(found.first_flip, again.first_flip)


def test_the_case_is_a_hard_one() -> None:
    batch, recorded = case([9, 7, 8], (0, 2), 8, seed=0)
    (routes,) = batch.require("rollout_expert_indices")
    same = num_shared(decode(recorded.native), decode(routes))
    assert {0, 1, 2} <= set(same.flatten().tolist())

"""Where layers live. Equality with Megatron is held by tests/distributed/test_parallel_state.py."""

from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.parallel.layer_map import Pipeline, route_blocks, route_layers


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipeline, int]:
    """A pipeline and a number of layers that it can share out."""
    stages = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 4)) if stages > 1 else 1
    share = chunks * draw(st.integers(1, 3))
    layers, ends = [share] * stages, [None, None]
    for end, stage in enumerate((0, -1)):
        if stages > 1 and draw(st.booleans()) and not (stages == 2 and chunks > 1 and ends[0]):
            layers[stage] = ends[end] = chunks * draw(st.integers(1, 3))
    return Pipeline(stages, chunks, *ends), sum(layers)


def in_forward_order(pipeline: Pipeline, num_layers: int) -> list[range]:
    return [
        pipeline.chunk_layers(num_layers, stage, chunk)
        for chunk in range(pipeline.chunks)
        for stage in range(pipeline.stages)
    ]


@given(pipelines())
@example((Pipeline(2, 1, 13), 27))
@example((Pipeline(2, 1, 13, 14), 27))
@example((Pipeline(2, 2, 2), 8))
@example((Pipeline(4, 2, 2, 6), 16))
def test_layers_in_forward_order_are_all_layers(case: tuple[Pipeline, int]) -> None:
    pipeline, num_layers = case
    pipeline.check(num_layers)
    chunks = in_forward_order(pipeline, num_layers)
    assert [layer for chunk in chunks for layer in chunk] == list(range(num_layers))
    assert all(chunks)


@given(pipelines())
@example((Pipeline(3, 2), 12))
@example((Pipeline(4, 2, 2, 6), 16))
def test_a_stage_has_its_share(case: tuple[Pipeline, int]) -> None:
    pipeline, num_layers = case
    stages = [pipeline.stage_layers(num_layers, stage) for stage in range(pipeline.stages)]
    assert all(list(layers) == sorted(layers) for layers in stages)
    if pipeline.first_stage_layers is not None:
        assert len(stages.pop(0)) == pipeline.first_stage_layers
    if pipeline.last_stage_layers is not None:
        assert len(stages.pop()) == pipeline.last_stage_layers
    assert len({len(layers) for layers in stages}) <= 1


def test_chunks_of_a_stage_are_interleaved() -> None:
    assert Pipeline(2, 2).stage_layers(8, 0) == (0, 1, 4, 5)
    assert Pipeline(2, 2).chunk_layers(8, 1, 0) == range(2, 4)
    assert Pipeline(2, 4).stage_layers(8, 1) == (1, 3, 5, 7)
    assert Pipeline(2, 2, first_stage_layers=2).stage_layers(8, 1) == (1, 2, 3, 5, 6, 7)


@given(pipelines(), st.data())
def test_blocks_are_cut_where_chunks_are(case: tuple[Pipeline, int], data: st.DataObject) -> None:
    pipeline, num_layers = case
    moe_layers = sorted(data.draw(st.sets(st.integers(0, num_layers - 1))))
    sizes = route_blocks(pipeline, num_layers, moe_layers)
    ends = list(accumulate(sizes))
    blocks = [tuple(moe_layers[end - n : end]) for n, end in zip(sizes, ends, strict=True)]
    owned = [[n for n in moe_layers if n in x] for x in in_forward_order(pipeline, num_layers)]
    assert blocks == [tuple(layers) for layers in owned if layers]
    for stage in range(pipeline.stages):
        mine = route_layers(pipeline, num_layers, moe_layers, stage)
        of_blocks = [b for b in blocks if b[0] in pipeline.stage_layers(num_layers, stage)]
        assert mine == tuple(layer for block in of_blocks for layer in block)
        of_chunks = [
            route_layers(pipeline, num_layers, moe_layers, stage, chunk)
            for chunk in range(pipeline.chunks)
        ]
        assert mine == sum(of_chunks, ())


@pytest.mark.parametrize(
    ("pipeline", "num_layers", "moe_layers", "blocks"),
    [
        (Pipeline(), 48, range(48), (48,)),
        (Pipeline(2, first_stage_layers=14), 27, range(1, 27), (13, 13)),
        (Pipeline(2, last_stage_layers=14), 27, range(27), (13, 14)),
        (Pipeline(2, last_stage_layers=14), 27, range(1, 27), (12, 14)),
        (Pipeline(2, 2), 8, range(3, 8), (1, 2, 2)),  # chunk 0 of stage 0 is dense
        (Pipeline(4), 8, (0, 7), (1, 1)),
        (Pipeline(4), 8, (), ()),
    ],
)
def test_block_sizes(
    pipeline: Pipeline, num_layers: int, moe_layers: range, blocks: tuple[int, ...]
) -> None:
    assert route_blocks(pipeline, num_layers, moe_layers) == blocks


@pytest.mark.parametrize(
    ("pipeline", "num_layers", "message"),
    [
        (Pipeline(4), 27, r"policy\.parallel\.pp=4: .* other 4 stages .* 27 decoder layers"),
        (Pipeline(0), 8, r"policy\.parallel\.pp: expected at least 1, found 0"),
        (Pipeline(2, 0), 8, r"policy\.parallel\.vpp: expected at least 1, found 0"),
        (Pipeline(2, 1, 0), 8, r"policy\.parallel\.first_stage_layers: expected at least 1"),
        (Pipeline(2, 1, None, -1), 8, r"policy\.parallel\.last_stage_layers: expected at least 1"),
        (Pipeline(3, 1, 8), 8, r"after policy\.parallel\.first_stage_layers=8 evenly, found 0"),
        (Pipeline(3, 1, 10), 8, "found -2"),
        (Pipeline(3, 1, 2), 7, "found 5"),
        (Pipeline(2, 1, 3, 4), 8, "found 1"),
        (Pipeline(2, 3), 8, r"policy\.parallel\.vpp=3: .* found 4 on a stage by .*\.pp"),
        (Pipeline(2, 2, 3), 7, r"vpp=2: .* found 3 on a stage by .*\.first_stage_layers"),
        (Pipeline(1, 2), 8, r"pp=1 is one stage with all layers, found vpp beside it"),
        (Pipeline(1, 1, 8), 8, "found first_stage_layers beside it"),
        (Pipeline(2, 2, 4, 4), 8, "expected one of first_stage_layers and last_stage_layers"),
    ],
)
def test_refusals_name_the_key(pipeline: Pipeline, num_layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline.check(num_layers)
    with pytest.raises(ValueError, match=message):
        pipeline.chunk_layers(num_layers, 0)

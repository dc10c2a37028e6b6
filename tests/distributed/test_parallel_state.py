"""Where tokens and layers live, against Megatron's own answers: its process groups, layer offsets,
sequence-parallel slices and the positions its rotary embedding assumes."""

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.parallel.layer_map import Pipeline
from rltrain.parallel.token_layout import PAD, TokenGrid, layout_tokens
from tests.distributed.run_ranks import rendezvous, run_ranks

pytestmark = pytest.mark.integration
WORLD_SIZE, NUM_LAYERS = 4, 8
SEQ_LENS = [5, 1, 0, 11, 16]


@dataclass(frozen=True)
class Case:
    """A grid of 4 ranks; the data-parallel size is what is left over."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    align: int = 1
    pipeline: Pipeline = field(default_factory=Pipeline)

    def grid(self, tp_rank: int = 0, cp_rank: int = 0) -> TokenGrid:
        return TokenGrid(self.tp, tp_rank, self.cp, cp_rank, self.align)


CASES = {
    "dp": Case(),
    "tp": Case(tp=4, align=16),
    "cp": Case(cp=4),
    "tp cp": Case(tp=2, cp=2, align=3),
    "ep": Case(ep=4),
    "tp ep": Case(tp=2, ep=2),
    "etp": Case(tp=2, etp=2),
    "pp even": Case(pipeline=Pipeline(4)),
    "pp uneven first": Case(pipeline=Pipeline(4, first_stage_layers=5)),
    "pp uneven last": Case(pipeline=Pipeline(4, last_stage_layers=5)),
    "pp uneven both": Case(pipeline=Pipeline(4, first_stage_layers=1, last_stage_layers=3)),
    "vpp": Case(pipeline=Pipeline(4, 2)),
    "vpp uneven": Case(tp=2, pipeline=Pipeline(2, 2, first_stage_layers=2)),
    "cp pp": Case(cp=2, align=16, pipeline=Pipeline(2)),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What Megatron says on every rank, by case."""
    folder = tmp_path_factory.mktemp("parallel_state")
    run_ranks(ask_megatron, WORLD_SIZE, folder, timeout_s=480)
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {name: [answers[name] for answers in by_rank] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_layers_equal_megatron(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    pipeline, visited = CASES[name].pipeline, []
    for rank in found[name]:
        for chunk, (offset, size, is_first, is_last) in enumerate(rank["chunks"]):
            layers = pipeline.chunk_layers(NUM_LAYERS, rank["pp"], chunk)
            assert layers == range(offset, offset + size)
            assert (0 in layers) == is_first and (NUM_LAYERS - 1 in layers) == is_last
            visited += layers
    replicas = WORLD_SIZE // pipeline.stages
    assert Counter(visited) == dict.fromkeys(range(NUM_LAYERS), replicas)


@pytest.mark.parametrize("name", CASES)
def test_slots_equal_megatron(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    starts = [sum(SEQ_LENS[:i]) for i in range(len(SEQ_LENS))]
    for rank in found[name]:
        layout = layout_tokens(SEQ_LENS, CASES[name].grid(rank["tp"], rank["cp"]))
        sizes = layout.cu_seqlens.diff() // CASES[name].cp
        sequences = torch.arange(len(SEQ_LENS)).repeat_interleave(sizes).tolist()
        expected = [
            starts[i] + position if position < SEQ_LENS[i] else PAD
            for i, position in zip(sequences, rank["positions"], strict=True)
        ]
        assert layout.tokens.tolist() == expected
        assert layout.routers.tolist() == [expected[slot] for slot in rank["sequence_parallel"]]
        assert len(layout.routers) % CASES[name].align == 0


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_routed_once_per_stage(
    found: dict[str, list[dict[str, Any]]], name: str
) -> None:
    case = CASES[name]
    rows = []
    for rank in found[name]:
        routers = layout_tokens(SEQ_LENS, case.grid(rank["tp"], rank["cp"])).routers
        rows.append([(rank["dp"], t) for t in routers.tolist() if t != PAD])
    dp = WORLD_SIZE // (case.tp * case.cp * case.pipeline.stages)
    tokens = product(range(dp), range(sum(SEQ_LENS)))
    assert Counter(chain(*rows)) == dict.fromkeys(tokens, case.pipeline.stages)
    for rank in found[name]:
        together = Counter(chain(*(rows[peer] for peer in rank["experts"])))
        assert set(together.values()) <= {1}, "an expert would see a token twice"


def test_contiguous_chunks_are_not_what_megatron_assumes(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """So `zigzag` cannot be switched off under Megatron's rotary embedding."""
    rank = next(rank for rank in found["cp"] if rank["cp"] == 1)
    layout = layout_tokens(SEQ_LENS, TokenGrid(1, 0, 4, 1, zigzag=False))
    megatron = layout_tokens(SEQ_LENS, TokenGrid(1, 0, 4, 1))
    assert len(megatron.tokens) == len(rank["positions"])
    assert not torch.equal(layout.tokens, megatron.tokens)


def test_every_small_pipeline_equals_megatron(tmp_path: Path) -> None:
    """Accepted and refused alike, without a process for every rank."""
    run_ranks(compare_pipelines, 1, tmp_path)


# On the ranks


def ask_megatron(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    store = rendezvous(folder, "world").join(rank, WORLD_SIZE, 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    answers = {}
    for name, case in CASES.items():
        chunks = case.pipeline.chunks
        state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pipeline.stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
            create_gloo_process_groups=False,
        )
        answers[name] = _this_rank(case)
        state.destroy_model_parallel()
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


def _this_rank(case: Case) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = _config(case.pipeline, NUM_LAYERS)
    chunks = []
    for chunk in range(case.pipeline.chunks):
        vp_stage = chunk if case.pipeline.chunks > 1 else None
        virtual: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        chunks.append(
            (
                get_transformer_layer_offset(config, vp_stage),
                get_num_layers_to_build(config, vp_stage),
                state.is_pipeline_first_stage(**virtual),
                state.is_pipeline_last_stage(**virtual),
            )
        )
    positions = _rotary_positions(case)
    slots = torch.arange(len(positions))
    return {
        "tp": state.get_tensor_model_parallel_rank(),
        "cp": state.get_context_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "experts": dist.get_process_group_ranks(state.get_expert_tensor_and_model_parallel_group()),
        "chunks": chunks,
        "positions": positions,
        "sequence_parallel": scatter_to_sequence_parallel_region(slots).tolist(),
    }


def _rotary_positions(case: Case) -> list[int]:
    """The position in its sequence that Megatron rotates each local slot by."""
    from megatron.core import parallel_state as state
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    layout = layout_tokens(SEQ_LENS, case.grid())  # its boundaries are the same on all ranks
    step = 1 / (layout.max_seqlen + 1)
    angles = step * torch.arange(layout.max_seqlen)
    x_axis = torch.tensor([1.0, 0.0]).expand(int(layout.cu_seqlens[-1]) // case.cp, 1, 2)
    rotated = _apply_rotary_pos_emb_thd(
        x_axis,
        layout.cu_seqlens,
        angles.view(-1, 1, 1, 1).expand(-1, 1, 1, 2),
        cp_group=state.get_context_parallel_group(),
    )
    return (torch.atan2(rotated[..., 1], rotated[..., 0]) / step).round().long().flatten().tolist()


def compare_pipelines(rank: int, folder: Path) -> None:
    some, accepted = [None, 1, 2, 3], 0
    for stages, chunks, first, last, layers in product(
        range(2, 5), range(1, 4), some, some, range(1, 14)
    ):
        pipeline = Pipeline(stages, chunks, first, last)
        expected = _megatron_layers(pipeline, layers)
        try:
            pipeline.check(layers)
            ours: list[range] | None = [
                pipeline.chunk_layers(layers, stage, chunk)
                for chunk in range(chunks)
                for stage in range(stages)
            ]
        except ValueError:
            ours = None
        assert ours == expected, (pipeline, layers, ours, expected)
        accepted += ours is not None
    assert accepted > 100


def _megatron_layers(pipeline: Pipeline, num_layers: int) -> list[range] | None:
    """In the order of the forward pass; None: refused, or a chunk would have no layer."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    found = []
    try:
        config = _config(pipeline, num_layers)
        for chunk, stage in product(range(pipeline.chunks), range(pipeline.stages)):
            vp_stage = chunk if pipeline.chunks > 1 else None
            size = get_num_layers_to_build(config, vp_stage, stage)
            start = get_transformer_layer_offset(config, vp_stage, stage)
            found.append(range(start, start + size))
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    return found if all(found) else None


def _config(pipeline: Pipeline, num_layers: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=pipeline.chunks if pipeline.chunks > 1 else None,
        num_layers_in_first_pipeline_stage=pipeline.first_stage_layers,
        num_layers_in_last_pipeline_stage=pipeline.last_stage_layers,
        pipeline_dtype=torch.float32,
    )

"""The layouts that are tested: which rows `rltrain verify` runs, and on which tiny models. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.layout_models import MODELS
from rltrain.weights.architecture.decoder import Architecture

# Two sequences a data-parallel rank of 4; the tokens of ranks and micro-batches differ widely.
SEQ_LENS = (3, 17, 5, 9, 2, 30, 1, 12)
MAX_TOKENS = 32


@dataclass(frozen=True)
class LayoutCase:
    """One row: a layout, what it runs with, and the model."""

    parallel: ParallelConfig
    model: str = "qwen3"
    num_layers: int = 4
    dense_layers: tuple[int, ...] = ()
    """Layers without a router, besides the model's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `PolicyConfig`: recomputation, dispatcher."""
    params: Literal["fp32", "bf16"] = "fp32"
    seq_lens: tuple[int, ...] = SEQ_LENS
    """Of the batch. Where they are fewer than the data-parallel ranks, some have none."""

    @property
    def alone(self) -> "LayoutCase":
        """What one rank computes the same as, in fp32: the reference."""
        one = ParallelConfig()
        return LayoutCase(
            one, self.model, self.num_layers, self.dense_layers, seq_lens=self.seq_lens
        )

    @property
    def arch(self) -> Architecture:
        arch = MODELS[self.model]
        first = min(arch.moe_layers)
        moe = [n for n in range(first, self.num_layers) if n not in self.dense_layers]
        return replace(arch, num_layers=self.num_layers, moe_layers=tuple(moe))

    @property
    def policy(self) -> PolicyConfig:
        return PolicyConfig.model_validate(
            {
                "parallel": self.parallel,
                "precision": {"params": self.params},
                "max_tokens_per_micro_batch": MAX_TOKENS,
                **self.options,
            }
        )

    @property
    def cells(self) -> dict[str, str]:
        """What the row states about itself."""
        p = self.parallel
        stages = {"pp": f"{p.pp}"}
        if p.first_stage_layers is not None:
            stages = {
                "pp": f"{p.pp} ({p.first_stage_layers}+{self.num_layers - p.first_stage_layers})"
            }
        recompute: str = self.policy.recompute
        if recompute == "selective":
            recompute = "+".join(self.policy.recompute_modules)
        elif recompute == "full" and self.policy.recompute_method == "block":
            recompute = f"block {self.policy.recompute_num_layers}"
        model = self.model
        if self.policy.transformer_engine == "never":
            model += ", torch"
        if self.dense_layers:
            model += f", dense {','.join(map(str, self.dense_layers))}"
        if self.seq_lens != SEQ_LENS:
            model += f", {len(self.seq_lens)} seq"
        return {
            "model": model,
            "layers": f"{self.num_layers}",
            "tp": f"{p.tp}",
            "etp": f"{p.etp}",
            "ep": f"{p.ep}",
            "cp": f"{p.cp}",
            **stages,
            "vpp": f"{p.vpp}",
            "dp": f"{p.dp}",
            "recompute": recompute,
            "dispatcher": self.policy.dispatcher,
        }

    @property
    def name(self) -> str:
        cells = " ".join(f"{key}={value}" for key, value in self.cells.items())
        return cells if self.params == "fp32" else f"{cells} params={self.params}"


Options = Mapping[str, Any]
NONE: Options = {}
FULL: Options = {"recompute": "full"}
MOE: Options = {"recompute": "selective", "recompute_modules": ["moe"]}
PARTS: Options = {"recompute": "selective", "recompute_modules": ["layernorm", "moe_act"]}
BLOCK: Options = {"recompute": "full", "recompute_method": "block"}


def _case(options: Options = NONE, *, num_layers: int = 4, **sizes: int) -> LayoutCase:
    return LayoutCase(ParallelConfig.model_validate(sizes), num_layers=num_layers, options=options)


LAYOUTS: tuple[LayoutCase, ...] = (
    _case(),
    _case(FULL),
    _case(MOE),
    _case(PARTS),
    _case(tp=2),
    _case(MOE, tp=2, etp=2),
    _case({"overlap_grad_reduce": True}, ep=2, dp=2),
    _case(tp=2, ep=2),
    _case(etp=2, ep=2, tp=2, dp=2),
    _case(FULL, cp=2),
    _case(cp=2, ep=2),
    _case({"dispatcher": "allgather"}, cp=2, tp=2, ep=2),
    _case(MOE, cp=2, tp=2),
    _case(tp=2, cp=2, ep=4),
    _case(cp=4),
    _case(FULL, pp=2),
    _case(MOE, pp=2, first_stage_layers=3, num_layers=7),
    replace(_case(pp=4), dense_layers=(0,)),
    _case(FULL, pp=2, vpp=2),
    _case({**MOE, "overlap_grad_reduce": True, "kept_softmax_gib": 1.0}, pp=2, vpp=2, dp=2, ep=2),
    _case(tp=2, pp=2, ep=2),
    _case(BLOCK, cp=2, pp=2),
    _case(FULL, cp=2, tp=2, pp=2),
    _case(dp=2, tp=2, ep=2),
    _case(dp=2, cp=2),
    _case(FULL, dp=2, cp=2, ep=4),
    replace(_case(dp=4, ep=4), seq_lens=(29, 30, 25)),
    replace(_case(FULL, dp=2, pp=2, ep=2), seq_lens=(30,)),
)
"""Each layout once. Together they have every kind of recomputation and both dispatchers."""


def whole_product(models: Sequence[str] = tuple(MODELS)) -> list[LayoutCase]:
    """Every layout with every model, recomputation and dispatcher that it allows."""
    layouts = {(c.parallel, c.num_layers, c.dense_layers, c.seq_lens) for c in LAYOUTS}
    in_order = sorted(layouts, key=lambda c: (c[0].world_size, repr(c)))
    cases = []
    for model, (parallel, num_layers, dense, seq_lens), recompute in product(
        models, in_order, (NONE, FULL, MOE, BLOCK)
    ):
        case = LayoutCase(parallel, model, num_layers, dense, recompute, seq_lens=seq_lens)
        if case.arch.linear_bias and (parallel.etp > 1 or dense):
            continue  # expert-tensor ranks would all add the biases; no such model has dense layers
        cases.append(case)
        experts_within_micro_batch = (parallel.tp * parallel.cp) % (parallel.ep * parallel.etp) == 0
        if not recompute and parallel.pp == 1 and experts_within_micro_batch:
            cases.append(replace(case, options={"dispatcher": "allgather"}))
    return cases

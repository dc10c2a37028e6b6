"""The memory of a rank in `rltrain plan` is what Megatron and the policy worker hold."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.verification.layout_models import DEEPSEEK_LIKE, LATENT, MODELS, QWEN3_LIKE
from rltrain.weights.architecture.decoder import Architecture
from tests.distributed.run_ranks import rendezvous, run_ranks

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    arch: Architecture
    parallel: dict[str, int]
    params: str = "fp32"
    freeze_router: bool = False
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        precision = {"params": self.params}
        policy = {"parallel": self.parallel, "precision": precision, **self.policy}
        optimizer = {"freeze_router": self.freeze_router}
        return Config.model_validate({"policy": policy, "optimizer": optimizer})


DENSE_FIRST = replace(QWEN3_LIKE, moe_layers=(1, 2, 3))
TIED = replace(QWEN3_LIKE, tie_embeddings=True)
STATES = {
    "tp2": Case(QWEN3_LIKE, {"tp": 2}, params="bf16"),
    "dp2 ep2, dense first": Case(DENSE_FIRST, {"dp": 2, "ep": 2}, params="bf16"),
    "tp2 etp2 dp2": Case(QWEN3_LIKE, {"tp": 2, "etp": 2, "dp": 2}),
    "pp2, tied": Case(TIED, {"pp": 2, "dp": 2}, freeze_router=True),
    "tied on one stage": Case(TIED, {"dp": 2}, params="bf16"),
    "pp2 uneven, shared expert": Case(
        DEEPSEEK_LIKE, {"pp": 2, "first_stage_layers": 1, "tp": 2, "ep": 2}
    ),
    "vpp2, latent": Case(LATENT, {"pp": 2, "vpp": 2}),
    "MTP, cp2": Case(MODELS["deepseek mtp"], {"pp": 2, "cp": 2}, params="bf16"),
    "gpt-oss": Case(MODELS["gpt-oss"], {"tp": 2, "ep": 2}),
}
# Large enough that activations and logits are most of what an update needs.
WIDE = replace(
    QWEN3_LIKE, hidden_size=128, head_dim=32, expert_size=96, ffn_size=256, max_positions=512
)
NO_SHARED = replace(DEEPSEEK_LIKE, hidden_size=128, head_dim=32, expert_size=96, ffn_size=256)
LATENT_WIDE = replace(
    LATENT, hidden_size=128, expert_size=96, ffn_size=256, shared_expert_size=64, max_positions=512
)


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": list(modules)}


PEAKS = {
    "none": Case(WIDE, {}),
    "none, shared expert": Case(replace(NO_SHARED, max_positions=512), {}),
    "none, latent": Case(LATENT_WIDE, {}),
    "full": Case(WIDE, {}, policy={"recompute": "full"}),
    "full by two": Case(WIDE, {}, policy={"recompute": "full", "recompute_num_layers": 2}),
    "block": Case(
        WIDE,
        {},
        policy={"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ),
    "moe": Case(WIDE, {}, policy=selective("moe")),
    "moe_act": Case(WIDE, {}, policy=selective("moe_act", "layernorm")),
    "core_attn": Case(WIDE, {}, policy=selective("core_attn")),
    "pp2": Case(WIDE, {"pp": 2}),
    "pp2 vpp2": Case(WIDE, {"pp": 2, "vpp": 2}),
    "vocabulary": Case(replace(WIDE, vocab_size=8192), {}, policy={"recompute": "full"}),
}
LENGTHS = (128, 96, 160, 128)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plan")
    run_ranks(measure, 4, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("case", STATES)
def test_parameters_gradients_and_optimizer_state_are_exact(
    measured: dict[str, dict[str, Any]], case: str
) -> None:
    """Names and sizes on every rank; Megatron's buffers to the byte; the state all ranks hold."""
    ranks = [found for name, found in measured.items() if name.startswith(f"{case}.rank")]
    assert len(ranks) == STATES[case].config.policy.parallel.world_size
    for rank in ranks:
        assert rank["found"] == rank["planned"]
        assert rank["state"] <= rank["planned state"] < rank["state"] + rank["slack"]
    assert sum(rank["state"] for rank in ranks) == sum(rank["share of the state"] for rank in ranks)


@pytest.mark.parametrize("case", PEAKS)
def test_activations_and_logits_are_near_the_peak_of_an_update(
    measured: dict[str, dict[str, Any]], case: str
) -> None:
    for stage in range(PEAKS[case].config.policy.parallel.pp):
        found = measured[f"{case}.peak{stage}"]
        assert 0.88 < found["planned"] / found["peak"] < 1.12, (stage, found)


# On the ranks


def measure(rank: int, folder: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh

    for kind, cases, of in (("rank", STATES, states_of), ("peak", PEAKS, peak_of)):
        for name, case in cases.items():
            parallel = case.config.policy.parallel
            if rank < parallel.world_size:
                init = rendezvous(folder, f"{kind} {name}")
                mesh = init_mesh(parallel, rank, parallel.world_size, init, CPU)
                (folder / f"{name}.{kind}{rank}.json").write_text(json.dumps(of(case, mesh)))
                destroy_mesh()


def build(case: Case, mesh: Any) -> tuple[Any, Any]:
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.policy.optimizer import build_optimizer

    config = case.config
    chunks = build_model(
        case.arch,
        config.policy,
        mesh,
        device=CPU,
        routing_replay=True,
        freeze_router=case.freeze_router,
    )
    optimizer, _ = build_optimizer(chunks, config.optimizer, config.policy.precision, CPU)
    return chunks, optimizer


def states_of(case: Case, mesh: Any) -> dict[str, Any]:
    from rltrain.planning.policy_memory import count, data_parallel, expert_data_parallel, states
    from rltrain.weights.mapping.grid import GridPosition
    from rltrain.weights.mapping.local_parameters import local_parameters
    from rltrain.weights.mapping.rank_share import rank_parameters

    chunks, optimizer = build(case, mesh)
    parallel, arch = case.config.policy.parallel, case.arch
    held = [
        each
        for chunk in range(parallel.vpp)
        for each in rank_parameters(arch, parallel, mesh.pp_rank, chunk, mesh.ep_rank)
    ]
    local = local_parameters(chunks, arch, GridPosition.of(mesh))
    dense = [buffer for chunk in chunks for buffer in chunk.buffers]
    experts = [buffer for chunk in chunks for buffer in chunk.expert_parallel_buffers]
    width = 2 if case.params == "bf16" else 4
    frozen = [p for chunk in chunks for p in chunk.parameters() if not p.requires_grad]
    buffers = [x for name, x in local.items() if name.endswith("router.expert_bias")]
    params = sum(x.nbytes for x in [b.param_data for b in (*dense, *experts)] + frozen + buffers)
    counts = count(case.config, arch, mesh.pp_rank)
    terms = {term.name: term.nbytes for term in states(case.config, counts, width)}
    sizes = {name: x.numel() for name, x in local.items()}
    moments = 8 if width == 4 else 12
    share = sum(b.numel_of_parameters / data_parallel(parallel) for b in map(_Buffer, dense)) + sum(
        b.numel_of_parameters / expert_data_parallel(parallel) for b in map(_Buffer, experts)
    )
    return {
        "found": [sizes, params, sum(b.grad_data.nbytes for b in (*dense, *experts))],
        "planned": [
            {each.name: each.numel for each in held},
            terms["parameters"],
            terms["gradients"],
        ],
        "state": state_bytes(optimizer),
        "planned state": terms["optimizer"],
        "slack": moments * (200 + 64 * len(sizes) + max(sizes.values())),
        "share of the state": share * moments,
    }


@dataclass(frozen=True)
class _Buffer:
    of: Any

    @property
    def numel_of_parameters(self) -> int:
        return sum(p.numel() for p in self.of.params)


def state_bytes(optimizer: Any) -> int:
    """Adam's moments and the fp32 masters, where these are no views of the parameters."""
    total = 0
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            total += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
        masters = [x for group in part.shard_fp32_from_float16_groups for x in group]
        total += sum(x.nbytes for x in masters if x is not None)
    return total


def peak_of(case: Case, mesh: Any) -> dict[str, Any]:
    """Micro-batches of equal length through forward and backward pass, as in an update."""
    from rltrain.algorithms.objective import Sums
    from rltrain.planning.policy_memory import passes
    from rltrain.policy.passes.micro_batch import MicroBatch, cut
    from rltrain.policy.passes.passes import ModelOnMesh, accumulate
    from rltrain.weights.mapping.seeded import fill_seeded
    from tests.distributed.live_bytes import LiveBytes

    def objective(mb: MicroBatch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Sums]:
        return (logprobs - 0.01 * entropy).mean(), Sums({}, {})

    chunks, _ = build(case, mesh)
    fill_seeded(chunks, case.arch, mesh)
    tokens = sum(LENGTHS)
    policy = {**case.config.policy.model_dump(), "max_tokens_per_micro_batch": tokens}
    lengths = {"data": {"max_prompt_tokens": 1}, "rollout": {"max_response_tokens": 1}}
    config = Config.model_validate({"policy": policy, **lengths})
    count = 2 * mesh.pp_size  # more than are in flight
    batch = Batch(
        tokens=torch.randint(case.arch.vocab_size, (tokens * count,)),
        seq_lens=torch.tensor(LENGTHS * count),
        response_mask=torch.ones(tokens * count, dtype=torch.bool),
    )
    size = len(LENGTHS)
    cuts = [list(range(size * i, size * (i + 1))) for i in range(count)]
    cuts = cut(batch, cuts, mesh.token_grid, CPU)
    model = ModelOnMesh(chunks, case.arch, mesh, config.policy, 1.0)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with LiveBytes() as bytes_:
        accumulate(model, cuts, objective, replay=False)
    terms = passes(config, case.arch, mesh.pp_rank, 4)
    return {
        "peak": bytes_.peak,
        "planned": sum(term.nbytes for term in terms),
        "terms": {term.name: term.nbytes for term in terms},
    }

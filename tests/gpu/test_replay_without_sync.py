"""No router makes the CPU wait for the GPU, whatever it replays, recomputed or not.

    python tests/gpu/test_replay_without_sync.py        # where there is no pytest

`torch.cuda.set_sync_debug_mode` makes every synchronising call an error; it is on from each
router's first operation to its last. The rest of a layer has syncs of Megatron's own: an
all-to-all has to know how many tokens each expert gets.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import random_model
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import pack_micro_batches
from rltrain.routing.align import last_rows

LENGTHS, BUDGET = (300, 200, 97, 203), 512
LAYERS, EXPERTS, K, VOCABULARY = 3, 16, 4, 512
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "num_experts": EXPERTS,
    "num_experts_per_tok": K,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


def batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    lens = torch.tensor(LENGTHS)
    n = int(lens.sum())
    first = torch.zeros(n, dtype=torch.bool)
    first[lens.cumsum(0) - lens] = True
    routes = torch.rand(n, LAYERS, EXPERTS, generator=draw).topk(K).indices.to(torch.uint8)
    return Batch(
        tokens=torch.randint(VOCABULARY, (n,), generator=draw),
        seq_lens=lens,
        response_mask=~first,
        old_logprobs=torch.full((n,), -6.0).where(~first, 0.0),
        advantages=torch.randn(n, generator=draw),
        loss_weights=(~first).float() / (~first).sum(),
        rollout_expert_indices=routes,
        route_mask=~last_rows(lens),
    )


@contextmanager
def no_sync_in(routers: dict[int, Any], seen: list[int]) -> Iterator[None]:
    """Makes a sync in a router an error, and counts the routers' forward passes."""

    def begin(module: Any, args: Any) -> None:
        seen.append(module.layer_number)
        torch.cuda.set_sync_debug_mode("error")

    def end(module: Any, args: Any, output: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    handles = [router.register_forward_pre_hook(begin) for router in routers.values()]
    handles += [router.register_forward_hook(end) for router in routers.values()]
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for handle in handles:
            handle.remove()


def run(folder: Path) -> None:
    from rltrain.patches.megatron import patch_megatron
    from rltrain.policy.ranks import rendezvous
    from rltrain.policy.worker import PolicyWorker

    patch_megatron()
    random_model(folder / "model", SHAPE)
    for recompute in ("none", "full"):
        config = Config.model_validate(
            {
                "cluster": {"device": "cuda"},
                "routing_replay": {"mode": "r3"},
                "data": {"max_prompt_tokens": BUDGET // 2},
                "rollout": {"max_response_tokens": BUDGET // 2},
                "policy": {"recompute": recompute, "max_tokens_per_micro_batch": BUDGET},
            }
        )
        device = torch.device("cuda", 0)
        init = rendezvous(folder, recompute)
        worker = PolicyWorker(config, 0, init, str(folder / "model"), device)
        check(worker, reruns=recompute == "full")
        from rltrain.policy.megatron.mesh import destroy_mesh

        destroy_mesh()


def check(worker: Any, *, reruns: bool) -> None:
    [routers] = worker.model.routers
    plan = pack_micro_batches([list(LENGTHS)], BUDGET)[0]
    whole = batch()
    (mask,) = whole.require("route_mask")
    gaps = mask.clone()
    gaps[10:20] = False  # rows that have to choose live
    for name, shard in (("complete", whole), ("with gaps", whole.with_fields(route_mask=gaps))):
        for routing in ("native", "rollout", "recorded"):
            worker.begin_step(shard)
            seen: list[int] = []
            with no_sync_in(routers, seen):
                worker.score(plan, routing="native", record=True)
                if routing != "recorded":
                    worker.recorded_routes = None
                worker.score(plan, routing=routing)
                worker.update(plan, {}, routing=routing)
            assert len(seen) == (4 if reruns else 3) * LAYERS * len(plan), (name, routing, seen)
            sys.stdout.write(f"{name}, {routing}, reruns={reruns}: {len(seen)} routers, no sync\n")


def check_that_a_sync_is_seen() -> None:
    router = torch.nn.Linear(4, 4, device="cuda")
    router.layer_number = 1
    inner = router.forward
    router.forward = lambda x: inner(x) * inner(x).sum().item()
    try:
        with no_sync_in({1: router}, []):
            router(torch.ones(2, 4, device="cuda"))
    except RuntimeError as error:
        assert "synchroniz" in str(error), error
        return
    raise AssertionError("a synchronising call went unnoticed")


if __name__ == "__main__":
    check_that_a_sync_is_seen()
    with tempfile.TemporaryDirectory() as folder_:
        run(Path(folder_))
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

    def test_a_sync_would_be_seen() -> None:
        check_that_a_sync_is_seen()

    def test_no_router_waits_for_the_gpu(tmp_path: Path) -> None:
        run(tmp_path)

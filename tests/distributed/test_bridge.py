"""Families that rltrain does not map, where megatron-bridge can be imported.

That package declares transformers<5, which vLLM 0.27 and later do not take, so this runs in an
environment of its own (docs/bridge.md says which).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rltrain.batch import Batch
from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.routing.align import last_rows
from rltrain.routing.codec import encode
from rltrain.weights.bridged import bridged_architecture
from rltrain.weights.families import read_architecture
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import LENGTHS, Layout, forward_backward, sequences
from tests.distributed.tiny_families import EXPERTS, HEADS, SIZES, VOCABULARY, load

pytestmark = pytest.mark.integration
pytest.importorskip("megatron.bridge", exc_type=ImportError)
CPU = torch.device("cpu")
EVEN = SIZES | {"vocab_size": VOCABULARY + 1}  # megatron-bridge pads none
LAYOUTS = {
    "one rank": ParallelConfig(),
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "pp2": ParallelConfig(pp=2),
}
NAMES = ("qwen3_moe", "qwen3", "mistral")
"""Two that rltrain maps, too, one of them with tied embeddings; one that it does not."""
NO_MATTER = {
    "autocast_dtype",  # no autocast
    "cross_entropy_loss_fusion",  # of Megatron's own loss
    "window_attn_skip_freq",  # no window
    "init_method_std",
    "embedding_init_method_std",
    "attention_softmax_in_fp32",  # of Megatron's own attention
    "masked_softmax_fusion",  # likewise
    "moe_layer_freq",  # 1 or [1, 1, 1, 1]
    "moe_router_topk_scaling_factor",  # None or 1
}
TOLERANCE = 1e-4  # of the largest entry


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if "qwen3_moe" in name:
        dense = [1] if "dense" in name else []
        config = Qwen3MoeConfig(
            **EVEN, **HEADS, **EXPERTS, norm_topk_prob=True, mlp_only_layers=dense
        )
        model = Qwen3MoeForCausalLM(config)
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**EVEN, **HEADS, tie_word_embeddings=True))
    elif name == "mistral":
        model = MistralForCausalLM(MistralConfig(**EVEN, sliding_window=None))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**EVEN, head_dim=32))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # no norm is 1, so that none can be mistaken or left out
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


def save(name: str, folder: Path) -> None:
    """As `tests.distributed.tiny_families.save`, over the ids that its batch has."""
    model = make(name)
    model.save_pretrained(folder / "model")
    logits = [model(t[None]).logits[0, :, :VOCABULARY] for t in sequences(VOCABULARY)]
    save_file(_by_number(logits), folder / "logits.safetensors")
    denominator = sum(LENGTHS) - len(LENGTHS)
    loss = sum(
        F.cross_entropy(x[:-1], t[1:], reduction="sum") / denominator
        for t, x in zip(sequences(VOCABULARY), logits, strict=True)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")


def _by_number(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): x.detach().clone() for i, x in enumerate(tensors)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bridge")
    for name in (*NAMES, "gemma2", "qwen3_moe, one dense"):
        save(name, folder / name)
    run_ranks(run_layouts, 2, folder)
    return folder


def run_layouts(rank: int, root: Path) -> None:
    for name in NAMES:
        for layout, parallel in LAYOUTS.items():
            if rank < parallel.world_size:
                run_one(rank, root, name, layout)
    if rank == 0:
        refusals(root)


def run_one(rank: int, root: Path, name: str, layout: str) -> None:
    """Built and loaded by the bridge: the logits, the gradients, what replay needs, the export."""
    from rltrain.policy.bridge import Bridge
    from rltrain.policy.mesh import destroy_mesh, init_mesh
    from rltrain.policy.model import build_model, decoder_routers
    from rltrain.policy.observe import main_grad
    from rltrain.weights.export import write_huggingface

    parallel, folder = LAYOUTS[layout], root / name
    arch = bridged_architecture(json.loads((folder / "model/config.json").read_text()), name)
    if arch.num_experts == 0:
        parallel = parallel.model_copy(update={"ep": 1})
    mesh = init_mesh(parallel, rank, parallel.world_size, rendezvous(root, f"{name}.{layout}"), CPU)
    policy = PolicyConfig(parallel=parallel)
    bridge = Bridge(str(folder / "model"), arch)
    chunks = build_model(
        arch, policy, mesh, device=CPU, routing_replay=arch.num_experts > 0, bridge=bridge
    )
    bridge.load(chunks)
    if arch.num_experts:
        own = compare_with_ours(root / name, chunks, policy, mesh)
        (folder / f"{layout}.{rank}.json").write_text(
            json.dumps(own | {"routers": [n for c in chunks for n in decoder_routers(c)]})
        )
    for chunk in chunks:
        chunk.zero_grad_buffer()
    logits, _ = forward_backward(chunks, Layout(parallel), mesh)
    gradients = dict(bridge.full_tensors(chunks, torch.float32, main_grad))
    if logits and mesh.tp_rank == 0:
        save_file({str(i): x for i, x in logits.items()}, folder / f"{layout}.logits.safetensors")
    if rank == 0:
        copies = {n: x.clone() for n, x in gradients.items()}
        save_file(copies, folder / f"{layout}.gradients.safetensors")
    tensors = bridge.full_tensors(chunks, torch.float32)
    write_huggingface(folder / f"{layout} exported", folder / "model", tensors, arch, torch.float32)
    destroy_mesh()


def compare_with_ours(folder: Path, chunks: list, policy, mesh) -> dict[str, list[str]]:  # type: ignore[no-untyped-def, type-arg]
    """Parameters and settings in which the bridge's model is not the one of rltrain's own map."""
    from rltrain.policy.model import build_model
    from rltrain.weights.load import load_huggingface

    arch = read_architecture(folder / "model")
    ours = build_model(arch, policy, mesh, device=CPU, routing_replay=True)
    load_huggingface(folder / "model", ours, arch, mesh)
    found, expected = ({n: p for c in x for n, p in c.named_parameters()} for x in (chunks, ours))
    assert found.keys() == expected.keys()
    settings, own = vars(chunks[0].config), vars(ours[0].config)
    skipped = ("init_method", "output_layer_init_method")  # functions, the same or made of them
    first, second = (replayed(model, arch, policy, mesh) for model in (chunks, ours))
    return {
        "replay": [n for n, x in second.items() if not torch.equal(first[n], x)],
        "parameters": [n for n, p in expected.items() if not torch.equal(found[n], p)],
        "settings": [
            n for n, value in own.items() if n not in skipped and settings.get(n) != value
        ],
    }


def replayed(chunks: list, arch, policy, mesh) -> dict[str, Tensor]:  # type: ignore[no-untyped-def, type-arg]
    """Log-probabilities on random routes, and whether the routers used those."""
    from rltrain.policy.micro_batch import cut
    from rltrain.policy.passes import ModelOnMesh, score

    tokens = torch.cat(sequences(VOCABULARY))
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(len(tokens), arch.num_layers, arch.num_experts, generator=generator)
    model = ModelOnMesh(chunks, arch, mesh, policy, 1.0)
    ids = chances[:, list(model.route_layers)].topk(arch.experts_per_token).indices
    routes = torch.from_numpy(encode(ids.numpy(), arch.num_experts))
    lengths = torch.tensor(LENGTHS)
    owed = ~last_rows(lengths)
    batch = Batch(
        tokens=tokens,
        seq_lens=lengths,
        response_mask=torch.ones(len(tokens), dtype=torch.bool),
        replay_expert_indices=routes,
        replay_mask=owed,
    )
    plan = [[i] for i in range(len(LENGTHS))]
    found = score(
        model, cut(batch, plan, mesh.token_grid, CPU), len(tokens), replay=True, record=True
    )
    assert found.recorded is not None
    assert torch.equal(found.recorded.used[owed], routes[owed])
    assert not torch.equal(found.recorded.native[owed], routes[owed])
    return {} if found.logprobs is None else {"logprobs": found.logprobs}


def refusals(root: Path) -> None:
    from rltrain.policy.bridge import Bridge
    from rltrain.policy.mesh import destroy_mesh, init_mesh
    from rltrain.policy.model import build_model

    mesh = init_mesh(ParallelConfig(), 0, 1, rendezvous(root, "refusals"), CPU)

    def build(name: str, **megatron_args: object) -> None:
        arch = bridged_architecture(json.loads((root / name / "model/config.json").read_text()), "")
        bridge, policy = Bridge(str(root / name / "model"), arch), PolicyConfig()
        policy = policy.model_copy(update={"megatron_args": megatron_args})
        bridge.load(build_model(arch, policy, mesh, device=CPU, routing_replay=True, bridge=bridge))

    with pytest.raises(ValueError, match=r"gemma2.*layers of its own.*needs Transformer Engine"):
        build("gemma2")
    with pytest.raises(ValueError, match="rltrain sets this field itself"):
        build("mistral", hidden_dropout=0.1)
    with pytest.raises(ValueError, match="follows from the model"):
        build("mistral", num_query_groups=4)
    with pytest.raises(ValueError, match="moe_router_fusion=True cannot be replayed"):
        build("qwen3_moe", moe_router_fusion=True)
    with pytest.raises(RuntimeError, match=r"expected routers in layers \[0, 2, 3\]"):
        build("qwen3_moe, one dense")  # of which megatron-bridge knows nothing
    file = root / "mistral/model/model.safetensors"
    whole = load_file(file)
    for changed, message in (
        ({**whole, "model.extra": torch.ones(1)}, "makes nothing of model.extra"),
        (
            {n: x for n, x in whole.items() if "layers.2.mlp.up" not in n},
            r"no tensors there for the model's decoder\.layers\.2\.mlp\.linear_fc1\.weight",
        ),
        ({**whole, "model.norm.weight": torch.ones(3)}, "makes .3. of decoder.final_layernorm"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            build("mistral")
    save_file(whole, file, metadata={"format": "pt"})
    destroy_mesh()


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference over the largest entry."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - x).abs().max() / x.abs().max().clamp(min=1e-8))
        for n, x in expected.items()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_transformers(root: Path, name: str, layout: str) -> None:
    logits, gradients = (
        load_file(root / name / f"{layout}.{kind}.safetensors") for kind in ("logits", "gradients")
    )
    assert worst(logits, load_file(root / name / "logits.safetensors")) < TOLERANCE
    assert worst(gradients, load(root / name / "gradients")) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_loaded_and_exported_is_what_was_there(root: Path, name: str, layout: str) -> None:
    original, exported = (load(root / name / f) for f in ("model", f"{layout} exported"))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[n], x) for n, x in original.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mapped_family_has_the_parameters_and_settings_of_its_map(
    root: Path, layout: str
) -> None:
    for rank in range(LAYOUTS[layout].world_size):
        found = json.loads((root / "qwen3_moe" / f"{layout}.{rank}.json").read_text())
        assert found["parameters"] == []
        assert found["replay"] == []
        layers = {"pp2": [[0, 1], [2, 3]]}.get(layout, [[0, 1, 2, 3]] * 2)
        assert found["routers"] == layers[rank]
        assert set(found["settings"]) <= NO_MATTER

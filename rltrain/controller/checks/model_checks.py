"""Whether the model's folder can be trained, with this layout and these lengths.

Reads `config.json` alone, and the headers of the weight files in `check_weights`, which needs
torch. Each check raises ``ValueError`` with what was expected, what was found and what to do.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

from rltrain.config import Config
from rltrain.config.model import ModelConfig, TinyModel
from rltrain.config.policy import PolicyConfig
from rltrain.data.tokenizer import VOCAB_SIZE
from rltrain.parallel.layer_map import Pipeline
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.manifest import check_manifest, check_names, read_manifest
from rltrain.weights.huggingface.stored_model import HUGGINGFACE, POLICY


def read_model(config: Config) -> Architecture:
    """What the run trains: of the folder ``model.path``, or the tiny model."""
    if config.model.path is None:
        return tiny_architecture(config.model.tiny)
    return read_architecture(config.model.path, config.model.mtp)


def tiny_architecture(tiny: TinyModel) -> Architecture:
    """That of `rltrain.data.tiny_model.tiny_config`, without transformers and torch."""
    return Architecture(
        family="qwen3_moe",
        num_layers=tiny.num_layers,
        hidden_size=tiny.hidden_size,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        ffn_size=tiny.expert_size,
        vocab_size=VOCAB_SIZE,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=tiny.max_positions,
        num_experts=tiny.num_experts,
        experts_per_token=tiny.experts_per_token,
        expert_size=tiny.expert_size,
        norm_topk_prob=True,
        moe_layers=tuple(range(tiny.num_layers)),
        qk_norm="heads",
    )


def check_layout(config: Config, model: Architecture) -> None:
    """The policy's parallel layout divides the model."""
    layout = config.policy.parallel
    for key, parts, unit, size in (
        ("policy.parallel.tp", layout.tp, "attention heads", model.num_heads),
        ("policy.parallel.tp", layout.tp, "key-value heads", model.num_kv_heads),
    ):
        if size % parts:
            raise ValueError(
                f"{key}={parts}: expected a divisor of the {size} {unit} of the model [RL1010]"
            )
    if layout.ep > 1 and (model.num_experts == 0 or model.num_experts % layout.ep):
        raise ValueError(
            f"policy.parallel.ep={layout.ep}: expected a divisor of the model's experts, found "
            f"{model.num_experts} experts"
            " [RL1010]"
        )
    if layout.etp > 1 and (model.expert_size == 0 or model.expert_size % layout.etp):
        raise ValueError(
            f"policy.parallel.etp={layout.etp}: expected a divisor of the experts' intermediate "
            f"size, found {model.expert_size}"
            " [RL1010]"
        )
    stages = Pipeline.of(layout)
    for stage, chunk in product(range(layout.pp), range(layout.vpp)):
        check_recompute(config.policy, len(stages.chunk_layers(model.num_layers, stage, chunk)))


def check_recompute(policy: PolicyConfig, num_layers: int) -> None:
    """Megatron reruns ``recompute_num_layers`` at a time and would run past the chunk's last."""
    uniform = policy.recompute == "full" and policy.recompute_method == "uniform"
    if uniform and num_layers % policy.recompute_num_layers:
        raise ValueError(
            f"policy.recompute_num_layers={policy.recompute_num_layers}: expected a divisor of the "
            f"{num_layers} layers of a pipeline chunk; with policy.recompute_method=block it need "
            "not be"
            " [RL1010]"
        )


def check_lengths(config: Config, model: Architecture) -> None:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if prompt + response > model.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens={prompt} and rollout.max_response_tokens={response}: expected "
            f"together at most the {model.max_positions} positions of the model in "
            f"{config.model.path or 'model.tiny'}"
            " [RL1005]"
        )


def check_replay(config: Config, model: Architecture) -> None:
    """The model has routers, where the run is to replay them."""
    replay = config.routing_replay
    if model.num_experts == 0 and (replay.mode != "off" or replay.capture):
        raise ValueError(
            f"routing_replay.mode={replay.mode}, capture={str(replay.capture).lower()}: expected a "
            f"model with routers, found a dense one in {config.model.path}. Choose a "
            "mixture-of-experts model, or set routing_replay=off routing_replay.capture=false"
            " [RL3007]"
        )


def check_weights(path: str, model: Architecture) -> None:
    """The headers of all weight files fit ``config.json``, so that no rank fails half-way."""
    # Reads no weights, but needs torch, which takes seconds: so it is imported here, and called
    # after what is quick.
    from rltrain.weights.huggingface.load import open_checkpoint

    open_checkpoint(path, model)


def check_imported(model: ModelConfig, *, joined: bool = False, trust: bool = False) -> None:
    """The imported checkpoint is whole, and of the model in ``path``; then it may be opened.

    Args:
        joined: the nodes of a cluster read its files (`cluster.model_folders`); here names will do
        trust: it may be opened, whatever it holds
    """
    if model.weights is None or model.path is None:
        return
    weights = Path(model.weights).expanduser()
    if joined:
        check_names(weights, read_manifest(weights), whole=True)
    else:
        check_manifest(weights)
        # It loads torch. The ranks look through all of the folder before they open it.
        from rltrain.weights.huggingface.plain_checkpoint import read_metadata

        if not trust:
            read_metadata(weights / POLICY)
    imported, expected = (
        replace(read_architecture(folder, model.mtp), skipped_mtp_layers=0)
        for folder in (weights / HUGGINGFACE, model.path)
    )
    if imported != expected:
        raise ValueError(
            f"model.weights={weights}: expected what rltrain import made of "
            f"model.path={model.path}, found the weights of another architecture"
            " [RL3010]"
        )

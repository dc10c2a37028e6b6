"""``rltrain routes record`` and ``replay``: a pass on one layout of the policy.

Megatron is imported after the arguments were checked.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltrain.config.model import ModelConfig
from rltrain.config.policy import PolicyConfig
from rltrain.data.arithmetic import NUM_PROBLEMS, arithmetic_rows
from rltrain.data.model_tokenizer import load_tokenizer
from rltrain.data.prompts import encode_prompt, encode_response
from rltrain.data.tokenizer_checks import check_tokenizer
from rltrain.parallel.layer_map import Pipeline
from rltrain.planning.machine import count_gpus
from rltrain.verification.layout_models import MODELS
from rltrain.verification.routes_arguments import (
    PassOptions,
    TokenSource,
    existing,
    load_routes,
    parse_layout,
)
from rltrain.verification.routes_file import Routes
from rltrain.verification.routes_inspection import inspect_routes
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.load import open_checkpoint

TINY = "tiny:"

Tokens = tuple[tuple[int, ...], ...]


def record(model: str, source: TokenSource, options: PassOptions, out: str) -> int:
    arch, weights = resolve_model(model)
    tokens = read_tokens(model, source, arch, weights)
    beside = Path(out).with_suffix(".pass.safetensors")
    _run(model, options, arch, weights, tokens, routes_out=Path(out), pass_out=beside)
    sys.stdout.write(f"{out}\n{beside}\n")
    return 0


def replay(model: str, routes_file: str, options: PassOptions, out: str) -> int:
    arch, weights = resolve_model(model)
    routes = load_routes(routes_file)
    check_replayable(routes, arch, routes_file)
    tokens = tuple(tuple(part.tolist()) for part in routes.tokens.split(routes.seq_lens.tolist()))
    check_readable(tokens, arch, routes_file)
    path = existing(routes_file)
    _run(model, options, arch, weights, tokens, replay=path, pass_out=Path(out))
    sys.stdout.write(f"{out}\n")
    return 0


def _run(
    model: str,
    options: PassOptions,
    arch: Architecture,
    weights: Path | None,
    tokens: Tokens,
    *,
    pass_out: Path,
    replay: Path | None = None,
    routes_out: Path | None = None,
) -> None:
    """Check the layout, then start its ranks."""
    policy = policy_config(options)
    Pipeline.of(policy.parallel).check(arch.num_layers)
    gpus = count_gpus()
    if gpus and policy.parallel.world_size > gpus:
        raise ValueError(
            f"--layout {options.layout}: needs {policy.parallel.world_size} GPUs, found {gpus}"
            " [RL4001]"
        )
    if weights is not None:
        open_checkpoint(weights, arch)  # a broken folder shows before ranks start
    if not pass_out.absolute().parent.is_dir():
        raise ValueError(f"{pass_out}: its folder does not exist; make it first [RL7004]")

    from rltrain.policy.ranks import run_ranks
    from rltrain.verification.offline_pass import Task, run_task

    routed = f"routes of {replay.name}" if replay is not None else "native routes"
    about = f"{model}, {options.layout or 'one rank'}, recompute {options.recompute}, {routed}"
    task = Task(
        arch, weights, policy, tokens, replay, routes_out, pass_out, f"{about}, {options.precision}"
    )
    device = "cuda" if gpus else "cpu"
    with tempfile.TemporaryDirectory(prefix="rltrain-routes-") as folder:
        size = policy.parallel.world_size
        run_ranks(run_task, size, Path(folder), task, device, device=device, timeout_s=1800)


def policy_config(options: PassOptions) -> PolicyConfig:
    """The policy that the options ask for; ValueError when they do not fit one another."""
    recompute: dict[str, Any] = {"recompute": options.recompute}
    if options.recompute == "block":
        recompute = {"recompute": "full", "recompute_method": "block"}
    elif options.recompute not in ("none", "full"):
        modules = options.recompute.split("+")
        recompute = {"recompute": "selective", "recompute_modules": modules}
    return PolicyConfig.model_validate(
        {
            "parallel": parse_layout(options.layout),
            "precision": {"params": options.precision},
            "max_tokens_per_micro_batch": options.max_tokens,
            **recompute,
        }
    )


def resolve_model(name: str) -> tuple[Architecture, Path | None]:
    """The architecture and the folder of the weights, None for a tiny model with seeded ones.

    Raises:
        ValueError: there is no such model, it is not supported, or it has no router.
    """
    if name.startswith(TINY):
        known = name.removeprefix(TINY)
        if known not in MODELS:
            tiny = ", ".join(f"{TINY}{other}" for other in MODELS)
            raise ValueError(f"{name}: expected a Hugging Face folder or one of {tiny} [RL7004]")
        return MODELS[known], None
    folder = Path(name).expanduser()
    arch = read_architecture(folder)
    if not arch.moe_layers:
        raise ValueError(
            f"{name}: a dense model has no routes; choose a mixture of experts [RL3007]"
        )
    return arch, folder


def read_tokens(model: str, source: TokenSource, arch: Architecture, folder: Path | None) -> Tokens:
    """The token ids of ``source``, checked; ``folder`` has the tokenizer of ``model``."""
    if source.tokens is not None:
        tokens, where = _load_tokens(existing(source.tokens)), source.tokens
    elif folder is None:
        raise ValueError(f"{model}: it has no tokenizer; give ids with --tokens FILE.json [RL7004]")
    else:
        tokens, where = (_encode_text(source, folder),), str(folder)
    check_readable(tokens, arch, where)
    return tokens


def _encode_text(source: TokenSource, folder: Path) -> tuple[int, ...]:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    check_tokenizer(tokenizer, folder)
    if source.prompt is not None:
        return encode_prompt(source.prompt, tokenizer, as_chat=False)[1]
    assert source.problem is not None
    if not 0 <= source.problem < NUM_PROBLEMS:
        raise ValueError(f"--problem {source.problem}: expected 0 to {NUM_PROBLEMS - 1} [RL7004]")
    row = arithmetic_rows(0, 0, source.problem + 1, seed=0)["train"][source.problem]
    prompt = encode_prompt(row["prompt"], tokenizer, as_chat=False)[1]
    return (*prompt, *encode_response(row["answer"], tokenizer))


def _load_tokens(file: Path) -> Tokens:
    expected = f"{file}: expected a JSON list of lists of token ids, like [[5, 7], [3, 1, 2]]"
    try:
        ids = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{expected}, found {error} [RL7004]") from error
    lists = isinstance(ids, list) and all(isinstance(sequence, list) for sequence in ids)
    if not lists or any(type(token) is not int for sequence in ids for token in sequence):
        raise ValueError(f"{expected} [RL7004]")
    return tuple(map(tuple, ids))


def check_readable(tokens: Sequence[Sequence[int]], arch: Architecture, where: str) -> None:
    """ValueError unless a pass over these sequences has a loss and the model can read them."""
    if not tokens or min(map(len, tokens)) < 1 or max(map(len, tokens)) < 2:
        raise ValueError(
            f"{where}: expected sequences of at least 1 token, one of 2 or more, found lengths "
            f"{[len(sequence) for sequence in tokens][:8]}"
            " [RL7004]"
        )
    if (longest := max(map(len, tokens))) > arch.max_positions:
        raise ValueError(
            f"{where}: a sequence has {longest} tokens and the model takes {arch.max_positions}: "
            "shorten it"
            " [RL7004]"
        )
    ids = [token for sequence in tokens for token in sequence]
    if min(ids) < 0 or max(ids) >= arch.vocab_size:
        raise ValueError(
            f"{where}: expected token ids from 0 to {arch.vocab_size - 1}, found {min(ids)} to "
            f"{max(ids)}: they are of another tokenizer"
            " [RL7004]"
        )


def check_replayable(routes: Routes, arch: Architecture, where: str) -> None:
    """ValueError unless the routes are of such a model and every row has distinct experts."""
    shape = routes.layers, routes.ids.shape[2], routes.num_experts
    expected = arch.moe_layers, arch.experts_per_token, arch.num_experts
    if shape != expected:
        raise ValueError(
            f"{where}: expected layers, experts per token and experts {expected} of the model, "
            f"found {shape}: the routes are of another model"
            " [RL7004]"
        )
    duplicates = inspect_routes(routes).duplicate_rows
    if bad := [layer for layer, rows in duplicates.items() if rows]:
        raise ValueError(
            f"{where}: {duplicates[bad[0]]} rows of layer {bad[0]} name an expert twice, which "
            "Megatron computes wrongly without an error; `rltrain routes inspect` shows them all"
            " [RL7004]"
        )

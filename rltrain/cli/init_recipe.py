"""The values in the recipe that ``rltrain init`` writes: those that fit the user's choices.

It reads ``config.json`` of the model and the first rows of the data, and imports no torch.
"""

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import yaml

from rltrain.cli.init_data import SAMPLE, look_at_data
from rltrain.config import Config
from rltrain.config.reward import BUILT_IN_REWARDS, is_url
from rltrain.planning.machine import GPUS_OF_A_NODE
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import read_architecture

TINY_PROMPT, TINY_RESPONSE = 64, 16
LONGEST = 1024
"""Most tokens of a prompt, and of a response, where the model has room for both."""
PROMPTS_PER_STEP = 64


@dataclass(frozen=True)
class Choices:
    """The options of ``rltrain init``; None: not chosen."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    gpus: int | None = None
    recipe: str | None = None


def recipe_values(name: str, choices: Choices, base: Config | None) -> dict[str, Any]:
    """What templates/recipe.yaml.j2 is filled with.

    Args:
        base: the configuration of ``choices.recipe``

    Raises:
        ValueError: there is no such model, data or reward, or not that many GPUs on one host.
    """
    if choices.gpus is not None and not 1 <= choices.gpus <= GPUS_OF_A_NODE:
        raise ValueError(
            f"--gpus {choices.gpus}: expected 1 to {GPUS_OF_A_NODE}: it writes a layout for one "
            "node [RL1002]"
        )
    if base is not None and choices.gpus is not None:
        raise ValueError(
            f"--recipe {choices.recipe} has a layout of its own, and --gpus {choices.gpus} makes "
            "another: drop one"
            " [RL1003]"
        )
    model = read_architecture(Path(choices.model).expanduser()) if choices.model else None
    data = look_at_data(choices.data) if choices.data else SAMPLE
    is_tiny = model is None and (base is None or base.model.path is None)
    is_rl = base is None or base.algorithm.type == "rl"
    longest = min(LONGEST, model.max_positions // 2) if model else LONGEST
    num_experts = model.num_experts if model else Config().model.tiny.num_experts
    is_sample = is_tiny and data is SAMPLE
    return {
        "title": f"{name}: {what_it_is(choices, model)}",
        "recipe": choices.recipe,
        "model": absolute(choices.model),
        "data": data,
        "as_chat": None if is_tiny or data.is_chat else as_yaml(has_template(choices, base)),
        "reward": reward_of(choices) if is_rl else None,
        "reward_workers": 1 if is_tiny else 8,
        "is_rl": is_rl,
        "replay": "r3" if num_experts else '"off"',
        "device": "cuda" if choices.gpus else "auto",
        "gpus": choices.gpus,
        "ep": gcd(choices.gpus or 1, num_experts) if num_experts else 1,
        "max_prompt_tokens": TINY_PROMPT if is_sample else longest,
        "max_response_tokens": TINY_RESPONSE if is_sample else longest,
        "lr": "1.0e-4" if is_tiny else "1.0e-6",
        "warmup_steps": 20 if is_tiny else 0,
        "steps": 40,
        "eval_every": 10,
        "mini_batches": 4 if is_tiny else 1,
        "prompts_per_step": prompts_per_step(data.num_rows, choices.gpus or 1),
    }


def prompts_per_step(num_rows: int, gpus: int) -> int:
    """At most half of the rows, and a multiple of the data-parallel ranks."""
    wanted = min(PROMPTS_PER_STEP, max(4, num_rows // 2 // 4 * 4))
    return -(-wanted // gpus) * gpus


def what_it_is(choices: Choices, model: Architecture | None) -> str:
    if choices.recipe is not None:
        return f"the recipe {choices.recipe} with data of its own."
    if model is not None and model.num_experts == 0:
        return "GRPO on a dense model."
    return "GRPO on a mixture-of-experts model with rollout routing replay (R3)."


def reward_of(choices: Choices) -> str:
    """``data.reward.function``; a file of the user's by its absolute path.

    Raises:
        ValueError: there is no such file.
    """
    if choices.reward is None:
        return "reward.py:score"
    if choices.reward in BUILT_IN_REWARDS or ":" not in choices.reward or is_url(choices.reward):
        return choices.reward
    file, _, function = choices.reward.rpartition(":")
    if not Path(file).expanduser().is_file():
        raise ValueError(
            f"--reward {choices.reward}: there is no file {file} in {Path.cwd()} [RL2009]"
        )
    return f"{absolute(file)}:{function}"


def has_template(choices: Choices, base: Config | None) -> bool:
    """Whether the model's folder has a chat template; so has what stands in for a missing one."""
    folder = Path(choices.model or (base.model.path if base else None) or "").expanduser()
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or (folder / "chat_template.jinja").is_file():
        return True
    return '"chat_template"' in settings.read_text(encoding="utf-8")


def absolute(path: str | None) -> str | None:
    """The recipe is read in another folder than the one in which it is written."""
    return None if path is None else str(Path(path).expanduser().absolute())


def as_yaml(value: object) -> str:
    """A value on one line of YAML. OmegaConf would fill in what looks like ``${key}``."""
    text = yaml.safe_dump(value, allow_unicode=True, width=10**6).removesuffix("...\n").strip()
    return text.replace("${", "\\${")

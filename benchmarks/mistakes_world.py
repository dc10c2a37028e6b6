"""The files that the commands of benchmarks/mistakes.py name: data, rewards, models and runs."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rltrain.config import Config
from rltrain.config.model import TinyModel
from rltrain.controller.checks.model_checks import tiny_architecture
from rltrain.controller.run_checkpoint import model_of
from rltrain.data.tiny_model import save_tiny_model
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer
from rltrain.weights.huggingface.manifest import write_manifest

REWARDS = {
    "raising": "raise KeyError('no such grade')",
    "text": "return 'good'",
    "nothing": "pass",
    "exits": "raise SystemExit(3)",
    "not_a_number": "return float('nan')",
}
"""Module -> what its ``score`` does."""
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(64)]


def make_world(folder: Path) -> None:
    write_data(folder)
    for name, body in REWARDS.items():
        (folder / f"{name}.py").write_text(f"def score(response, answer, **columns):\n    {body}\n")
    (folder / "broken_syntax.py").write_text("def score(response answer):\n    return 1\n")
    (folder / "tab.yaml").write_text("trainer:\n\tsteps: 5\n")
    (folder / "list.yaml").write_text("- trainer.steps: 5\n")
    make_models(folder)
    make_runs(folder)


def write_data(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "no_answer.jsonl", [{"prompt": row["prompt"]} for row in ROWS])
    write_rows(folder / "long.jsonl", [{"prompt": "1" * 100, "answer": "1"}, *ROWS])
    write_rows(folder / "few.jsonl", ROWS[:10])
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    write_rows(folder / "chat.jsonl", chats)
    (folder / "empty.jsonl").write_text("")
    text = (folder / "rows.jsonl").read_text()
    (folder / "utf16.jsonl").write_text(text, encoding="utf-16")
    (folder / "cut.jsonl").write_text(text[:-9])
    (folder / "table.csv").write_text("prompt,answer\n1+1=,2\n")
    (folder / "data").mkdir()
    (folder / "data" / "notes.txt").write_text("no rows here\n")
    # These two are no mistakes: they have to work.
    (folder / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (folder / "with space").mkdir()
    (folder / "with space" / "my rows.jsonl").write_text(text)


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_models(folder: Path) -> None:
    """A mixture of experts, copies of it that lack something, and a dense model."""
    save_tiny_model(TinyModel(num_layers=2), folder / "moe")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        config = Qwen3Config(vocab_size=VOCAB_SIZE, eos_token_id=2, **sizes, **heads)
        Qwen3ForCausalLM(config).save_pretrained(folder / "dense")
    tiny_tokenizer().save_pretrained(folder / "dense")
    for name in ("no_template", "no_tokenizer", "corrupt", "pointer", "no_weights"):
        shutil.copytree(folder / "moe", folder / name)
    (folder / "no_template" / "chat_template.jinja").unlink()
    for file in (folder / "no_tokenizer").glob("*token*"):
        file.unlink()
    weights = "model.safetensors"
    (folder / "no_weights" / weights).unlink()
    content = (folder / "moe" / weights).read_bytes()
    (folder / "corrupt" / weights).write_bytes(content[: len(content) // 2])
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 123\n"
    (folder / "pointer" / weights).write_text(pointer)


def make_runs(folder: Path) -> None:
    """A run of another model, with a checkpoint; one that finished; a file where a folder goes."""
    other = Config().model.model_copy(update={"tiny": TinyModel(num_layers=6)})
    config = Config().model_copy(update={"model": other})
    checkpoint = folder / "other_run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    model = model_of(config, tiny_architecture(other.tiny))
    (checkpoint / "state.json").write_text(json.dumps({"model": model, "step": 1}))
    write_manifest(checkpoint)
    (folder / "earlier_run").mkdir()
    (folder / "earlier_run" / "config.yaml").write_text("")
    (folder / "a_file").write_text("")

"""What a mistake costs: the seconds until the message, the message, and what it names.

    python -m benchmarks.mistakes [--only TEXT]

Each mistake is a command of a user, run in a folder outside the repository. The table that this
prints is the one of docs/failures.md; tests/integration/test_mistakes.py holds every message.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mistakes_world import make_world

ROOT = Path(__file__).parents[1]
TRAIN = ("train", "+recipe=grpo_moe_r3", "trainer.output_dir=run", "model.cache_dir=cache")
JSONL = ("data=jsonl", "data.eval_size=8", "trainer.prompts_per_step=8")


@dataclass(frozen=True)
class Mistake:
    name: str
    arguments: tuple[str, ...]
    code: str
    """Of the message."""
    facts: tuple[str, ...]
    """What the message has to name."""
    status: int = 2

    @property
    def command(self) -> str:
        return " ".join(("rltrain", *self.arguments))


def train(name: str, overrides: str, code: str, *facts: str, status: int = 2) -> Mistake:
    return Mistake(name, (*TRAIN, *overrides.split()), code, facts, status)


def on_data(name: str, overrides: str, code: str, *facts: str, status: int = 2) -> Mistake:
    return Mistake(name, (*TRAIN, *JSONL, *overrides.split()), code, facts, status)


PLANTED = (
    train("misspelt key", "trainer.stepz=5", "RL1001", "trainer.stepz", "trainer.steps"),
    train("wrong type", "trainer.steps=many", "RL1002", "trainer.steps", "integer", "found many"),
    train("wrong path", "model.path=no/model", "RL3001", "no/model", "does not exist"),
    on_data(
        "dense model with R3",
        "model.path=dense data.path=rows.jsonl",
        "RL3007",
        "dense",
        "routing_replay=off",
    ),
    on_data(
        "missing column", "data.path=no_answer.jsonl", "RL2002", "row 0", "'answer'", "'prompt'"
    ),
    on_data(
        "reward that raises",
        "data.path=rows.jsonl data.reward.function=raising.py:score",
        "RL2010",
        "raising.py:score",
        "KeyError",
        "no such grade",
    ),
    on_data(
        "reward of a wrong type",
        "data.path=rows.jsonl data.reward.function=text.py:score",
        "RL2011",
        "text.py:score",
        "str 'good'",
    ),
    on_data("long prompt", "data.path=long.jsonl", "RL2005", "row 0", "data.max_prompt_tokens"),
    train(
        "indivisible batch",
        "trainer.prompts_per_step=8 trainer.mini_batches=3",
        "RL1004",
        "trainer.mini_batches=3",
        "trainer.prompts_per_step=8",
    ),
    train(
        "too many ranks",
        "policy.parallel.dp=512 trainer.prompts_per_step=512",
        "RL4002",
        "ranks a core",
        "512",
    ),
    train("no GPU", "cluster.device=cuda", "RL4001", "expected 1 GPUs", "found 0"),
    train(
        "folder of another model",
        "trainer.output_dir=other_run trainer.resume=auto",
        "RL6003",
        "other_run",
        "another model",
    ),
    Mistake("wrong recipe", ("train", "+recipe=grpo_moe"), "RL1007", ("grpo_moe", "grpo_moe_r3")),
    train("unwritable folder", "trainer.output_dir=/proc/run", "RL6001", "/proc/run"),
    on_data(
        "no chat template",
        "model.path=no_template data.path=chat.jsonl",
        "RL2008",
        "chat_template",
        "chat.jsonl",
    ),
)
"""The fifteen of which every trainer sees many."""

SIBLINGS = (
    Mistake("recipe without its plus", ("train", "recipe=grpo_moe_r3"), "RL1008", ("+recipe=",)),
    train("negative learning rate", "optimizer.lr=-1e-4", "RL1002", "optimizer.lr", "> 0"),
    train("empty value", "trainer.output_dir=", "RL1002", "trainer.output_dir", "not empty"),
    Mistake(
        "quotes that the shell removed",
        (*TRAIN, "data.answer_pattern=#### (.+)"),
        "RL1006",
        ("data.answer_pattern=\"'#### (.+)'\"",),
    ),
    Mistake("tab in a recipe", ("train", "tab.yaml"), "RL1009", ("tab.yaml", "line 2", "spaces")),
    Mistake("recipe that is a list", ("train", "list.yaml"), "RL1009", ("list.yaml", "trainer:")),
    Mistake("recipe file that is not there", ("train", "my.yaml"), "RL1007", ("my.yaml",)),
    train("misspelt option of vLLM", "rollout.engine_args.max_num_seq=4", "RL1013", "max_num_seqs"),
    train(
        "misspelt option of Megatron", "policy.megatron_args.moe_aux_los=1", "RL1014", "moe_aux_los"
    ),
    train("layout that does not divide", "policy.parallel.tp=3", "RL1010", "tp=3", "4 attention"),
    train("misspelt loss", "algorithm.loss=pppo", "RL1011", "the nearest is ppo"),
    train("group of one", "algorithm.group_size=1", "RL1003", "algorithm.group_size=1"),
    on_data("empty data file", "data.path=empty.jsonl", "RL2006", "empty.jsonl has no rows"),
    on_data("folder without data", "data.path=data", "RL2001", "data.path=data", ".jsonl"),
    on_data("name on the hub", "data.path=openai/gsm8k", "RL2001", "hf download openai/gsm8k"),
    on_data(
        "evaluation data that are not there",
        "data.path=rows.jsonl data.eval_path=missing.jsonl",
        "RL2001",
        "data.eval_path",
        "missing.jsonl",
    ),
    on_data("CSV file", "data.path=table.csv", "RL2003", "table.csv", "to_json"),
    on_data("UTF-16 file", "data.path=utf16.jsonl", "RL2003", "UTF-16"),
    on_data("file that is cut off", "data.path=cut.jsonl", "RL2004", "line 64"),
    on_data("too few problems", "data.path=few.jsonl", "RL2006", "there are 2"),
    on_data(
        "same data for both",
        "data.path=rows.jsonl data.eval_path=rows.jsonl",
        "RL2007",
        "data.eval_on_train=true",
    ),
    on_data(
        "reward without return",
        "data.path=rows.jsonl data.reward.function=nothing.py:score",
        "RL2011",
        "NoneType",
    ),
    on_data(
        "reward that is not a number",
        "data.path=rows.jsonl data.reward.function=not_a_number.py:score",
        "RL2011",
        "nan",
    ),
    on_data(
        "reward that ends its process",
        "data.path=rows.jsonl data.reward.function=exits.py:score",
        "RL2010",
        "SystemExit",
    ),
    on_data(
        "reward file with a syntax error",
        "data.path=rows.jsonl data.reward.function=broken_syntax.py:score",
        "RL2009",
        "SyntaxError",
        "line 1",
    ),
    on_data(
        "misspelt reward function",
        "data.path=rows.jsonl data.reward.function=raising.py:scor",
        "RL2009",
        "did you mean 'score'",
    ),
    train("model of the hub", "model.path=Qwen/Qwen3-30B-A3B", "RL3001", "hf download Qwen/"),
    train("file for a model", "model.path=moe/config.json", "RL3001", "is a file", "moe"),
    on_data("model without tokenizer", "model.path=no_tokenizer data.path=rows.jsonl", "RL3005"),
    on_data(
        "truncated weights",
        "model.path=corrupt data.path=rows.jsonl",
        "RL3003",
        "corrupt/model.safetensors",
    ),
    on_data(
        "pointer of Git LFS for weights",
        "model.path=pointer data.path=rows.jsonl",
        "RL3003",
        "pointer/model.safetensors",
        "Git LFS",
    ),
    on_data("no weights", "model.path=no_weights data.path=rows.jsonl", "RL3003", "no_weights"),
    train("dead Ray cluster", "cluster.address=127.0.0.1:1", "RL4004", "127.0.0.1:1", status=1),
    train("folder of an earlier run", "trainer.output_dir=earlier_run", "RL6002", "earlier_run"),
    train("file for a folder", "trainer.output_dir=a_file/run", "RL6001", "Not a directory"),
    Mistake("report of no run", ("report", "nowhere"), "RL7001", ("nowhere",)),
    Mistake("report of the folder above", ("report", "."), "RL7001", ("earlier_run",)),
    train("wandb without a login", "tracking.wandb=online", "RL7003", "wandb login"),
)
"""Others of the same kinds."""

NO_MISTAKES = (
    ("Windows line endings and a byte-order mark", "data.path=windows.jsonl"),
    ("spaces in a path", "data.path=with space/my rows.jsonl"),
    ("home folder", "data.path='~/with space/my rows.jsonl'"),
    ("the last of two values counts", "data.path=missing.jsonl", "data.path=rows.jsonl"),
)
"""What looks like one and has to work: name and overrides."""


@dataclass(frozen=True)
class Outcome:
    status: int
    errors: str
    seconds: float
    cpu_seconds: float
    """Of the process and its children; a busy machine changes it little."""


def run(mistake: Mistake, folder: Path) -> Outcome:
    command = [sys.executable, "-m", "rltrain.cli.app", *mistake.arguments]
    began, cpu_before = time.monotonic(), _children_cpu_seconds()
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    seconds, cpu = time.monotonic() - began, _children_cpu_seconds() - cpu_before
    return Outcome(done.returncode, done.stderr, seconds, cpu)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def environment(folder: Path) -> dict[str, str]:
    """Of a user whose home is ``folder`` and who is logged in nowhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return kept | {"HOME": str(folder), "PYTHONPATH": str(ROOT)}


def problems(mistake: Mistake, status: int, errors: str) -> list[str]:
    """What the outcome of a command lacks."""
    wanted = [f"[{mistake.code}]", f"rltrain explain {mistake.code}", *mistake.facts]
    missing = [f"the message does not say {text!r}" for text in wanted if text not in errors]
    if status != mistake.status:
        missing.append(f"exit status {status}, expected {mistake.status}")
    if "Traceback" in errors:
        missing.append("there is a traceback")
    return missing


def row(mistake: Mistake, outcome: Outcome) -> str:
    """A row of the table in docs/failures.md."""
    lines = [line.strip() for line in outcome.errors.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("rltrain"))
    message = lines[start + 1]
    shown = message if len(message) < 110 else f"{message[:100].rstrip()} ..."
    shown = shown.replace("|", "\\|").replace("<", "&lt;").replace(f" [{mistake.code}]", "")
    times = f"{outcome.seconds:.1f} | {outcome.cpu_seconds:.1f}"
    return f"| {mistake.name} | {mistake.status} | {times} | {mistake.code} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="mistakes whose name has it")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as temporary:
        world = Path(temporary)
        make_world(world)
        print("| mistake | exit status | seconds | CPU seconds | code | message |")
        print("|---|---|---|---|---|---|")
        for mistake in (*PLANTED, *SIBLINGS):
            if only in mistake.name:
                outcome = run(mistake, world)
                for problem in problems(mistake, outcome.status, outcome.errors):
                    sys.exit(f"{mistake.name}: {problem}\n{outcome.errors}")
                print(row(mistake, outcome), flush=True)


if __name__ == "__main__":
    main()

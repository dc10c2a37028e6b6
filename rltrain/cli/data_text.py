"""The tables of ``rltrain data``, and tokens coloured by their role where there is a terminal."""

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrain.config import Config
from rltrain.config.redact import escape_control
from rltrain.config.reward import RewardConfig
from rltrain.controller.checks.reward_trial import Trial
from rltrain.controller.run_data import RunData
from rltrain.data.problem import Problem, shorten
from rltrain.data.source_report import SourceReport
from rltrain.environments.reward_sample import RewardResult

STYLES = {"prompt": "cyan", "response": "green", "special": "bold magenta"}
MOST_TOKENS = 400
"""Of a problem that is shown: the first and the last half of these."""
MOST_MEASURED = 2000
"""Answers whose tokens are counted."""
USES = {
    "prompt": "the prompt",
    "answer": "the answer",
    "tools": "tools, for the chat template",
    "column": "a reward function gets it",
}


def print_data(config: Config, data: RunData, num_shown: int) -> None:
    """Print what was found, to standard output."""
    console = Console(highlight=False, soft_wrap=True)
    for report in data.problems.reports:
        _print_report(console, report)
    if not data.problems.train:
        return
    for number, problem in enumerate(data.problems.train[:num_shown], start=1):
        console.print(f"problem {number} of {len(data.problems.train)} to train on")
        console.print(render_problem(data.tokenizer, problem))
    _print_lengths(console, config, data)
    if data.trials:
        _print_trials(console, config, data.trials)


def _print_report(console: Console, report: SourceReport) -> None:
    console.print(f"{report.where}: {report.rows} rows, {report.kept} kept", markup=False)
    if report.repeats:
        console.print(f"  {report.repeats} repeat the prompt of an earlier one")
    for reason, dropped in report.dropped.items():
        console.print(f"  {dropped.count} dropped: {reason}", markup=False)
        console.print(f"    the first: {escape_control(dropped.first)}", markup=False)
    table = _table("column", "its values are", "read as")
    for column in report.columns:
        table.add_row(Text(column.name), ", ".join(column.kinds), USES[column.use])
    if report.columns:
        console.print(table)
    console.print()


def render_problem(tokenizer: Any, problem: Problem) -> Text:
    """The tokens as text, coloured by role; without colours a line says which part begins."""
    parts = {"prompt": problem.prompt_tokens, "response": problem.target_tokens}
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in _added(tokenizer).items() if token.special}
    text = Text()
    for role, tokens in parts.items():
        if tokens:
            text.append(f"  {role}, {len(tokens)} tokens\n", "dim")
            _append(text, tokenizer, tokens, special, role)
    return text


def _append(
    text: Text, tokenizer: Any, tokens: Sequence[int], special: set[int], role: str
) -> None:
    half = MOST_TOKENS // 2
    pieces = [tokens] if len(tokens) <= MOST_TOKENS else [tokens[:half], tokens[-half:]]
    for number, piece in enumerate(pieces):
        if number:
            text.append(f"\n    ... {len(tokens) - MOST_TOKENS} tokens ...\n", "dim")
        text.append("    ")
        for is_special, run in groupby(piece, special.__contains__):
            decoded = tokenizer.decode(
                list(run), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            style = STYLES["special" if is_special else role]
            text.append(escape_control(decoded).replace("\n", "\n    "), style)
    text.append("\n")


def _added(tokenizer: Any) -> dict[int, Any]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return added


def _print_lengths(console: Console, config: Config, data: RunData) -> None:
    problems = data.problems
    prompts = [len(p.prompt_tokens) for p in (*problems.train, *problems.held_out)]
    limits = {
        "prompt": f"data.max_prompt_tokens={config.data.max_prompt_tokens}",
        "answer": f"rollout.max_response_tokens={config.rollout.max_response_tokens}",
    }
    measured = {"prompt": prompts, "answer": _answer_lengths(data)}
    table = _table("tokens", "of", "min", "median", "95 %", "max", "limit")
    for name, lengths in measured.items():
        if lengths:
            lengths.sort()
            at_95 = lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))]
            middle = f"{statistics.median(lengths):g}"
            numbers = [len(lengths), lengths[0], middle, at_95, lengths[-1]]
            table.add_row(name, *map(str, numbers), limits[name])
    console.print(table)
    longest = config.rollout.max_response_tokens
    if over := sum(length > longest for length in measured["answer"]):
        console.print(
            f"  {over} answers are longer than a response can be; the response to such a prompt "
            "may still be shorter than its reference answer"
        )
    console.print()


def _answer_lengths(data: RunData) -> list[int]:
    train = data.problems.train
    if any(problem.target_tokens for problem in train):
        return [len(problem.target_tokens) for problem in train]
    answers = [p.answer for p in train[:MOST_MEASURED] if isinstance(p.answer, str)]
    if not answers:
        return []
    encoded = data.tokenizer(answers, add_special_tokens=False)["input_ids"]
    return [len(tokens) + 1 for tokens in encoded]  # and the end of the sequence


def _print_trials(console: Console, config: Config, trials: Sequence[Trial]) -> None:
    reward = config.data.reward
    if reward.components:
        _print_components(console, reward)
    what = "reward" if reward.components else f"reward ({reward.function})"
    table = _table("response", "what it is", what, *reward.components)
    for number, trial in enumerate(trials, start=1):
        if trial.right is not None:
            name = f"reference answer {number}"
            table.add_row(_quoted(str(trial.answer)), name, *_rewards(trial.right, reward))
        if trial.wrong is not None:
            table.add_row(_quoted(trial.other), "a wrong answer", *_rewards(trial.wrong, reward))
    console.print(table)
    console.print()


def _print_components(console: Console, reward: RewardConfig) -> None:
    table = _table("component", "function", "weight")
    for name, part in reward.components.items():
        table.add_row(name, Text(part.function), f"{part.weight:g}")
    console.print(table)
    console.print()


def _rewards(result: RewardResult, reward: RewardConfig) -> list[str]:
    """The reward, and what each component gave."""
    if result.value is None:
        return [f"{result.status}: {result.detail}"]
    return [f"{result.value:g}", *(f"{result.parts[name]:g}" for name in reward.components)]


def _quoted(text: str) -> Text:
    return Text(escape_control(repr(shorten(text, 60))))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

"""Makes the three sets of problems of a run from its data configuration."""

import logging
import random
from pathlib import Path

from rltrain.config import Config
from rltrain.config.data import DataConfig
from rltrain.data.answers import answer_rule
from rltrain.data.arithmetic import arithmetic_rows
from rltrain.data.encoding import Made, encode_rows, log_report
from rltrain.data.paths import find_files
from rltrain.data.problem import Problem, Problems
from rltrain.data.prompts import Tokenizer
from rltrain.data.source_report import SourceReport
from rltrain.data.sources import numbered, read_rows, reasoning_gym_rows

logger = logging.getLogger(__name__)


def problems_of(config: Config, tokenizer: Tokenizer) -> Problems:
    """The problems of a run and their reports. Raises as `load_problems`."""
    supervised = config.algorithm.type == "sft"
    # A supervised run starts from the model without warm start.
    num_warm_start = 0 if supervised else config.model.tiny.warm_start.num_problems
    return load_problems(
        config.data,
        tokenizer,
        num_warm_start,
        supervised=supervised,
        evaluated=config.trainer.eval_every > 0,
        cache_dir=Path(config.model.cache_dir).expanduser(),
    )


def load_problems(
    config: DataConfig,
    tokenizer: Tokenizer,
    num_warm_start: int = 0,
    *,
    supervised: bool = False,
    evaluated: bool = True,
    cache_dir: Path | None = None,
) -> Problems:
    """Read or generate the problems, apply the chat template, tokenize, and split.

    Args:
        num_warm_start: problems that the arithmetic source sets aside for supervised steps; the
            other sources have no warm-start set
        supervised: whether supervised steps teach the answers. Then answers must be text, and a
            prompt may have several
        evaluated: whether the run evaluates. If not, no problems are held out
        cache_dir: folder of the cache for problems of files; None: no cache

    Raises:
        ValueError: no such file, no row, rows that cannot be used, or sets that overlap.
    """
    num_held_out = config.eval_size if evaluated else 0
    if config.source == "arithmetic":
        return _arithmetic(config, tokenizer, num_warm_start, num_held_out)
    if config.source == "reasoning_gym":
        rows = reasoning_gym_rows(config, config.size + num_held_out * (not config.eval_on_train))
        rule = answer_rule(config.reward.functions.values(), supervised)
        source = f"reasoning-gym's {config.task}"
        made = encode_rows(numbered(rows, source, config), config, tokenizer, source, rule)
        log_report(made[1])
        return _split(*made, config, num_held_out)
    assert config.path is not None
    train, report = _of_file(config, tokenizer, config.path, config.split, supervised, cache_dir)
    if config.eval_path is None and config.eval_split is None:
        return _split(train, report, config, num_held_out)
    eval_path, eval_split = config.eval_path or config.path, config.eval_split or config.split
    held_out, eval_report = _of_file(
        config, tokenizer, eval_path, eval_split, supervised, cache_dir
    )
    return Problems(train, held_out[:num_held_out], reports=(report, eval_report))


def _arithmetic(
    config: DataConfig, tokenizer: Tokenizer, num_warm_start: int, num_held_out: int
) -> Problems:
    generated = config.model_copy(update={"prompt_column": "prompt", "answer_column": "answer"})
    parts: dict[str, tuple[Problem, ...]] = {}
    reports = []
    rows_of = arithmetic_rows(num_warm_start, config.eval_size, config.size, config.seed)
    for name, rows in rows_of.items():
        if rows:
            source_rows = numbered(rows, f"arithmetic, {name}", config)
            parts[name], report = encode_rows(source_rows, generated, tokenizer, name, "compared")
            reports.append(report)
    held_out = parts.get("held_out", ())[:num_held_out]
    if config.eval_on_train:
        held_out = parts["train"][:num_held_out]
    return Problems(
        parts["train"],
        held_out,
        parts.get("warm_start", ()),
        reports=tuple(reports),
        evaluated_on_train=config.eval_on_train,
    )


def _of_file(
    config: DataConfig,
    tokenizer: Tokenizer,
    path: str,
    split: str,
    supervised: bool,
    cache_dir: Path | None,
) -> Made:
    rule = answer_rule(config.reward.functions.values(), supervised)
    key = "data.path" if path == config.path else "data.eval_path"

    def make() -> Made:
        return encode_rows(read_rows(config, path, split, key), config, tokenizer, path, rule)

    from rltrain.data.problem_cache import cache_key, cached  # imports pyarrow

    files = find_files(config.source, path, key)
    digest = cache_key(files, split, config, rule, tokenizer) if cache_dir else None
    made = make() if cache_dir is None or digest is None else cached(cache_dir, digest, make)
    log_report(made[1])
    return made


def _split(
    problems: tuple[Problem, ...], report: SourceReport, config: DataConfig, num_held_out: int
) -> Problems:
    """Draw the held-out problems. All problems of a prompt go to the same set."""
    if num_held_out == 0:
        return Problems(problems, (), reports=(report,))
    shuffled = random.Random(config.seed).sample(problems, len(problems))
    if config.eval_on_train:
        drawn = tuple(shuffled[:num_held_out])
        return Problems(problems, drawn, reports=(report,), evaluated_on_train=True)
    held_out = {problem.id for problem in shuffled[-num_held_out:]}
    train = tuple(problem for problem in shuffled if problem.id not in held_out)
    if not train:
        raise ValueError(
            f"{len(problems)} problems leave none to train on after data.eval_size="
            f"{config.eval_size} are held out: lower it, set data.eval_path, hold out none with "
            "data.eval_size=0, or evaluate on training problems with data.eval_on_train=true"
            " [RL2006]"
        )
    rest = tuple(problem for problem in shuffled if problem.id in held_out)
    return Problems(train, rest, reports=(report,))

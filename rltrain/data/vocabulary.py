"""Checks that every token of a run has a row in the embedding of the model."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rltrain.config.bounded_files import MOST_OF_TABLES, load_json
from rltrain.data.problem import Problem

_SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")
_RESIZE = (
    "Tokens were added to the tokenizer and not to the model: take those of the model's own folder "
    "(tokenizer.json, tokenizer_config.json, added_tokens.json), or resize the embedding with "
    "model.resize_token_embeddings and save the model"
)


def check_vocabulary(
    tokenizer: Any, rows: int, folder: Path | None, problems: Iterable[tuple[str, Problem]]
) -> None:
    """Check that every token has a row in the embedding.

    Args:
        rows: number of rows of the embedding, `vocab_size` in ``config.json``
        problems: names of their sets, and the problems

    Raises:
        ValueError: naming tokens without a row and the first problem that needs one.
    """
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if not 0 <= i < rows}
    for name, problem in problems:
        where = problem.place or name
        prompt = f"{where}, prompt {problem.prompt[:60]!r}"
        check_ids(problem.prompt_tokens, rows, prompt, tokenizer)
        if beyond and isinstance(problem.answer, str):
            answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
            check_ids(answer, rows, f"{where}, answer {problem.answer[:60]!r}", tokenizer)
    if beyond:
        first = ", ".join(f"{i} {beyond[i]!r}" for i in islice(sorted(beyond), 3))
        raise ValueError(
            f"{folder}: its tokenizer has {len(beyond)} tokens without a row of the model's "
            f"embedding ({first}): expected ids from 0 to {rows - 1} (vocab_size in config.json). "
            f"{_RESIZE}"
            " [RL3006]"
        )


def check_ids(ids: Sequence[int], rows: int, where: str, tokenizer: Any = None) -> None:
    """Raise ValueError for the first id without a row in the embedding."""
    if ids and not (min(ids) >= 0 and max(ids) < rows):
        at, token_id = next((at, i) for at, i in enumerate(ids) if not 0 <= i < rows)
        token = "" if tokenizer is None else f" {tokenizer.convert_ids_to_tokens([token_id])[0]!r}"
        raise ValueError(
            f"{where}: token {at} has id {token_id}{token}, and the model's embedding has {rows} "
            f"rows (ids 0 to {rows - 1}, vocab_size in config.json). {_RESIZE}"
            " [RL3006]"
        )


def check_special_ids(tokenizer: Any, folder: Path | None, rows: int, *, supervised: bool) -> None:
    """Check that the ids of special tokens have rows in the embedding, and that one ends sequences.

    Args:
        supervised: whether answers end with the tokenizer's end-of-sequence token

    Raises:
        ValueError: an id has no row, or there is no end-of-sequence token.
    """
    named = {("the tokenizer", n): getattr(tokenizer, n) for n in _SPECIAL}
    if folder is not None:
        for file in ("generation_config.json", "config.json"):
            content = _read(folder / file)
            named |= {(f"{folder / file}", n): content.get(n) for n in _SPECIAL}
    for (where, name), value in named.items():
        for token_id in value if isinstance(value, list) else [value]:
            # Older folders write -1 for no padding token.
            if token_id is None or (name == "pad_token_id" and token_id == -1):
                continue
            if type(token_id) is not int or not 0 <= token_id < rows:
                raise ValueError(
                    f"{where}: {name}={value!r}: expected ids from 0 to {rows - 1}, the rows of "
                    "the model's embedding (vocab_size in config.json)"
                    " [RL3006]"
                )
    ends = [value for (_, name), value in named.items() if name == "eos_token_id"]
    if tokenizer.eos_token_id is None and (supervised or all(end in (None, []) for end in ends)):
        raise ValueError(
            f"{folder}: no end-of-sequence token: no response would ever end. Write eos_token into "
            "tokenizer_config.json, e.g. the token that ends a turn in the chat template"
            " [RL3006]"
        )


def _read(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = load_json(file, MOST_OF_TABLES)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error} [RL3001]") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(content).__name__} [RL3001]")
    return content

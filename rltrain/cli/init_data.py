"""Which columns of the user's data hold prompt and answer, by their usual names."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rltrain.config.data import DataConfig
from rltrain.data.columns import MISSING, find_column, is_messages, listed
from rltrain.data.paths import COMPRESSED, SUFFIXES, find_files
from rltrain.data.sources import Row, read_rows

PROMPTS = ("prompt", "messages", "conversations", "question", "problem", "instruction", "query")
ANSWERS = (
    "answer",
    "reward_model.ground_truth",
    "ground_truth",
    "final_answer",
    "solution",
    "response",
    "completion",
    "output",
    "target",
    "label",
)
"""The first one that a row has is taken."""
SAVED = {"state.json", "dataset_dict.json"}
"""One of them is in a folder that ``Dataset.save_to_disk`` wrote."""
GSM8K = "#### (.+)"
NUM_COUNTED = 1000
MOST_EVALUATED = 128


@dataclass(frozen=True)
class DataShape:
    """How a recipe reads the data: keys of ``data``."""

    source: str
    path: str
    num_rows: int
    """Of at most ``NUM_COUNTED``."""
    eval_size: int
    name: str | None = None
    """The configuration of a dataset folder that has several."""
    eval_path: str | None = None
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    answer_pattern: str | None = None
    last_turn: str | None = None
    is_chat: bool = False
    columns: str = ""


SAMPLE = DataShape("jsonl", "data/train.jsonl", 1024, 128, eval_path="data/eval.jsonl")
"""The data that ``rltrain init`` writes."""


def look_at_data(path: str) -> DataShape:
    """The shape of the first row, and a held-out set that leaves most rows to train on.

    Raises:
        ValueError: there is no such data, it is of another format, or its rows cannot be read.
    """
    where = Path(path).expanduser().absolute()
    source = source_of(where)
    find_files(source, path, "--data")
    name = configuration_of(where) if source == "huggingface" else None
    config = DataConfig(source=source, path=str(where), name=name)  # type: ignore[arg-type]
    rows = list(islice(read_rows(config, str(where), key="--data"), NUM_COUNTED))
    row = next((item.row for item in rows if isinstance(item.row, dict)), None)
    if row is None:
        raise ValueError(f"--data {path}: expected rows that are objects, found none [RL2003]")
    prompt = first_column(row, PROMPTS)
    value = None if prompt is None else find_column(row, prompt)
    answer = first_column(row, [name for name in ANSWERS if name != prompt])
    ends_with_answer = is_messages(value) and value[-1]["role"] in ("assistant", "gpt")  # type: ignore[index]
    text = None if answer is None else find_column(row, answer)
    return DataShape(
        source,
        str(where),
        num_rows=len(rows),
        eval_size=min(MOST_EVALUATED, len(rows) // 5),
        name=name,
        prompt_column=prompt or "prompt",
        answer_column=answer,
        answer_pattern=GSM8K if isinstance(text, str) and "\n#### " in text else None,
        last_turn=None if not ends_with_answer else "answer" if answer is None else "drop",
        is_chat=isinstance(value, list),
        columns=f" The data has {listed(row)}.",
    )


def first_column(row: Row, names: tuple[str, ...] | list[str]) -> str | None:
    return next((name for name in names if find_column(row, name) is not MISSING), None)


def configuration_of(folder: Path) -> str | None:
    """The first configuration of a dataset folder laid out as on the hub, if it has several."""
    if SAVED & {child.name for child in folder.iterdir()}:
        return None  # has no configurations
    from datasets import get_dataset_config_names  # takes seconds

    names: list[str] = get_dataset_config_names(str(folder))
    return names[0] if len(names) > 1 and "default" not in names else None


def source_of(where: Path) -> str:
    """``data.source`` by the ending of the name; a folder may hold JSON, Parquet or a dataset."""
    if where.is_dir():
        held = {source for child in where.iterdir() if (source := _by_suffix(child))}
        saved = SAVED & {child.name for child in where.iterdir()}
        return held.pop() if len(held) == 1 and not saved else "huggingface"
    return _by_suffix(where) or "jsonl"  # find_files says what to do with any other file


def _by_suffix(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    for source, endings in SUFFIXES.items():
        if suffixes and suffixes[-1] in endings:
            return source
    return None

"""Where prompts come from."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import NotEmpty, Section
from rltrain.config.reward import RewardConfig

Positive = Annotated[int, Field(gt=0)]


class LimitsConfig(Section):
    row_mib: Positive = 16
    """The most MiB of text in a row, or in a line of JSON."""
    depth: Annotated[int, Field(gt=0, le=200)] = 64
    """The most lists and objects within each other in a row."""
    array_mib: Positive = 256
    """The most MiB of a JSON file that is one array, which is read as a whole. JSON lines are read
    one by one."""
    expansion: Positive = 200
    """How many times its size a compressed file may hold. Up to 64 MiB are always read."""


OURS_IN_A_TEMPLATE = frozenset(
    {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "chat_template", "return_dict", "return_tensors", "padding", "truncation"}
    | {"max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of a chat template, or of the call that applies it, that are not the user's to set."""


class DataConfig(Section):
    source: Literal["arithmetic", "jsonl", "parquet", "huggingface", "reasoning_gym"] = "arithmetic"
    path: NotEmpty | None = None
    """For ``jsonl`` and ``parquet``: a file, a folder of files, or a pattern such as
    ``shards/*.parquet``. For ``huggingface``: the dataset folder."""
    name: str | None = None
    """Configuration of a Hugging Face dataset folder that has several, e.g. ``main``."""
    eval_path: NotEmpty | None = None
    """Path of the held-out problems. null: ``eval_size`` rows of the training data, drawn with
    ``seed``, are held out."""
    split: str = "train"
    """Split of a Hugging Face dataset folder."""
    eval_split: str | None = None
    """Split with the held-out problems, in ``eval_path`` or, if that is null, in ``path``."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages with ``role`` and ``content``. Use
    dots for columns inside objects, as in ``answer_column``."""
    as_chat: bool = False
    """Wrap a text prompt as one user message. Use it for chat models."""
    answer_column: str | None = "answer"
    """Column with the answer. Use dots for columns inside objects: ``reward_model.ground_truth``.
    null: no column holds the answer."""
    answer_pattern: str | None = None
    """Regular expression that finds the answer in a longer text. The answer is the group of the
    last match, or the whole match if there is no group. ``#### (.+)`` reads the answers of
    GSM8K."""
    last_turn: Literal["error", "answer", "drop"] = "error"
    """What to do with an assistant's turn at the end of the messages. ``answer`` removes it from
    the prompt and uses it as the answer. ``drop`` removes it. ``error`` stops the run."""
    tools_column: str | None = None
    """Column with the tools of a row, for the chat template: a list of JSON schemas, or its JSON
    text."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, e.g. ``enable_thinking: false``."""
    task: str | None = None
    """The reasoning-gym task."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    size: Positive = 6000
    """Number of training problems that a generated source makes."""
    eval_size: Annotated[int, Field(ge=0)] = 512
    """Number of problems to evaluate on. With 0 nothing is held out or evaluated."""
    eval_on_train: bool = False
    """Evaluate on ``eval_size`` of the training problems and hold out none. Such an evaluation
    measures memorization."""
    repeat_in_step: bool = False
    """Allow a step to use a problem several times if there are fewer problems than it needs."""
    seed: int = 0
    max_prompt_tokens: Positive = 1024
    on_long_prompt: Literal["error", "drop"] = "error"
    """What to do with a row whose prompt has more than ``max_prompt_tokens`` tokens. ``error``
    stops the run. ``drop`` leaves the row out and counts it."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with a row that cannot be used (docs/data.md). ``error`` stops the run. ``drop``
    leaves the row out and counts it."""
    reward: RewardConfig = RewardConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def file_sources_have_a_path(self) -> Self:
        if self.source in ("jsonl", "parquet", "huggingface") and self.path is None:
            raise ValueError(f"source={self.source} reads a file: set data.path [RL2001]")
        return self

    @model_validator(mode="after")
    def generated_sources_read_no_file(self) -> Self:
        generated = self.source in ("arithmetic", "reasoning_gym")
        for name, path in (("path", self.path), ("eval_path", self.eval_path)):
            if generated and path is not None:
                raise ValueError(
                    f"source={self.source} makes its problems and would ignore {name}={path}: "
                    "choose data=jsonl, parquet or huggingface, or drop it"
                )
        return self

    @model_validator(mode="after")
    def only_dataset_folders_have_splits(self) -> Self:
        if self.source != "huggingface" and (self.split != "train" or self.eval_split is not None):
            raise ValueError(
                f"source={self.source} has no splits: drop data.split and data.eval_split, "
                "or name a second file with data.eval_path"
            )
        return self

    @model_validator(mode="after")
    def reasoning_gym_names_its_task(self) -> Self:
        if self.source == "reasoning_gym" and self.task is None:
            raise ValueError(
                "source=reasoning_gym needs data.task, e.g. data.task=basic_arithmetic"
            )
        return self

    @model_validator(mode="after")
    def only_dataset_folders_have_configurations(self) -> Self:
        if self.source != "huggingface" and self.name is not None:
            raise ValueError(
                f"source={self.source} has no configurations and would ignore name={self.name}: "
                "drop it"
            )
        return self

    @model_validator(mode="after")
    def generated_rows_are_read_as_they_are_made(self) -> Self:
        if self.source not in ("arithmetic", "reasoning_gym"):
            return self
        ignored = {"tools_column": self.tools_column, "answer_pattern": self.answer_pattern}
        ignored["last_turn"] = None if self.last_turn == "error" else self.last_turn
        for key, value in ignored.items():
            if value is not None:
                raise ValueError(
                    f"source={self.source} makes its rows and would ignore {key}={value}: drop it"
                )
        return self

    @model_validator(mode="after")
    def the_answer_comes_from_somewhere(self) -> Self:
        if self.answer_column == self.prompt_column:
            raise ValueError(
                f"prompt_column and answer_column are both {self.prompt_column}: for messages that "
                "end with the answer set answer_column=null and last_turn=answer"
            )
        if self.last_turn == "answer" and self.answer_column not in (None, "answer"):
            raise ValueError(
                "last_turn=answer makes the assistant's last turn the answer and would ignore "
                f"answer_column={self.answer_column}: set last_turn=drop to take the answer from "
                "the column, or answer_column=null"
            )
        if self.answer_column is not None or self.last_turn == "answer":
            return self
        for key, function in self.reward.functions.items():
            if function in ("exact", "math_verify"):
                raise ValueError(
                    f"answer_column=null leaves {key.removeprefix('data.')}={function} without an "
                    "answer: name its column, or set last_turn=answer"
                )
        return self

    @model_validator(mode="after")
    def the_answer_pattern_has_one_group_at_most(self) -> Self:
        if self.answer_pattern is None:
            return self
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            raise ValueError(
                f"answer_pattern={self.answer_pattern} is no regular expression: {error}"
            ) from error
        if groups > 1:
            raise ValueError(
                f"answer_pattern={self.answer_pattern} has {groups} groups and one is the answer: "
                "write the others as (?:...)"
            )
        return self

    @model_validator(mode="after")
    def template_arguments_are_not_ours(self) -> Self:
        if ours := sorted(OURS_IN_A_TEMPLATE & self.template_args.keys()):
            raise ValueError(
                f"template_args has {ours[0]}, which rltrain gives to the chat template itself: "
                "drop it (tools come from data.tools_column)"
            )
        return self

    @model_validator(mode="after")
    def one_set_is_evaluated(self) -> Self:
        other = self.eval_path is not None or self.eval_split is not None
        if other and self.eval_on_train:
            raise ValueError(
                "eval_on_train=true evaluates on training problems and would ignore eval_path and "
                "eval_split: drop one"
            )
        if self.eval_size == 0 and (other or self.eval_on_train):
            raise ValueError(
                "eval_size=0 evaluates nothing and would ignore eval_path, eval_split and "
                "eval_on_train: raise it or drop them"
            )
        return self

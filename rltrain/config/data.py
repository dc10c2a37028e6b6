"""Where prompts come from and what rewards a response."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]

BUILT_IN_REWARDS = ("exact", "math_verify", "reasoning_gym")


class RewardConfig(Section):
    function: str = "exact"
    """``exact``, ``math_verify``, ``reasoning_gym`` or the dotted path of a function
    ``(response: str, answer: object, **columns) -> float``."""
    text: Literal["raw", "clean"] = "raw"
    """What ``response`` is: the text as sampled, or without the tokenizer's special tokens. Without
    them ``<|channel|>final<|message|>42`` reads ``final42``. The token or stop string that ended
    the response is in neither."""
    success_at: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """From which reward on a response counts as correct. null: what the function declares, which is
    1 for the built-in ones; where it declares nothing, no accuracy is logged."""
    num_workers: Positive = 8
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops when more than this share of a step's rewards timed out or crashed."""
    shuffle: bool = False
    """Permute rewards over the step: a control that must not learn."""

    @model_validator(mode="after")
    def the_function_is_built_in_or_a_dotted_path(self) -> Self:
        if "." not in self.function and self.function not in BUILT_IN_REWARDS:
            raise ValueError(
                f"function={self.function}: expected one of {', '.join(BUILT_IN_REWARDS)} or the "
                "dotted path of a function, e.g. my_rewards.score"
            )
        return self


OURS_IN_A_TEMPLATE = frozenset(
    {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "chat_template", "return_dict", "return_tensors", "padding", "truncation"}
    | {"max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of a chat template, or of the call that applies it, that are not the user's to set."""


class DataConfig(Section):
    source: Literal["arithmetic", "jsonl", "parquet", "huggingface", "reasoning_gym"] = "arithmetic"
    path: str | None = None
    """File, folder of files or pattern of files (``shards/*.parquet``) of ``jsonl`` and
    ``parquet``; dataset folder of ``huggingface``."""
    name: str | None = None
    """The configuration of a Hugging Face dataset folder that has several, e.g. ``main``."""
    eval_path: str | None = None
    """Held-out problems. Null holds out ``eval_size`` rows, drawn with ``seed``, of the data."""
    split: str = "train"
    """The split of a Hugging Face dataset folder."""
    eval_split: str | None = None
    """The split with the held-out problems, of ``eval_path`` or, when that is null, of ``path``."""
    prompt_column: str = "prompt"
    """Text, or a list of chat messages with ``role`` and ``content``. Dots go into objects, as in
    ``answer_column``."""
    as_chat: bool = False
    """Wrap a prompt that is text as one user message, for models that were tuned to chat."""
    answer_column: str | None = "answer"
    """Dots go into objects: ``reward_model.ground_truth``. Null: no column holds the answer."""
    answer_pattern: str | None = None
    """Regular expression that finds the answer in a longer text: its group, or all of it, in its
    last match. ``#### (.+)`` reads GSM8K's answers."""
    last_turn: Literal["error", "answer", "drop"] = "error"
    """What becomes of the assistant's turn at the end of the messages. ``answer`` takes it off the
    prompt and makes it the answer, ``drop`` takes it off."""
    tools_column: str | None = None
    """Tools of the row as JSON schemas, a list or its JSON text, for the chat template."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, e.g. ``enable_thinking: false``."""
    task: str | None = None
    """The reasoning-gym task."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    size: Positive = 6000
    """How many training problems a generated source makes."""
    eval_size: Annotated[int, Field(ge=0)] = 512
    """How many problems to evaluate on. 0 holds out none and evaluates nothing."""
    eval_on_train: bool = False
    """Evaluate on ``eval_size`` of the training problems and hold out none. Such an evaluation
    measures memory."""
    repeat_in_step: bool = False
    """Let a step take a problem several times when there are fewer than it needs."""
    seed: int = 0
    max_prompt_tokens: Positive = 1024
    on_long_prompt: Literal["error", "drop"] = "error"
    on_bad_row: Literal["error", "drop"] = "error"
    """What a row that cannot be used does (docs/data.md): end the run, or be left out and
    counted."""
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def file_sources_have_a_path(self) -> Self:
        if self.source in ("jsonl", "parquet", "huggingface") and self.path is None:
            raise ValueError(f"source={self.source} reads a file: set data.path")
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
        given = {"tools_column": self.tools_column, "answer_pattern": self.answer_pattern}
        given["last_turn"] = None if self.last_turn == "error" else self.last_turn
        for key, value in given.items():
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
        judged = self.reward.function in ("exact", "math_verify")
        if self.answer_column is None and self.last_turn != "answer" and judged:
            raise ValueError(
                f"answer_column=null leaves reward.function={self.reward.function} without an "
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

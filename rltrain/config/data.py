"""Where prompts come from and what rewards a response."""

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
    num_workers: Positive = 1
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


class DataConfig(Section):
    source: Literal["arithmetic", "jsonl", "parquet", "huggingface", "reasoning_gym"] = "arithmetic"
    path: str | None = None
    """File or dataset folder of ``jsonl``, ``parquet`` and ``huggingface``."""
    eval_path: str | None = None
    """Held-out problems. Null holds out ``eval_size`` rows, drawn with ``seed``, of the data."""
    split: str = "train"
    """The split of a Hugging Face dataset folder."""
    eval_split: str | None = None
    """The split with the held-out problems, of ``eval_path`` or, when that is null, of ``path``."""
    prompt_column: str = "prompt"
    """Text, or a list of chat messages with ``role`` and ``content``."""
    as_chat: bool = False
    """Wrap a prompt that is text as one user message, for models that were tuned to chat."""
    answer_column: str = "answer"
    task: str | None = None
    """The reasoning-gym task."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    size: Positive = 6000
    """How many training problems a generated source makes."""
    eval_size: Positive = 512
    seed: int = 0
    max_prompt_tokens: Positive = 64
    on_long_prompt: Literal["error", "drop"] = "error"
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

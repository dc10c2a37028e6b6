"""The type of a documented metric, and the denominators that several metrics share."""

import re
from dataclasses import dataclass, field
from typing import Literal

Section = Literal["learning", "mismatch", "routing", "rollout", "policy", "performance"]
When = Literal["step", "sampled", "evaluation"]
Better = Literal["higher", "lower", "neither"]
FIELDS = {"age": r"\d+", "layer": r"\d+", "part": r"\d+", "stat": r"\w+", "reward_part": r"\w+"}


@dataclass(frozen=True)
class Metric:
    """One metric, or one family of them.

    ``when`` is ``sampled`` for what is measured on the first and every
    ``routing_replay.sample_every``-th step, ``evaluation`` for what needs the held-out problems.
    ``denominator`` says what the mean is over; ``-`` where nothing is divided.
    """

    name: str
    formula: str
    denominator: str
    unit: str = "1"
    when: When = "step"
    better: Better = "neither"
    section: Section = field(kw_only=True)

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = re.split(r"\{(\w+)\}", self.name)  # literals, and fields between them
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = (FIELDS[name] for name in parts[1::2])
        return re.compile("".join(parts))

    @property
    def glob(self) -> str:
        """The name for wandb's ``define_metric``, which knows ``*`` at the end only."""
        return re.sub(r"\{.*", "*", self.name)


RESPONSE_TOKENS = "response tokens of the step"
SEQUENCES = "responses of the step"
SCORED = "responses whose reward was computed"
GROUPS = "prompts with a scored response"
SAMPLED_GROUPS = "prompts sampled in the step"
COMPARED = "responses with a token to compare"
CORRECTED = "response tokens of the loss before rejection"
CORRECTED_SEQUENCES = "responses with such a token"
VALUED = "tokens in the loss"
PARTS = "a number that the reward function returned beside the reward, by its name (docs/data.md)"
HELD_OUT = "held-out problems"
SCORED_HELD_OUT = "held-out problems whose reward was computed"
VERDICTS = "left out unless data.reward.success_at or the reward function says which these are"
LOSS_TOKENS = "tokens in the loss, mean over the step's updates"
AGGREGATED = "by algorithm.aggregation, mean over the step's updates"
UPDATES = "optimizer updates of the step"
ROWS = "captured rows x layers"

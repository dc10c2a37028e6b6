"""One forward and backward pass as a file, and how far two of them are apart. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

HEADER = "rltrain.pass"
TENSORS = ("tokens", "seq_lens", "logprobs", "loss")
GRADIENT = "gradient/"


@dataclass(frozen=True, eq=False, kw_only=True)
class Pass:
    """What a layout computed for some sequences, laid end to end like `rltrain.batch.Batch`."""

    tokens: Tensor  # int64  # [N]
    seq_lens: Tensor  # int64  # [B]
    logprobs: Tensor  # float32, 0 for the first token of every sequence  # [N]
    loss: Tensor  # float64, minus their mean  # []
    gradients: Mapping[str, Tensor]  # of the loss, fp32, by Hugging Face name
    about: str  # model and layout, for who reads it

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, in place of one that is there."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        tensors |= {GRADIENT + name: value for name, value in self.gradients.items()}
        beside = Path(f"{path}.partial")
        contiguous = {name: value.contiguous() for name, value in tensors.items()}
        save_file(contiguous, beside, {HEADER: json.dumps(self.about)})
        beside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; ValueError naming the file when it is something else."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{path}: expected a whole pass file, found {error} [RL7004]"
            ) from error
        if HEADER not in metadata or not set(TENSORS) <= set(tensors):
            raise ValueError(
                f"{path}: expected a pass file, with metadata {HEADER}, as `rltrain routes record` "
                f"and `replay` write it, found metadata {sorted(metadata)}"
                " [RL7004]"
            )
        fixed = {name: tensors.pop(name) for name in TENSORS}
        gradients = {name.removeprefix(GRADIENT): value for name, value in tensors.items()}
        return cls(**fixed, gradients=gradients, about=json.loads(metadata[HEADER]))


@dataclass(frozen=True)
class PassErrors:
    """Largest errors, each relative to the largest entry of the same tensor."""

    logprobs: float
    worst_token: int  # whose log-probability is off most, on the token axis
    loss: float
    gradients: dict[str, float]

    @property
    def largest(self) -> float:
        return max(self.logprobs, self.loss, *self.gradients.values())


def compare_passes(actual: Pass, expected: Pass) -> PassErrors:
    """How far ``actual`` is from ``expected``.

    Raises:
        ValueError: they are of other tokens or of other parameters.
    """
    same_tokens = torch.equal(actual.tokens, expected.tokens)
    if not same_tokens or not torch.equal(actual.seq_lens, expected.seq_lens):
        raise ValueError("the passes are of different tokens: make both on the same [RL7004]")
    shapes = [{n: tuple(x.shape) for n, x in p.gradients.items()} for p in (actual, expected)]
    if shapes[0] != shapes[1]:
        differ = sorted(n for n, _ in shapes[0].items() ^ shapes[1].items())
        raise ValueError(
            f"the passes are of different models: {len(differ)} parameters are in one alone or "
            f"have another shape, the first {differ[0]}"
            " [RL7004]"
        )
    return PassErrors(
        logprobs=relative_error(actual.logprobs, expected.logprobs),
        worst_token=int((actual.logprobs - expected.logprobs).abs().argmax()),
        loss=relative_error(actual.loss, expected.loss),
        gradients={
            name: relative_error(value, expected.gradients[name])
            for name, value in actual.gradients.items()
        },
    )


def relative_error(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Largest error over the largest entry of ``expected``, or of ``scale``.

    NaN anywhere gives infinity.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    largest = (expected if scale is None else scale).abs().max().clamp(min=1e-8)
    error = float((actual - expected).abs().max() / largest) if actual.numel() else 0.0
    return error if error == error else float("inf")

"""Routes as a file: what was chosen, for which tokens, by whom."""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rltrain.routing.codec import decode, route_dtype

HEADER = "rltrain.routes"
TENSORS = ("ids", "route_mask", "seq_lens", "tokens")
OPTIONAL = ("margins",)


@dataclass(frozen=True, eq=False, kw_only=True)
class Routes:
    """Routes of some sequences, laid end to end like `rltrain.batch.Batch`.

    Raises:
        ValueError: when shapes, dtypes, layers or ids do not fit one another.
    """

    ids: Tensor  # uint8 or int16 as `rltrain.routing.codec` stores them  # [N, L, K]
    route_mask: Tensor  # bool, rows whose experts are known  # [N]
    seq_lens: Tensor  # int64, sums to N  # [B]
    tokens: Tensor  # int64  # [N]
    layers: tuple[int, ...]  # the layers that have a router, among all, counted from 0
    num_experts: int
    weight_version: int
    producer: str  # e.g. "vLLM 0.30.0"
    margins: Tensor | None = None
    """float32, of each choice (`rltrain.routing.agreement.choice_margin`), if known  # [N, L]"""

    def __post_init__(self) -> None:
        stored = getattr(torch, str(route_dtype(self.num_experts)))
        dtypes = (stored, torch.bool, torch.int64, torch.int64)
        for name, dtype, dims in zip(TENSORS, dtypes, (3, 1, 1, 1), strict=True):
            value = getattr(self, name)
            if value.dtype != dtype or value.ndim != dims:
                raise ValueError(
                    f"{name}: expected {dtype} with {dims} dims for {self.num_experts} experts, "
                    f"found {value.dtype} {list(value.shape)}"
                    " [RL7004]"
                )
        sizes = len(self.ids), len(self.route_mask), len(self.tokens), int(self.seq_lens.sum())
        if len(set(sizes)) > 1 or bool((self.seq_lens < 1).any()):
            raise ValueError(
                "expected one row a token and sequences of 1 token or more, found "
                f"{sizes[0]} rows, a mask of {sizes[1]}, {sizes[2]} tokens, seq_lens "
                f"{self.seq_lens.tolist()[:8]} summing to {sizes[3]}"
                " [RL7004]"
            )
        if list(self.layers) != sorted(set(self.layers)) or len(self.layers) != self.ids.shape[1]:
            raise ValueError(
                f"expected {self.ids.shape[1]} different layers in order, found {self.layers}"
                " [RL7004]"
            )
        of_rows = self.ids.shape[:2]
        if (m := self.margins) is not None and (m.shape, m.dtype) != (of_rows, torch.float32):
            raise ValueError(
                f"margins: expected torch.float32 of {list(of_rows)}, found {m.dtype} "
                f"{list(m.shape)}"
                " [RL7004]"
            )
        if self.ids.numel() and (top := int(decode(self.ids).max())) >= self.num_experts:
            raise ValueError(
                f"expected ids below num_experts={self.num_experts}, found {top} [RL7004]"
            )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, in place of one that is there."""
        names = (*TENSORS, *OPTIONAL)
        values = {name: getattr(self, name) for name in names}
        tensors = {name: value.contiguous() for name, value in values.items() if value is not None}
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in names}
        about["checksum"] = _checksum(tensors, about)
        beside = Path(f"{path}.partial")
        save_file(tensors, beside, {HEADER: json.dumps(about)})
        beside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: naming the file, when it is cut short, something else or was changed.
        """
        tensors, about = _read(path)
        expected = about.pop("checksum", None)
        if (checksum := _checksum(tensors, about)) != expected:
            raise ValueError(
                f"{path}: checksum {checksum} is not {expected}, which was written with these "
                "routes: the file was changed; capture the routes again"
                " [RL7004]"
            )
        values: dict[str, Any] = tensors | about
        try:
            return cls(**values | {"layers": tuple(about["layers"])})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: the routes in it do not fit together: {error} [RL7004]"
            ) from error


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a whole safetensors file of routes, found one that is cut short or "
            f"something else ({error})"
            " [RL7004]"
        ) from error
    if HEADER not in metadata or set(tensors) - set(OPTIONAL) != set(TENSORS):
        raise ValueError(
            f"{path}: expected routes, with metadata {HEADER} and tensors {', '.join(TENSORS)}, "
            f"found metadata {sorted(metadata)} and tensors {sorted(tensors)[:8]}"
            " [RL7004]"
        )
    try:
        about = json.loads(metadata[HEADER])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: its metadata {HEADER} is not JSON: {error} [RL7004]") from error
    if not isinstance(about, dict):
        raise ValueError(
            f"{path}: expected a JSON object in metadata {HEADER}, found {about!r} [RL7004]"
        )
    return tensors, about


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the tensors, and what is said about them."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""Which decoder layers each pipeline stage holds.

Layers are numbered from 0 over the whole model. Multi-token-prediction layers are not decoder
layers: they have no number here. The results equal those of Megatron-core 0.16.1's
``get_num_layers_to_build`` and ``get_transformer_layer_offset`` (tests compare them). Those need
Megatron's configuration; these do not, so the controller can call them, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rltrain.config.policy import ParallelConfig

KEYS = "policy.parallel"


@dataclass(frozen=True)
class Pipeline:
    """How decoder layers are split over pipeline stages and, if interleaved, over their chunks.

    The forward pass visits chunk 0 of every stage, then chunk 1 of every stage, and so on.
    """

    stages: int = 1
    chunks: int = 1  # model chunks per stage: Megatron's virtual pipeline size, None there if 1
    first_stage_layers: int | None = None  # over all chunks of the stage; None: an even share
    last_stage_layers: int | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        return cls(
            parallel.pp, parallel.vpp, parallel.first_stage_layers, parallel.last_stage_layers
        )

    def check(self, num_layers: int) -> None:
        """Raises ValueError, with the remedy, if ``num_layers`` cannot be split like this."""
        self._check_sizes()
        fixed = self._fixed()
        rest, stages_left = num_layers - sum(fixed.values()), self.stages - len(fixed)
        if rest < 0 or bool(rest) != bool(stages_left) or (stages_left and rest % stages_left):
            taken = "".join(f" after {KEYS}.{key}={n}" for key, n in fixed.items())
            raise ValueError(
                f"{KEYS}.pp={self.stages}: expected the other {stages_left} stages to share out "
                f"{num_layers} decoder layers{taken} evenly, found {rest} for them. Change "
                f"{KEYS}.pp, or {KEYS}.first_stage_layers and {KEYS}.last_stage_layers"
                " [RL1010]"
            )
        shares = fixed | ({"pp": rest // stages_left} if stages_left else {})
        for key, layers in shares.items():
            if layers % self.chunks:
                raise ValueError(
                    f"{KEYS}.vpp={self.chunks}: expected it to divide the layers of every stage, "
                    f"found {layers} on a stage by {KEYS}.{key}. Change {KEYS}.vpp or {KEYS}.{key}"
                    " [RL1010]"
                )

    def chunk_layers(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """The layers of one chunk. Raises ValueError as `check` does."""
        sizes = self._chunk_sizes(num_layers)
        assert 0 <= stage < self.stages and 0 <= chunk < self.chunks, (stage, chunk, self)
        start = chunk * sum(sizes) + sum(sizes[:stage])
        return range(start, start + sizes[stage])

    def stage_layers(self, num_layers: int, stage: int) -> tuple[int, ...]:
        """The layers of all chunks of a stage, ascending. Raises ValueError as `check` does."""
        chunks = range(self.chunks)
        return tuple(n for chunk in chunks for n in self.chunk_layers(num_layers, stage, chunk))

    def _chunk_sizes(self, num_layers: int) -> list[int]:
        """Layers per chunk, by stage. All chunks of a stage have the same number of layers."""
        self.check(num_layers)
        fixed = self._fixed()
        share = (num_layers - sum(fixed.values())) // max(1, self.stages - len(fixed))
        layers = [share] * self.stages
        layers[0] = self.first_stage_layers or share
        layers[-1] = self.last_stage_layers or layers[-1]
        return [n // self.chunks for n in layers]

    def _fixed(self) -> dict[str, int]:
        shares = {
            "first_stage_layers": self.first_stage_layers,
            "last_stage_layers": self.last_stage_layers,
        }
        return {key: layers for key, layers in shares.items() if layers is not None}

    def _check_sizes(self) -> None:
        fixed = self._fixed()
        for key, size in {"pp": self.stages, "vpp": self.chunks, **fixed}.items():
            if size < 1:
                raise ValueError(
                    f"{KEYS}.{key}: expected at least 1, found {size}. Raise it [RL1010]"
                )
        if self.stages == 1 and (fixed or self.chunks > 1):
            extra_keys = ", ".join([*fixed, *(["vpp"] if self.chunks > 1 else [])])
            raise ValueError(
                f"{KEYS}.pp=1 is one stage with all layers, found {extra_keys} beside it. "
                f"Raise {KEYS}.pp or remove {extra_keys}"
                " [RL1010]"
            )
        if self.stages == len(fixed) and self.chunks > 1:
            # Megatron-core 0.16.1 divides by the zero stages between the two.
            raise ValueError(
                f"{KEYS}.vpp={self.chunks} with {KEYS}.pp=2: expected one of first_stage_layers "
                f"and last_stage_layers, found both. Remove one: the other stage gets the rest"
                " [RL1010]"
            )


def route_layers(
    pipeline: Pipeline,
    num_layers: int,
    moe_layers: Sequence[int],
    stage: int,
    chunk: int | None = None,
) -> tuple[int, ...]:
    """The layers of one chunk that have a router, ascending. None: of all chunks of the stage.

    Args:
        moe_layers: the layers that have a router, ascending
    """
    if chunk is None:
        layers: Sequence[int] = pipeline.stage_layers(num_layers, stage)
    else:
        layers = pipeline.chunk_layers(num_layers, stage, chunk)
    return tuple(layer for layer in moe_layers if layer in layers)


def route_blocks(pipeline: Pipeline, num_layers: int, moe_layers: Sequence[int]) -> tuple[int, ...]:
    """How many layers with a router each model chunk holds, in the order of the layers.

    An object that holds the routes of one such block is read by the ranks of one stage only. A
    chunk without a router has no block. The sizes sum to ``len(moe_layers)``.
    """
    assert list(moe_layers) == sorted({*moe_layers} & {*range(num_layers)}), moe_layers
    sizes = (
        len(route_layers(pipeline, num_layers, moe_layers, stage, chunk))
        for chunk in range(pipeline.chunks)
        for stage in range(pipeline.stages)
    )
    return tuple(size for size in sizes if size)

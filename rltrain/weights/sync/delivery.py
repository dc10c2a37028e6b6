"""The tensors that a weight sync must deliver, and those that have arrived. Pure.

vLLM accepts repeated tensors, tensors of another dtype and missing tensors without an error. So the
receiver checks every bucket here before it loads anything.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.huggingface.quantized import scale_shape
from rltrain.weights.mapping.mtp import is_skipped_mtp
from rltrain.weights.sync.engine_fp8 import is_quantized
from rltrain.weights.sync.stream import Bucket


class TensorForm(NamedTuple):
    """Dtype and shape of one tensor."""

    dtype: str  # "bfloat16"
    shape: tuple[int, ...]


def expected_tensors(arch: Architecture, dtype: str, *, fp8: bool) -> dict[str, TensorForm]:
    """Every tensor that `rltrain.weights.sync.sender` sends of a model, by name."""
    forms = {}
    for parameter in model_parameters(arch):
        kept = "float32" if parameter.rule.kind == "buffer" else dtype
        for tensor in () if parameter.copy else parameter.tensors:
            if fp8 and is_quantized(tensor):
                forms[tensor.name] = TensorForm("float8_e4m3fn", tensor.shape)
                scales = TensorForm("float32", scale_shape(tensor.shape))
                forms[f"{tensor.name}_scale_inv"] = scales
            else:
                forms[tensor.sent_as] = TensorForm(kept, tensor.sent_shape(arch.num_experts))
    return forms


class Delivery:
    """One weight sync, bucket by bucket. The buckets of a pipeline stage come in order, those of
    different stages in any.

    Args:
        arch: the engine's model; MTP layers that it skips may be sent too
        expected: the tensors of the model, by name
    """

    def __init__(self, arch: Architecture, expected: Mapping[str, TensorForm]) -> None:
        self._arch = arch
        self._expected = expected
        self._sent_by: dict[str, int] = {}  # stage of what was accepted, by name
        self._num_stages: int | None = None  # once a bucket has come
        self._counts = Counter[int]()  # buckets, by stage
        self._ended: set[int] = set()  # stages whose last bucket was accepted

    @property
    def names(self) -> set[str]:
        """Of the tensors that were accepted."""
        return set(self._sent_by)

    @property
    def num_buckets(self) -> int:
        return self._counts.total()

    def accept(self, bucket: Bucket) -> None:
        """Raises ``ValueError``: the bucket is out of order, or has a wrong tensor."""
        self._check_order(bucket)
        stage, names = bucket["stage"], [entry["name"] for entry in bucket["tensors"]]
        counts = Counter([*names, *self._sent_by])
        if repeated := sorted({name for name in names if counts[name] > 1}):
            stages = sorted({stage, *(self._sent_by.get(name, stage) for name in repeated)})
            raise ValueError(
                f"weight sync: tensors sent twice: {repeated}, by pipeline stages {stages}"
            )
        for entry in bucket["tensors"]:
            self._check(entry["name"], TensorForm(entry["dtype"], tuple(entry["shape"])))
        self._sent_by |= dict.fromkeys(names, stage)
        self._num_stages = bucket["stages"]
        self._counts[stage] += 1
        if bucket["last"]:
            self._ended.add(stage)

    def _check_order(self, bucket: Bucket) -> None:
        stage, num_stages = bucket["stage"], self._num_stages or bucket["stages"]
        if bucket["stages"] != num_stages or not 0 <= stage < num_stages:
            raise ValueError(
                f"weight sync: expected buckets of pipeline stages 0 to {num_stages - 1}, found "
                f"one of stage {stage} of {bucket['stages']}: all senders must belong to one policy"
            )
        ended, count = stage in self._ended, self._counts[stage]
        if ended or bucket["index"] != count:
            end = ", which was the last" if ended else ""
            raise ValueError(
                f"weight sync: expected {'nothing after ' if end else ''}bucket {count - ended}"
                f"{end}, found bucket {bucket['index']} of pipeline stage {stage}: deliver every "
                "bucket once and in order"
            )

    def _check(self, name: str, form: TensorForm) -> None:
        if is_skipped_mtp(name, self._arch):
            return
        if name not in self._expected:
            raise ValueError(
                f"weight sync: expected tensors of a {self._arch.family}, found {name}: the engine "
                "was started from another model than the policy's"
            )
        expected = self._expected[name]
        if form != expected:
            raise ValueError(
                f"weight sync: expected {name} as {expected.dtype} of shape "
                f"{list(expected.shape)}, found {form.dtype} of shape {list(form.shape)}: "
                "rollout.dtype and the model folder must be the same on both sides"
            )

    def missing(self) -> list[str]:
        """Names of expected tensors that have not arrived."""
        return sorted(self._expected.keys() - self._sent_by.keys())

    def check_ended(self) -> None:
        """Raises ``ValueError``: a stage's last bucket has not arrived."""
        if going_on := sorted(set(range(self._num_stages or 1)) - self._ended):
            raise ValueError(
                f"weight sync: finished after {self.num_buckets} buckets, none of them the last of "
                f"pipeline stages {going_on}: deliver every bucket before finishing"
            )

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
    """One weight sync, bucket by bucket.

    Args:
        arch: the engine's model; MTP layers that it skips may be sent too
        expected: the tensors of the model, by name
    """

    def __init__(self, arch: Architecture, expected: Mapping[str, TensorForm]) -> None:
        self._arch = arch
        self._expected = expected
        self.names: set[str] = set()  # of what was accepted
        self.num_buckets = 0
        self.is_complete = False  # the last bucket was accepted

    def accept(self, bucket: Bucket) -> None:
        """Raises ``ValueError``: the bucket is out of order, or has a wrong tensor."""
        if self.is_complete or bucket["index"] != self.num_buckets:
            end = ", which was the last" if self.is_complete else ""
            raise ValueError(
                f"weight sync: expected {'nothing after ' if end else ''}bucket "
                f"{self.num_buckets - bool(end)}{end}, found bucket {bucket['index']}: deliver "
                "every bucket once and in order"
            )
        names = [entry["name"] for entry in bucket["tensors"]]
        counts = Counter([*names, *self.names])
        if repeated := sorted(name for name in names if counts[name] > 1):
            raise ValueError(f"weight sync: tensors sent twice: {sorted(set(repeated))}")
        for entry in bucket["tensors"]:
            self._check(entry["name"], TensorForm(entry["dtype"], tuple(entry["shape"])))
        self.names.update(names)
        self.num_buckets += 1
        self.is_complete = bucket["last"]

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
        return sorted(self._expected.keys() - self.names)

    def check_ended(self) -> None:
        """Raises ``ValueError``: the last bucket has not arrived."""
        if not self.is_complete:
            raise ValueError(
                f"weight sync: finished after {self.num_buckets} buckets, none of them the last: "
                "deliver every bucket before finishing"
            )

"""Expert ids are the same after storing as before."""

import numpy as np
import pytest
import torch

from rltrain.routing import codec
from rltrain.routing.codec import decode, encode


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "int16"), (65536, "int16")]
)
def test_every_id_survives(num_experts: int, dtype: str) -> None:
    ids = np.arange(num_experts, dtype=np.int64)
    stored = encode(ids, num_experts)
    assert stored.dtype == dtype
    assert decode(torch.from_numpy(stored)).tolist() == ids.tolist()


@pytest.mark.parametrize("num_experts", [0, 65537])
def test_more_experts_than_16_bits_are_refused(num_experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts={num_experts}"):
        codec.route_dtype(num_experts)


def test_only_stored_dtypes_are_decoded() -> None:
    with pytest.raises(ValueError, match="int32"):
        decode(torch.zeros(1, dtype=torch.int32))

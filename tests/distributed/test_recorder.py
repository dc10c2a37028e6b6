"""What routers did is gathered over ranks as bytes: neither gloo nor NCCL knows int16."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.config.policy import ParallelConfig
from tests.distributed.run_ranks import rendezvous, run_ranks

pytestmark = pytest.mark.integration


def test_every_dtype_is_gathered_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    run_ranks(gather, 4, tmp_path)


def gather(rank: int, folder: Path) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.passes.passes import _all_gather

    init = rendezvous(folder, "world")
    mesh = init_mesh(ParallelConfig(tp=2, cp=2), rank, 4, init, torch.device("cpu"))
    whole = torch.arange(-300, 300).view(4, 25, 3, 2)  # ids above 255, and negative as int16
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.float32):
        expected = whole.to(dtype)
        found = _all_gather(expected[rank], mesh)
        assert found.dtype == dtype and torch.equal(found, expected.flatten(0, 1)), dtype
        strided = _all_gather(expected[rank].transpose(1, 2), mesh)
        assert torch.equal(strided, expected.flatten(0, 1).transpose(1, 2)), dtype
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)type"):
        dist.all_reduce(torch.zeros(1, dtype=torch.int16))
    destroy_mesh()

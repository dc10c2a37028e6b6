"""The transport of weights, by the placement of the run."""

from typing import Literal

import pytest

from rltrain.controller.weight_links import check_shared
from rltrain.planning.nodes import LOCAL, Slot
from rltrain.planning.placement import Placement
from rltrain.planning.weight_transport import choose_transport

CPU = Placement("cpu")
A, B = Slot(LOCAL, 0), Slot(LOCAL, 1)
APART = Placement("cuda", (LOCAL,), policy=(A,), engines=((B,),))
SHARED = Placement("cuda", (LOCAL,), policy=(A,), engines=((A,),))


@pytest.mark.parametrize(
    ("placement", "transport"), [(CPU, "broadcast"), (APART, "broadcast"), (SHARED, "ipc")]
)
def test_auto_takes_the_fastest(
    placement: Placement, transport: Literal["ipc", "broadcast"]
) -> None:
    assert choose_transport("auto", placement) == transport
    assert choose_transport(transport, placement) == transport


def test_ipc_needs_a_policy_rank_on_every_gpu_of_an_engine() -> None:
    check_shared(["GPU-b"], ["GPU-a", "GPU-b"])
    with pytest.raises(ValueError, match=r"ipc: .* found none on \['GPU-c'\]: use .*=broadcast"):
        check_shared(["GPU-b", "GPU-c"], ["GPU-a", "GPU-b"])

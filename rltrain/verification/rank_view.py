"""The rows of some routes that one rank's routers read. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rltrain.parallel.token_layout import TokenGrid, gather_rows, layout_tokens
from rltrain.routing.align import router_targets
from rltrain.routing.codec import decode
from rltrain.verification.routes_file import Routes


@dataclass(frozen=True, eq=False)
class RankView:
    """The rows of a rank's routers, all sequences being one micro-batch."""

    layers: tuple[int, ...]
    index: (
        Tensor  # the token each row reads, `rltrain.parallel.token_layout.PAD` for padding  # [S]
    )
    experts: Tensor  # int64  # [S, L, K]
    replayed: Tensor  # bool; False: the row routes natively  # [S]


def rank_view(routes: Routes, grid: TokenGrid, layers: Sequence[int]) -> RankView:
    """Gather as a micro-batch of the policy does.

    Args:
        layers: those of the rank, some of ``routes.layers``
    """
    index = layout_tokens(routes.seq_lens.tolist(), grid).routers
    ids = routes.ids[:, [routes.layers.index(layer) for layer in layers]]
    experts = router_targets(ids, index, routes.num_experts)
    return RankView(
        tuple(layers), index, decode(experts), gather_rows(routes.route_mask, index, True)
    )

"""Causal attention over packed sequences in pure torch, with and without context parallelism.

Layers may have a sliding window, and heads may have attention sinks.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from rltrain.parallel.token_layout import TokenGrid, context_parallel_slice

# One more attention call costs about as much as one more sequence of this length.
_CALL_COST_IN_TOKENS = 256


class TorchAttention(torch.nn.Module):
    """Causal attention over packed sequences by torch's scaled dot product attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.tp_group = pg_collection.tp
        self.window = _window(config, layer_number)
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = divide(config.num_attention_heads, config.tensor_model_parallel_size)
            self.softmax_offset = torch.nn.Parameter(
                torch.full(
                    (heads,),
                    float("nan"),
                    dtype=config.params_dtype,
                    device=torch.cuda.current_device(),
                )
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [t, heads, d], key and value [t, kv_heads, d], packed. Returns [t, heads * d]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError(
                "the torch backend reads packed sequences: pass packed_seq_params (thd)"
            )
        assert attention_mask is None and attention_bias is None
        lengths = _lengths(packed_seq_params)
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        if sum(lengths) != query.shape[0] * cp_size:
            raise ValueError(
                f"cu_seqlens end at {sum(lengths)}, but there are {query.shape[0]} tokens on each "
                f"of {cp_size} context-parallel ranks: every token, padding included, must belong "
                "to a sequence"
            )
        attention = partial(
            packed_causal_attention,
            scale=self.scale,
            window=self.window,
            sinks=self.softmax_offset,
        )
        if self.cp_group is None:
            return attention(query, key, value, lengths)
        # This rank's queries read the keys of all ranks, which are gathered and then put in order.
        positions, order = _zigzag(packed_seq_params, self.cp_group, query.device)
        key, value = (
            gather_from_sequence_parallel_region(x, group=self.cp_group).index_select(0, order)
            for x in (key, value)
        )
        return attention(query, key, value, lengths, positions)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """As Transformer Engine's: the sinks, sharded over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """How many tokens a token of this layer attends to, itself included. None: no limit."""
    size, layers = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(size, layers, layer_number):
        return None
    assert size is not None and size[1] == 0
    return size[0] + 1


def _lengths(packed: PackedSeqParams) -> list[int]:
    """Sequence lengths, padding included. Read once per micro-batch, not once per layer."""
    lengths = getattr(packed, "lengths", None)
    if lengths is None:
        ends = packed.cu_seqlens_q_padded
        ends = packed.cu_seqlens_q if ends is None else ends
        lengths = packed.lengths = [n for n in ends.diff().tolist() if n]
    return lengths


def _zigzag(
    packed: PackedSeqParams, group: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where context parallelism put the tokens. Computed once per micro-batch.

    Returns:
        the position of each of this rank's slots in its sequence  # [t]
        the slot of each token, where slots are counted rank after rank  # [t * cp]
    """
    zigzag = getattr(packed, "zigzag", None)
    if zigzag is None:
        lengths = _lengths(packed)
        by_rank = []
        for rank in range(group.size()):
            grid = TokenGrid(cp_size=group.size(), cp_rank=rank)
            by_rank.append([context_parallel_slice(torch.arange(n), grid) for n in lengths])
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        tokens = [x + start for slots in by_rank for x, start in zip(slots, starts, strict=True)]
        positions = torch.cat(by_rank[group.rank()])
        zigzag = packed.zigzag = positions.to(device), torch.cat(tokens).argsort().to(device)
    return zigzag


def packed_causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    positions: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every sequence to its own past.

    Args:
        query: of all tokens, or of an equal share of every sequence  # [t / cp, heads, d]
        key, value: of all tokens  # [t, kv_heads, d]
        lengths: tokens of each sequence
        positions: of the queries in their sequences; None for all in order  # [t / cp]
        scale: factor of the scores; None for 1 / sqrt(d)
        window: how many tokens a query attends to, its own included; None for no limit
        sinks: an additional logit of each head in every softmax, with no value  # [heads]

    Returns:
        [t / cp, heads * d_value]
    """
    cp_size = len(key) // len(query)
    queries = [n // cp_size for n in lengths]
    longest = max(lengths)
    if _separate_calls_are_cheaper(lengths):
        places = [None] * len(lengths) if positions is None else positions.split(queries)
        parts = zip(
            query.split(queries), key.split(lengths), value.split(lengths), places, strict=True
        )
        alone = partial(packed_causal_attention, scale=scale, window=window, sinks=sinks)
        return torch.cat([alone(q, k, v, [len(k)], p) for q, k, v, p in parts])
    # Padding goes to the right, where the causal mask hides it from every real token.
    mask = None
    if positions is not None or (window is not None and window < longest):
        mask = _visible(positions, queries, longest, window, query.device)
    q, k, v = (
        _padded(x, lens).transpose(1, 2)
        for x, lens in ((query, queries), (key, lengths), (value, lengths))
    )
    size = v.shape[3]
    if sinks is not None:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks / scale)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if sinks is not None:
        out = out[:, :, 1:, :size]
    place = _places(queries, query.device)
    return out.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, place)


def _separate_calls_are_cheaper(lengths: list[int]) -> bool:
    one_call = max(lengths) ** 2 * len(lengths)
    return one_call > sum(n**2 + _CALL_COST_IN_TOKENS**2 for n in lengths)


def _visible(
    positions: torch.Tensor | None,
    queries: list[int],
    longest: int,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    """Which keys each query attends to.  # bool [B or 1, 1, longest / cp, longest]"""
    read = torch.arange(longest, device=device).unsqueeze(0)
    if positions is not None:
        read = _padded(positions.unsqueeze(1), queries).squeeze(2)  # [B, longest / cp]
    behind = (read.unsqueeze(2) - torch.arange(longest, device=device)).unsqueeze(1)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Add the sinks as one more key, before all others, whose value is 0.

    Its score comes from an additional dimension that only this key has. So attention that needs no
    mask still needs none, and any kernel can compute it. A query is added before the others, to
    keep the causal mask in place; the caller drops its result. Eight dimensions are added, seven of
    them 0, to keep rows aligned.

    Args:
        q, k, v: [B, heads, positions, d]
        mask: [B or 1, 1, queries, keys]
        sinks: [heads], divided by the scale of the scores
    """
    score = sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1).to(q.dtype)
    q = F.pad(torch.cat([q, score], dim=3), (0, 7, 1, 0))
    first = (torch.arange(k.shape[3] + 8, device=k.device) == k.shape[3]).to(k.dtype)
    k = torch.cat([first.expand(*k.shape[:2], 1, -1), F.pad(k, (0, 8))], dim=2)
    v = F.pad(v, (0, 8, 1, 0))
    return q, k, v, None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)


def _padded(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Unpack sequences, with zeros after the shorter ones.  # [t, ...] -> [B, max, ...]"""
    rows = x.new_zeros(len(lengths) * max(lengths), *x.shape[1:])
    rows = rows.index_copy(0, _places(lengths, x.device), x)
    return rows.view(len(lengths), max(lengths), *x.shape[1:])


def _places(lengths: list[int], device: torch.device) -> torch.Tensor:
    """The index of each packed row once every sequence is as long as the longest.  # [t]"""
    size = torch.tensor(lengths, device=device)
    shift = torch.arange(len(lengths), device=device) * max(lengths) - (size.cumsum(0) - size)
    return torch.arange(sum(lengths), device=device) + shift.repeat_interleave(size)

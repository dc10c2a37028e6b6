"""Causal attention over packed sequences in pure torch, with and without context parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.parallel.tokens import TokenGrid, context_parallel_slice

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
                f"of {cp_size} context-parallel ranks: every token, padding too, belongs to a "
                "sequence"
            )
        if self.cp_group is None:
            return packed_causal_attention(query, key, value, lengths, scale=self.scale)
        # This rank's queries read the keys of all ranks: gathered rank by rank, then put in order.
        positions, order = _zigzag(packed_seq_params, self.cp_group, query.device)
        key, value = (
            gather_from_sequence_parallel_region(x, group=self.cp_group).index_select(0, order)
            for x in (key, value)
        )
        return packed_causal_attention(query, key, value, lengths, positions, scale=self.scale)


def _lengths(packed: PackedSeqParams) -> list[int]:
    """Sequence lengths, padding included; read once per micro-batch, not once per layer."""
    lengths = getattr(packed, "lengths", None)
    if lengths is None:
        ends = packed.cu_seqlens_q_padded
        ends = packed.cu_seqlens_q if ends is None else ends
        lengths = packed.lengths = [n for n in ends.diff().tolist() if n]
    return lengths


def _zigzag(
    packed: PackedSeqParams, group: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where context parallelism put the tokens; computed once per micro-batch.

    Returns:
        the position in its sequence of each of this rank's slots  # [t]
        which of the slots of all ranks, rank after rank, holds each token  # [t * cp]
    """
    found = getattr(packed, "zigzag", None)
    if found is None:
        lengths = _lengths(packed)
        by_rank = []
        for rank in range(group.size()):
            grid = TokenGrid(cp_size=group.size(), cp_rank=rank)
            by_rank.append([context_parallel_slice(torch.arange(n), grid) for n in lengths])
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        tokens = [x + start for own in by_rank for x, start in zip(own, starts, strict=True)]
        positions = torch.cat(by_rank[group.rank()])
        found = packed.zigzag = positions.to(device), torch.cat(tokens).argsort().to(device)
    return found


def packed_causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    positions: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of every sequence to its own past.

    Args:
        query: of every token, or of an equal share of every sequence's  # [t / cp, heads, d]
        key, value: of every token  # [t, kv_heads, d]
        lengths: of the sequences, in tokens
        positions: of the queries in their sequences, None for all in order  # [t / cp]

    Returns:
        [t / cp, heads * d_value]
    """
    cp_size = len(key) // len(query)
    queries = [n // cp_size for n in lengths]
    longest, count = max(lengths), len(lengths)
    one_call = longest**2 * count
    many_calls = sum(n**2 + _CALL_COST_IN_TOKENS**2 for n in lengths)
    if one_call > many_calls:
        own = [None] * count if positions is None else positions.split(queries)
        parts = zip(
            query.split(queries), key.split(lengths), value.split(lengths), own, strict=True
        )
        return torch.cat(
            [packed_causal_attention(q, k, v, [len(k)], p, scale) for q, k, v, p in parts]
        )
    # Padding goes to the right, where the causal mask already hides it from every real token.
    mask = None
    if positions is not None:
        read = _padded(positions.unsqueeze(1), queries).squeeze(2)  # [B, longest / cp]
        mask = read.unsqueeze(2) >= torch.arange(longest, device=query.device)
        mask = mask.unsqueeze(1)  # [B, 1, longest / cp, longest]
    q, k, v = (
        _padded(x, lens).transpose(1, 2)
        for x, lens in ((query, queries), (key, lengths), (value, lengths))
    )
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    place = _places(queries, query.device)
    return out.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, place)


def _padded(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Packed rows, a row per sequence, zeros behind the shorter. [t, ...] -> [B, max, ...]"""
    rows = x.new_zeros(len(lengths) * max(lengths), *x.shape[1:])
    rows = rows.index_copy(0, _places(lengths, x.device), x)
    return rows.view(len(lengths), max(lengths), *x.shape[1:])


def _places(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Where each packed row lies once every sequence is as long as the longest.  # [t]"""
    size = torch.tensor(lengths, device=device)
    shift = torch.arange(len(lengths), device=device) * max(lengths) - (size.cumsum(0) - size)
    return torch.arange(sum(lengths), device=device) + shift.repeat_interleave(size)

"""Every operation in plain PyTorch: the specification, the oracle of other providers, and a provider itself.

Works on any device. Results have the dtype of the inputs; sums and products of half-precision inputs are taken in
float32 and rounded once at the end.

Shapes: T tokens, H query heads, KVH key/value heads (H a multiple of KVH), D head size, S sequences, B blocks in the
longest table, R rotated features (R <= D), I intermediate features.

The cache of one layer is two tensors (num_blocks, block_size, KVH, D). Slot s is block s // block_size at offset
s % block_size; a sequence's position p lives in slot table[p // block_size] * block_size + p % block_size:

    table [7, 2]     block 7: positions 0 .. 15     block 2: positions 16 .. 31     (block_size 16)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from suimon.kernels.attention_plan import AttentionPlan, DecodeGroup, PrefillChunk
from suimon.kernels.linear_on_cpu import linear_on_cpu


def write_kv_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store ``key`` and ``value`` (T, KVH, D) at ``slots`` (T,) int64 of the caches, in place and in their dtype."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


def copy_blocks(key_cache: torch.Tensor, value_cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block ``source`` to block ``target`` for each (source, target), in order, in both caches."""
    for source, target in pairs:
        key_cache[target].copy_(key_cache[source])
        value_cache[target].copy_(value_cache[source])


def plan_attention(
    block_tables: torch.Tensor, query_lengths: Sequence[int], context_lengths: Sequence[int], block_size: int
) -> AttentionPlan:
    """What ``paged_attention`` needs to know of a step, to be shared by its layers.

    ``block_tables`` (S, B); ``query_lengths`` and ``context_lengths`` (S) are plain integers.
    """
    return AttentionPlan(block_tables, query_lengths, context_lengths, block_size)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    query_lengths: Sequence[int],
    context_lengths_list: Sequence[int],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Causal attention of ``query`` (T, H, D) over the paged cache, prompts and decodes mixed; returns (T, H, D).

    Sequence s owns rows ``query_starts[s] .. query_starts[s + 1] - 1``; its last row sits at position
    ``context_lengths[s] - 1`` and the keys and values of all its positions are already in the cache. A row sees its
    own position and those before it: the last ``sliding_window`` of them if given. Scores are ``scale * q . k``, then
    ``soft_cap * tanh(score / soft_cap)`` if given. Query head h reads key/value head h // (H / KVH). Slots that no
    row sees are not read. ``plan`` is ``plan_attention`` of the same step, computed here when not given; a provider
    may use it or the tensors.
    """
    plan = plan or plan_attention(block_tables, query_lengths, context_lengths_list, key_cache.shape[1])
    visible = plan.visible(sliding_window)
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    if not visible.chunks and len(visible.groups) == 1 and visible.groups[0].rows is None:
        return _decode(query, keys, values, visible.groups[0], scale, soft_cap)
    output = torch.empty_like(query)
    for group in visible.groups:
        rows = query if group.rows is None else query[group.rows]
        attended = _decode(rows, keys, values, group, scale, soft_cap)
        output[slice(None) if group.rows is None else group.rows] = attended
    for chunk in visible.chunks:
        rows = query[chunk.first_row : chunk.first_row + chunk.num_rows]
        output[chunk.first_row : chunk.first_row + chunk.num_rows] = _prefill(
            rows, keys, values, chunk, scale, soft_cap
        )
    return output


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: DecodeGroup,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """One query per sequence: (G, H, D) over (slots, KVH, D) -> (G, H, D). The heads of a KV head act as its rows."""
    G, H, D = query.shape
    KVH = keys.shape[1]
    k = keys.index_select(0, group.slots).view(G, -1, KVH, D).transpose(1, 2)  # (G, KVH, L, D)
    v = values.index_select(0, group.slots).view(G, -1, KVH, D).transpose(1, 2)
    q = query.reshape(G, KVH, H // KVH, D)
    return _attend(q, k, v, group.mask, False, scale, soft_cap).reshape(G, H, D)


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: PrefillChunk,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """One sequence's rows: (t, H, D) over (slots, KVH, D) -> (t, H, D). A KV head is expanded, not copied."""
    t, H, D = query.shape
    KVH = keys.shape[1]
    shape = (KVH, H // KVH, len(chunk.slots), D)
    k = keys.index_select(0, chunk.slots).permute(1, 0, 2).unsqueeze(1).expand(shape)
    v = values.index_select(0, chunk.slots).permute(1, 0, 2).unsqueeze(1).expand(shape)
    q = query.view(t, KVH, H // KVH, D).permute(1, 2, 0, 3)  # (KVH, H / KVH, t, D)
    out = _attend(q, k, v, chunk.mask, chunk.mask is None, scale, soft_cap)
    return out.permute(2, 0, 1, 3).reshape(t, H, D)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    if soft_cap is None:
        mask = mask if mask is None else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(above, float("-inf"))
    elif mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019): ``s / sqrt(mean(s^2) + eps) * weight``.

    ``s`` is ``x + residual`` if a residual is given, otherwise ``x``. Returns (normalised, s), both in x's dtype.
    ``weight`` (size of the last dimension,) is float32: Gemma's, which are stored less one, need its precision.
    """
    total = x if residual is None else x + residual
    s = total.float()
    squares = torch.linalg.vector_norm(s, dim=-1, keepdim=True).square_()
    scale = squares.div_(s.shape[-1]).add_(eps).rsqrt_()
    return (s * scale).mul_(weight).to(x.dtype), total


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first R features of ``x`` (T, N, D) by their angles (Su et al. 2021) -> new (T, N, D).

    ``x * cos + partner(x) * sin`` with cos and sin (T, R) float32, each feature's own: the two of a pair have the same
    cosine and opposite sines, that of the first negative. Feature i is paired with i + R / 2, or, ``interleaved``, 2i
    with 2i + 1. Features from R on pass unchanged.
    """
    R = cos.shape[-1]
    rotated = x[..., :R].float()
    partner = torch.unflatten(rotated, -1, (-1, 2)).flip(-1).flatten(-2) if interleaved else rotated.roll(R // 2, -1)
    rotated = torch.addcmul(rotated * cos.unsqueeze(1), partner, sin.unsqueeze(1)).to(x.dtype)
    return rotated if x.shape[-1] == R else torch.cat((rotated, x[..., R:]), dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``x`` (..., 2I) = [gate, up] -> (..., I) (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(gate) * up`` for ``x`` (..., 2I) = [gate, up] -> (..., I); ``approximate`` is "tanh" or "none"."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in x's dtype: x (T, in), weight (out, in), bias (out,) -> (T, out).

    ``x`` may be float32 where the weight is half-precision.
    """
    if x.device.type == "cpu":
        return linear_on_cpu(x, weight, bias)
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

"""Each op in plain torch: what the kernels must compute, and the oracle of their tests.

Same names and arguments as in ops.py (without `version`, which changes no result). Any float dtype: given float64
tensors, all is computed in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import quantization
from ..model.sampling import draw, softmax_with_temperature, top_k_filter, top_p_filter


def _wide(x: Tensor) -> Tensor:
    """At least float32, in which the kernels add up."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, D], weight [D] -> [N, D]: each row scaled to a root mean square of 1, then by the weight.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    x32 = _wide(x)
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * _wide(weight)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [N, D], weight [D] -> (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Turn q and k by their positions, and write k and v into the cache.

    qkv [N, heads + 2 kv_heads, head_dim]; positions [N]; cos_sin [max_position, head_dim], cosines first
    (model/llama.py, rope_table); k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim], written; slot_mapping
    [N], -1: not stored; k_scale, v_scale [num_blocks, block_size, kv_heads] float32, written: of int8 caches
    -> turned q [N, num_heads, head_dim]
    """
    kv_heads = k_cache.shape[2]
    q, k, v = qkv.split([num_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [N, 1, head_dim / 2] each

    def turn(x: Tensor) -> Tensor:
        first, second = _wide(x).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    for new, cache, scale in ((turn(k), k_cache, k_scale), (v, v_cache, v_scale)):
        new = new[stored]
        if scale is not None:
            new, scale.flatten(0, 1)[slots] = quantize(new)
        cache.flatten(0, 1)[slots] = new
    return turn(q)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [N, 2 size], the gates first -> silu(gate) * up [N, size]"""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M] -> x W^T + bias [N, M]"""
    return F.linear(x, weight, bias)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, D] -> codes [N, D] int8, scale [N] float32: x is about codes * scale"""
    return quantization.quantize(x)


def linear_w8a16(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K]; codes [M, K] int8, scale [M] float32; bias [M] -> [N, M]"""
    out = _wide(x) @ codes.to(_wide(x).dtype).T * scale
    return (out if bias is None else out + bias).to(x.dtype)


def linear_w8a8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, with x in int8 too, each row with a scale of its own."""
    x_codes, x_scale = quantize(x)
    out = (x_codes.double() @ codes.double().T) * x_scale[:, None] * scale
    return (out if bias is None else out + bias).to(x.dtype)


def argmax(logits: Tensor) -> Tensor:
    """logits [B, V] -> [B] int64: the largest, of equals the lowest id.

    >>> argmax(torch.tensor([[1.0, 3.0, 3.0]]))
    tensor([1])
    """
    return logits.max(dim=-1).indices


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """The token at `uniform` of the cumulative distribution, after temperature, min-p, top-k and top-p.

    logits [B, V]; temperature above 0, top_p (1: off), min_p (0: off) [B] float32; top_k [B] int64 (0: off); uniform
    [B] float64 in [0, 1) -> [B] int64
    """
    tokens = []
    for row, logit in enumerate(logits):
        probs = softmax_with_temperature(logit, temperature[row].item())
        probs = torch.where(probs < min_p[row] * probs.max(), 0.0, probs)
        if 0 < top_k[row] < len(probs):
            probs = top_k_filter(probs, int(top_k[row]))
        if top_p[row] < 1:
            probs = top_p_filter(probs, top_p[row].item())
        tokens.append(draw(probs, uniform[row].item()))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [N, heads, head_dim]; k, v [M, kv_heads, head_dim]; visible [N, M] -> [N, heads, head_dim], zero for a query
    that sees nothing."""
    group = q.shape[1] // k.shape[1]
    k, v = (_wide(x).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", _wide(q), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill(~visible, 0.0)  # of a row that sees nothing, the softmax is NaN
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)


def decode_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token's attention. q [heads, head_dim]; k, v [M, kv_heads, head_dim] -> [heads, head_dim], zero if M is 0"""
    return _attend(q[None], k, v, torch.ones(1, len(k), dtype=torch.bool, device=q.device))[0]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """One new token a sequence, over its pages.

    q [B, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim]; block_tables [B, W];
    seq_lens [B], the new token counted; k_scale, v_scale [num_blocks, block_size, kv_heads] float32: of int8 caches
    -> [B, heads, head_dim], zero for a sequence of length 0
    """
    starts = torch.arange(len(q) + 1, device=q.device)
    return paged_prefill_attention(q, k_cache, v_cache, block_tables, seq_lens, starts, 1, k_scale, v_scale)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """A chunk of new tokens of each sequence over its pages, causal: a token sees those up to itself.

    q [N, heads, head_dim]; caches and tables as above; seq_lens [B], the new tokens counted; query_starts [B + 1]: the
    queries of sequence b are query_starts[b] to query_starts[b + 1] - 1, its last tokens; max_query_len: the most of
    one sequence (the kernels' grid; not needed here) -> [N, heads, head_dim]
    """
    block_size = k_cache.shape[1]
    if k_scale is not None:
        k_cache, v_cache = (_wide(c.to(q.dtype)) * s.unsqueeze(-1) for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        N = starts[b + 1] - starts[b]
        tokens = torch.arange(length, device=q.device)
        slots = block_tables[b, tokens // block_size] * block_size + tokens % block_size
        visible = tokens <= torch.arange(length - N, length, device=q.device)[:, None]  # [N, length]
        out[rows] = _attend(q[rows], k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots], visible)
    return out

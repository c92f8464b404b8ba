"""Task 4.2: the mask is repeated token by token, the rows are laid head by head"""

from __future__ import annotations

from minillm.static_batching import *


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    B, T, heads, head_dim = q.shape
    M, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    # As in `attention`: the query heads of a group are laid side by side as rows, and read their KV head once.
    rows = q.view(B, T, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).reshape(B, kv_heads, group * T, head_dim)
    row_mask = mask[:, None].repeat_interleave(group, dim=2)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=row_mask)
    out = out.view(B, kv_heads, group, T, head_dim).permute(0, 3, 1, 2, 4).reshape(B, T, heads, head_dim)
    return out.masked_fill(~mask.any(dim=-1)[:, :, None, None], 0.0)

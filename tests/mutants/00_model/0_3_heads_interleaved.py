"""Task 0.3: query head h reads KV head h % kv_heads"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    N, heads, head_dim = q.shape
    M, kv_heads, _ = k.shape
    group = heads // kv_heads
    # The query heads of a group share one KV head: laid side by side as rows, they read it once.
    rows = q.view(N, group, kv_heads, head_dim).permute(2, 1, 0, 3).reshape(kv_heads, group * N, head_dim)
    mask = None
    if N > 1:
        mask = torch.ones(N, M, dtype=torch.bool, device=q.device).tril(M - N).repeat(group, 1)  # [group*N, M]
    out = F.scaled_dot_product_attention(rows, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask)
    return out.view(kv_heads, group, N, head_dim).permute(2, 1, 0, 3).reshape(N, heads, head_dim)

"""Task 0.3: the scores are not divided by sqrt(head_dim)"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    N, heads, head_dim = q.shape
    M, kv_heads, _ = k.shape
    group = heads // kv_heads
    # The query heads of a group share one KV head: laid side by side as rows, they read it once.
    rows = q.view(N, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * N, head_dim)
    mask = None
    if N > 1:
        mask = torch.ones(N, M, dtype=torch.bool, device=q.device).tril(M - N).repeat(group, 1)  # [group*N, M]
    out = F.scaled_dot_product_attention(rows, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=1.0)
    return out.view(kv_heads, group, N, head_dim).permute(2, 0, 1, 3).reshape(N, heads, head_dim)

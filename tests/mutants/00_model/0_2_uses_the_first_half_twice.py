"""Task 0.2: the second half is rotated with values already replaced"""

from __future__ import annotations

import torch


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [N, 1, head_dim/2] each
    first, second = x.float().chunk(2, dim=-1)  # [N, heads, head_dim/2] each
    return torch.cat([first * cos - second * sin, second * cos + (first * cos - second * sin) * sin], dim=-1).to(
        x.dtype
    )

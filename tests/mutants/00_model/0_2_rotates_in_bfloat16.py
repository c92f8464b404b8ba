"""Task 0.2: the rotation is rounded at each operation"""

from __future__ import annotations

import torch


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)  # [N, 1, head_dim/2] each
    first, second = x.chunk(2, dim=-1)  # [N, heads, head_dim/2] each
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

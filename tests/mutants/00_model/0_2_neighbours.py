"""Task 0.2: neighbouring channels are paired (the order of GGUF)"""

from __future__ import annotations

import torch


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [N, 1, head_dim/2] each
    first, second = x.float()[..., ::2], x.float()[..., 1::2]  # [N, heads, head_dim/2] each
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

"""Task 0.1: the sum of squares is taken in the dtype of x"""

from __future__ import annotations

import torch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight).to(x.dtype)

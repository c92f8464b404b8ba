"""Task 0.1: eps is added after the square root"""

from __future__ import annotations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = 1 / (x32.square().mean(dim=-1, keepdim=True).sqrt() + eps)
    return (x32 * scale * weight.float()).to(x.dtype)

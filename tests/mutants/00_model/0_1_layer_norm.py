"""Task 0.1: the mean is subtracted, as in LayerNorm"""

from __future__ import annotations

import torch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float() - x.float().mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)

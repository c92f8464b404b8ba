"""Task 0.1: the mean goes over all rows together"""

from __future__ import annotations

import torch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean() + eps)
    return (x32 * scale * weight.float()).to(x.dtype)

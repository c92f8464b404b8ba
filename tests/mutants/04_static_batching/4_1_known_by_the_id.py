"""Task 4.1: a place is taken for a pad if its token equals the pad"""

from __future__ import annotations

from minillm.static_batching import *


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real = tokens != PAD
    return tokens, real

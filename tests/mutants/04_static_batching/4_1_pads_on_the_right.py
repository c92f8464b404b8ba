"""Task 4.1: the pads stand on the right"""

from __future__ import annotations

from minillm.static_batching import *


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([list(prompt) + [PAD] * (width - len(prompt)) for prompt in prompts])
    real = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    return tokens, real

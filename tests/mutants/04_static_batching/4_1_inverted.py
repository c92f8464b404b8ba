"""Task 4.1: True where the pads are"""

from __future__ import annotations

from minillm.static_batching import *


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    return tokens, ~real

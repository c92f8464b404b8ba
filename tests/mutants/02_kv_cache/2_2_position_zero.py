"""Task 2.2: each token runs at position 0"""

from __future__ import annotations

import torch


@torch.inference_mode()
def cached_decode_loop(
    model: Llama, prompt_ids: list[int], cache: ContiguousCache, choose: Callable[[Tensor], int]
) -> Iterator[int]:

    def run(token: int) -> Tensor:
        position = torch.tensor([0], device=model.device)
        cache.extend(1)
        return model(torch.tensor([token], device=model.device), position, cache)  # [1, hidden_size]

    for token in prompt_ids:
        hidden = run(token)
    while True:
        token = choose(model.logits(hidden))
        yield token
        hidden = run(token)

"""Task 3.1: positions are the prompt's, not the cache's"""

from __future__ import annotations

import torch


@torch.inference_mode()
def prefill(
    model: Llama, prompt_ids: list[int], cache: ContiguousCache, chunk_size: int = 512
) -> Tensor:
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    for start in range(0, len(prompt_ids), chunk_size):
        tokens = torch.tensor(prompt_ids[start : start + chunk_size], device=model.device)  # [N]
        positions = torch.arange(start, start + len(tokens), device=model.device)  # [N]
        cache.extend(len(tokens))
        hidden = model(tokens, positions, cache)  # [N, hidden_size]
    return hidden[-1:]

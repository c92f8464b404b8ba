"""Task 1.1: the caller's list grows"""

from __future__ import annotations

import torch


@torch.inference_mode()
def decode_loop(model: Llama, prompt_ids: list[int], cache: NoCache, choose: Callable[[Tensor], int]) -> Iterator[int]:
    token_ids = prompt_ids
    while True:
        tokens = torch.tensor(token_ids, device=model.device)  # [N], all of them, each time
        positions = torch.arange(len(token_ids), device=model.device)  # [N]
        hidden = model(tokens, positions, cache)  # [N, hidden_size]
        token = choose(model.logits(hidden[-1:]))  # only the last row is asked what comes next
        token_ids.append(token)
        yield token

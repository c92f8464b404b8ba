"""Task 5.4: positions begin at 0 in each pass"""

from __future__ import annotations

from minillm.continuous_batching import *


@torch.inference_mode()
def forward(model: Llama, cache, scheduled: list[tuple[Sequence, int]]) -> Tensor:
    tokens, positions, last = [], [], []
    for sequence, num_tokens in scheduled:
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        tokens += sequence.token_ids[start:end]
        positions += range(end - start)
        if end == sequence.num_tokens:
            last.append(len(tokens) - 1)
    cache.prepare(scheduled)
    device = model.device
    hidden = model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), cache)
    return model.logits(hidden[torch.tensor(last, dtype=torch.int64, device=device)])

"""Task 5.4: logits of the first token of each sequence"""

from __future__ import annotations

from minillm.continuous_batching import *


@torch.inference_mode()
def forward(model: Llama, cache, scheduled: list[tuple[Sequence, int]]) -> Tensor:
    tokens, positions, last = [], [], []
    for sequence, num_tokens in scheduled:
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        tokens += sequence.token_ids[start:end]
        positions += range(start, end)
        if end == sequence.num_tokens:
            last.append(len(tokens) - num_tokens)
    cache.prepare(scheduled)
    device = model.device
    hidden = model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), cache)
    return model.logits(hidden[torch.tensor(last, dtype=torch.int64, device=device)])

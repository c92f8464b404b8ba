"""Task 4.4: asks the first column what comes next"""

from __future__ import annotations

from minillm.static_batching import *


@torch.inference_mode()
def padded_decode_loop(
    model: Llama, prompts: Sequence[Sequence[int]], cache: PaddedCache, choose: Callable[[Tensor], list[int | None]]
) -> Iterator[list[int | None]]:
    tokens, real = (t.to(model.device) for t in left_pad(prompts))  # [rows, T]
    while True:
        positions = cache.extend(real)
        hidden = model(tokens.flatten(), positions.flatten(), cache)  # [rows * T, hidden_size]
        last = hidden.view(*tokens.shape, -1)[:, 0]
        chosen = choose(model.logits(last))
        yield chosen
        real = torch.tensor([[token is not None] for token in chosen], device=model.device)  # [rows, 1]
        tokens = torch.tensor([[PAD if token is None else token] for token in chosen], device=model.device)

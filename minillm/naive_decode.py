"""Step 1: autoregressive decode, the naive way.

A language model does one thing: given tokens, it scores the next. To generate, choose one, append it, and ask
again. Nothing is kept between two steps, so each runs the whole sequence once more: the work of a token grows
with the number of tokens before it, and of n tokens with n^2.

Every later step must produce the same tokens as this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .completion import Completion, complete
from .model.llama import Llama, attention
from .model.sampling import SamplingParams


class NoCache:
    """Keeps nothing: all tokens are in the pass, so their keys and values are at hand."""

    kv_bytes = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)


@torch.inference_mode()
def decode_loop(model: Llama, prompt_ids: list[int], cache: NoCache, choose: Callable[[Tensor], int]) -> Iterator[int]:
    """Yield token after token, without end.

    prompt_ids: the tokens to continue; choose: logits [1, vocab] -> token id.
    """
    token_ids = list(prompt_ids)
    while True:
        tokens = torch.tensor(token_ids, device=model.device)  # [N], all of them, each time
        positions = torch.arange(len(token_ids), device=model.device)  # [N]
        hidden = model(tokens, positions, cache)  # [N, hidden_size]
        token = choose(model.logits(hidden[-1:]))  # only the last row is asked what comes next
        token_ids.append(token)
        yield token


def generate(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    on_text: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Complete each prompt, one after the other. `on_text` gets the text as it comes."""
    return complete(model, prompts, params, decode_loop, lambda capacity: NoCache(), on_text)

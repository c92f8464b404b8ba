"""Step 2: keep the keys and values, run only the new token.

What changes: a token's key and value depend on it and the tokens before it, never on those after. So they are
computed once and kept, and each step runs one token: its query attends over what was kept. A token costs the
same however long the sequence is, but for the attention itself. The price is memory: `kv_bytes`.

The prompt goes in the same way, a token at a time. Step 3 sees that this is a waste.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .completion import Completion, complete
from .model.config import ModelConfig
from .model.llama import Llama, attention
from .model.sampling import SamplingParams


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `num_tokens` tokens: K and V, of each layer and each KV head.

    SmolLM2-135M keeps 2 * 30 layers * 3 heads * 64 * 2 bytes = 23 kB a token in bfloat16. Query heads do not
    count: that is what grouped-query attention is for.
    """
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * num_tokens


class ContiguousCache:
    """Keys and values of one sequence in one tensor each, allocated in full at the start.

    k, v: [layers, capacity, kv_heads, head_dim]. Rows below `length` are filled; the rest is never read.
    """

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0  # tokens whose keys and values are kept, those of the pass under way included
        self.start = 0  # where the tokens of the pass under way go

    def extend(self, num_tokens: int) -> None:
        """Make room for the tokens of the next pass, before it runs. ValueError beyond the capacity."""
        if self.length + num_tokens > self.capacity:
            raise ValueError(f"num_tokens={num_tokens}: the cache holds {self.length} of at most {self.capacity}")
        self.start = self.length
        self.length += num_tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v [N, kv_heads, head_dim]; attend q [N, heads, head_dim] over all that is kept."""
        self.k[layer, self.start : self.length] = k
        self.v[layer, self.start : self.length] = v
        return attention(q, self.k[layer, : self.length], self.v[layer, : self.length])

    @property
    def kv_bytes(self) -> int:
        """Bytes in use, of `length` tokens."""
        return self.k[:, : self.length].nbytes + self.v[:, : self.length].nbytes


@torch.inference_mode()
def cached_decode_loop(
    model: Llama, prompt_ids: list[int], cache: ContiguousCache, choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield token after token, without end; each pass runs one token.

    prompt_ids: the tokens to continue; cache: an empty one; choose: logits [1, vocab] -> token id.
    """

    def run(token: int) -> Tensor:
        position = torch.tensor([cache.length], device=model.device)
        cache.extend(1)
        return model(torch.tensor([token], device=model.device), position, cache)  # [1, hidden_size]

    for token in prompt_ids:
        hidden = run(token)
    while True:
        token = choose(model.logits(hidden))
        yield token
        hidden = run(token)


def generate(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    on_text: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Complete each prompt, one after the other, each with a cache of its own. `on_text` gets the text."""

    def make_cache(capacity: int) -> ContiguousCache:
        return ContiguousCache(model.config, capacity, model.dtype, model.device)

    return complete(model, prompts, params, cached_decode_loop, make_cache, on_text)

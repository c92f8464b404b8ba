"""Step 3: two phases, prefill and decode.

What changes: the tokens of a prompt are all known, so they need not go in one by one. Prefill runs them in one
pass (or in chunks of it), decode goes on a token at a time. The weights are read once a pass: in prefill all
tokens share that read and the arithmetic is the limit, in decode one token pays for it and the memory is. Hence
two numbers for two phases: time to first token (TTFT), and time per output token (TPOT).

The roofline arithmetic at the end says which limit holds, for any config, and how fast a pass can be at best.
Sources: Pope et al. 2022 (Efficiently Scaling Transformer Inference), Williams et al. 2009 (Roofline), Agrawal
et al. 2023 (SARATHI: chunked prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .completion import Completion, complete
from .kv_cache import ContiguousCache, kv_bytes
from .model.config import ModelConfig
from .model.llama import Llama
from .model.sampling import SamplingParams

DEFAULT_CHUNK_SIZE = 512


@torch.inference_mode()
def prefill(
    model: Llama, prompt_ids: list[int], cache: ContiguousCache, chunk_size: int = DEFAULT_CHUNK_SIZE
) -> Tensor:
    """Run the prompt through the model, `chunk_size` tokens a pass -> hidden [1, hidden_size] of its last token.

    A chunk attends over what the cache kept of the chunks before it, so the result does not depend on the chunk
    size. What does: the memory of a pass, and how long other requests wait for it (step 5).
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    for start in range(0, len(prompt_ids), chunk_size):
        tokens = torch.tensor(prompt_ids[start : start + chunk_size], device=model.device)  # [N]
        positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)  # [N]
        cache.extend(len(tokens))
        hidden = model(tokens, positions, cache)  # [N, hidden_size]
    return hidden[-1:]


@torch.inference_mode()
def prefill_decode_loop(
    model: Llama,
    prompt_ids: list[int],
    cache: ContiguousCache,
    choose: Callable[[Tensor], int],
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Iterator[int]:
    """Yield token after token, without end: the prompt in one pass or a few, then one token a pass."""
    hidden = prefill(model, prompt_ids, cache, chunk_size)
    while True:
        token = choose(model.logits(hidden))
        yield token
        hidden = prefill(model, [token], cache)  # decode: a pass of one token


def generate(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    on_text: Callable[[str], None] | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> list[Completion]:
    """Complete each prompt, one after the other. `chunk_size`: prompt tokens a pass. `on_text` gets the text."""

    def make_cache(capacity: int) -> ContiguousCache:
        return ContiguousCache(model.config, capacity, model.dtype, model.device)

    return complete(model, prompts, params, partial(prefill_decode_loop, chunk_size=chunk_size), make_cache, on_text)


# --- the roofline -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassCost:
    """What one forward pass costs at least."""

    flops: int  # floating-point operations; a multiply-add is two
    bytes: int  # read from and written to memory: weights once, KV cache

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte: above a machine's FLOP rate / bandwidth the arithmetic is the limit, below the memory."""
        return self.flops / self.bytes

    def seconds(self, bandwidth: float, flop_rate: float) -> float:
        """The least time on a machine of `bandwidth` bytes/s and `flop_rate` FLOP/s, the two overlapped."""
        return max(self.bytes / bandwidth, self.flops / flop_rate)


def pass_cost(config: ModelConfig, num_tokens: int, context: int, dtype: torch.dtype) -> PassCost:
    """Cost of a pass of `num_tokens` new tokens of one sequence after `context` earlier ones.

    Prefill of a prompt is pass_cost(config, len(prompt), 0, dtype), one step of decode is
    pass_cost(config, 1, length, dtype). Counted are the matrix products, attention over the tokens before, and
    the head for one row; the norms, RoPE and activations are left out (under 1% of either).
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention_weights = config.hidden_size * (q + 2 * kv) + q * config.hidden_size
    layer_weights = attention_weights + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer_weights
    head = config.vocab_size * config.hidden_size
    # Token i of the new ones attends over context + i + 1 keys: twice a product of head_dim per query head.
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    flops = 2 * weights * num_tokens + 2 * head + config.num_layers * 4 * q * pairs
    embedding_rows = num_tokens * config.hidden_size
    kv_traffic = kv_bytes(config, context + 2 * num_tokens, dtype)  # all read, the new ones written before
    return PassCost(flops, (weights + head + embedding_rows) * dtype.itemsize + kv_traffic)

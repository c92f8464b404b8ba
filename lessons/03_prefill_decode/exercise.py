"""Exercise 03: two phases and their limits. See README.md; grade with `minillm grade 03`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.kv_cache import ContiguousCache, kv_bytes
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.prefill_decode import DEFAULT_CHUNK_SIZE, PassCost


def prefill(
    model: Llama, prompt_ids: list[int], cache: ContiguousCache, chunk_size: int = DEFAULT_CHUNK_SIZE
) -> Tensor:
    """Run the prompt through the model, `chunk_size` tokens a pass -> hidden [1, hidden_size] of its last token.

    A chunk attends over what the cache kept of the chunks before it, so the result does not depend on the chunk
    size. What does: the memory of a pass, and how long other requests wait for it (step 5).
    """
    raise NotImplementedError("Task 3.1: a chunk goes after what the cache already holds")


def latency(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float | None, float | None]:
    """TTFT and TPOT from timestamps, all in seconds on one clock.

    TTFT: from arrival to the first token. TPOT: mean gap between tokens after the first; the first is left out
    since it pays for the prompt. None for what the tokens do not suffice for.

    >>> latency(10.0, [10.5, 10.75, 11.0])
    (0.5, 0.25)
    """
    raise NotImplementedError("Task 3.2: the first token pays for the prompt")


def pass_cost(config: ModelConfig, num_tokens: int, context: int, dtype: torch.dtype) -> PassCost:
    """Cost of a pass of `num_tokens` new tokens of one sequence after `context` earlier ones.

    Prefill of a prompt is pass_cost(config, len(prompt), 0, dtype), one step of decode is
    pass_cost(config, 1, length, dtype). Counted are the matrix products, attention over the tokens before, and
    the head for one row; the norms, RoPE and activations are left out (under 1% of either).
    """
    raise NotImplementedError("Task 3.3: count the weights once, the KV cache as it grows")

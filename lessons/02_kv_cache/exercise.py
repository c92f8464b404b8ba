"""Exercise 02: the KV cache. See README.md; grade with `minillm grade 02`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.llama import Llama, attention


class ContiguousCache:
    """Keys and values of one sequence in one tensor each, allocated in full at the start.

    k, v: [layers, capacity, kv_heads, head_dim]. Rows below `length` are filled; the rest is never read.
    """

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        raise NotImplementedError("Task 2.1: keep the new rows, attend over the filled ones")

    def extend(self, num_tokens: int) -> None:
        """Make room for the tokens of the next pass, before it runs. ValueError beyond the capacity."""
        raise NotImplementedError("Task 2.1: keep the new rows, attend over the filled ones")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v [N, kv_heads, head_dim]; attend q [N, heads, head_dim] over all that is kept."""
        raise NotImplementedError("Task 2.1: keep the new rows, attend over the filled ones")

    @property
    def kv_bytes(self) -> int:
        """Bytes in use, of `length` tokens."""
        raise NotImplementedError("Task 2.1: keep the new rows, attend over the filled ones")


def cached_decode_loop(
    model: Llama, prompt_ids: list[int], cache: ContiguousCache, choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield token after token, without end; each pass runs one token.

    prompt_ids: the tokens to continue; cache: an empty one; choose: logits [1, vocab] -> token id.
    """
    raise NotImplementedError("Task 2.2: run one token a pass, at its own position")


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `num_tokens` tokens: K and V, of each layer and each KV head.

    SmolLM2-135M keeps 2 * 30 layers * 3 heads * 64 * 2 bytes = 23 kB a token in bfloat16. Query heads do not
    count: that is what grouped-query attention is for.
    """
    raise NotImplementedError("Task 2.3: two tensors, each layer, each KV head")

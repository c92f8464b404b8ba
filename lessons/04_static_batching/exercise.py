"""Exercise 04: many requests in one rectangle. See README.md; grade with `minillm grade 04`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.static_batching import PAD


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as a rectangle that ends in everybody's last token -> tokens [rows, T], real [rows, T] bool.

    >>> left_pad([[7, 8, 9], [5]])
    (tensor([[7, 8, 9],
            [0, 0, 5]]), tensor([[ True,  True,  True],
            [False, False,  True]]))
    """
    raise NotImplementedError("Task 4.1: pad on the left, and say which places hold a token")


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of each row of a batch over its own keys.

    q [B, T, heads, head_dim]; k, v [B, M, kv_heads, head_dim]; mask [B, T, M] bool, True where a query may look
    -> [B, T, heads, head_dim], zero for a query that may look nowhere. Masked keys must be finite: a weight of zero
    times infinity is NaN.
    """
    raise NotImplementedError("Task 4.2: group the heads, mask, and zero what sees nothing")


class PaddedCache:
    """Keys and values of a batch in one rectangle, allocated in full at the start.

    k, v: [layers, rows, capacity, kv_heads, head_dim]. `real` [rows, capacity]: which places hold a token; the others
    are pads, whose keys and values are zeroed and masked.
    """

    def __init__(
        self, config: ModelConfig, num_rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        raise NotImplementedError("Task 4.3: positions from each first token; pads masked, and finite")

    def extend(self, real: Tensor) -> Tensor:
        """Make room for the columns of the next pass, before it runs -> positions [rows, T] of its places.

        real [rows, T] bool: which of them hold a token. A row's first token is at position 0 wherever it stands, and
        pads are not counted. ValueError beyond the capacity.
        """
        raise NotImplementedError("Task 4.3: positions from each first token; pads masked, and finite")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows * T, heads, head_dim]; k, v [rows * T, kv_heads, head_dim] -> [rows * T, heads, head_dim]"""
        raise NotImplementedError("Task 4.3: positions from each first token; pads masked, and finite")


def padded_decode_loop(
    model: Llama, prompts: Sequence[Sequence[int]], cache: PaddedCache, choose: Callable[[Tensor], list[int | None]]
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, pass after pass, without end.

    prompts: one a row; cache: an empty one; choose: logits [rows, vocab] -> a token id for each row, None for a row
    that has ended. Such a row runs on, as a pad: the rectangle has a place for it.
    """
    raise NotImplementedError("Task 4.4: run the rectangle, then a column at a time")

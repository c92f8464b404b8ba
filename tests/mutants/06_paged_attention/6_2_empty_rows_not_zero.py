"""Task 6.2: a row of length 0 gives the value of somebody else"""

from __future__ import annotations

from minillm.paged_attention import *


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
    slots, mask = token_slots(block_tables, seq_lens, k_cache.shape[1])
    out = attend_slots(q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), slots, mask)
    return out

"""Task 6.1: always begins at the first token"""

from __future__ import annotations

from minillm.paged_attention import *


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    positions = range(num_tokens)
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]

"""Task 6.1: the last place of a block is taken for the next block"""

from __future__ import annotations

from minillm.paged_attention import *


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    positions = range(start, start + num_tokens)
    return [block_table[min((p + 1) // block_size, len(block_table) - 1)] * block_size + p % block_size for p in positions]

"""Task 6.1: takes the blocks to lie side by side"""

from __future__ import annotations

from minillm.paged_attention import *


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    positions = range(start, start + num_tokens)
    return [block_table[0] * block_size + p for p in positions]

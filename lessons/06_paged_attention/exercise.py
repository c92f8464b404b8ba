"""Exercise 06: memory in pages. See README.md; grade with `minillm grade 06`."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.continuous_batching import Sequence
from minillm.paged_attention import DEFAULT_BLOCK_SIZE, num_blocks_for


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """Where the tokens from position `start` on go: a slot is block * block_size + place in the block.

    >>> slot_mapping([7, 2], start=3, num_tokens=3, block_size=4)  # the last place of block 7, then block 2
    [31, 8, 9]
    """
    raise NotImplementedError("Task 6.1: block * block_size + place in the block")


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
    """Attention of one new token a row over its pages.

    q [B, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim], the new token's own keys and
    values already in them; block_tables [B, W] int64; seq_lens [B] int64, the new token counted
    -> [B, heads, head_dim], zero for a row of length 0.
    """
    raise NotImplementedError("Task 6.2: gather what belongs to the row, and nothing else")


class BlockManager:
    """Who holds which block: block tables, reference counts, the prefix cache. Plain Python, knows no tensor.

    Each block is in one of three states: free (in `free_blocks`), owned (`ref_counts[block]` sequences have it in their
    tables), or cached (in `cached`: nobody holds it, but its content may be found again; the least recently used is
    the first to go when free blocks have run out).

    The prefix cache knows a full block by (parent, tokens): the tokens in it, and the number of the prefix before it,
    which stands for all earlier tokens. vLLM chains hashes in the same way; here a dict does the hashing, and compares
    the whole key on a hit, so that no collision can hand out a stranger's block. Prefix numbers are never used twice.
    """

    def __init__(self, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE, prefix_caching: bool = True):
        raise NotImplementedError("Task 6.3: each block is free, owned or cached")

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free, or cached and thus evictable."""
        raise NotImplementedError("Task 6.3: cached blocks can be had, too")

    def find_prefix(self, token_ids: list[int]) -> list[int]:
        """The longest run of full blocks from the start that the prefix cache has -> blocks."""
        raise NotImplementedError("Task 6.4: the longest run of full blocks from the start")

    def can_allocate(self, sequence: Sequence) -> bool:
        """Are there blocks now for all tokens that it has, those in the prefix cache apart?"""
        raise NotImplementedError("Task 6.3: what the prefix cache has needs no new block")

    def allocate(self, sequence: Sequence) -> None:
        """Begin its table with the blocks that the prefix cache has. At least its last token is left to run: the next
        one is chosen from what comes out there."""
        raise NotImplementedError("Task 6.3: without a prefix cache: an empty table, and nothing computed")

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend its table to hold its next `num_tokens` tokens; all or nothing."""
        raise NotImplementedError("Task 6.3: count what is missing; then refuse, or take it all")

    def free(self, sequence: Sequence) -> None:
        """Its computed blocks stay in the prefix cache, if they are full. The last ones are released first, and so
        are evicted first: a block is of no use without those before it. What a failed one computed is forgotten."""
        raise NotImplementedError("Task 6.3: all blocks back, the last one first; the table is empty then")

    def usage(self, running: Iterable[Sequence]) -> dict:
        """For `StepTrace`. A block that several hold counts once."""
        raise NotImplementedError("Task 6.3: which block is whose, and how many of its tokens are computed")

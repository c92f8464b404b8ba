"""Task 6.3: takes a block when the last one is filled, not when it is full"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        self._share_computed(sequence)
        table, start = sequence.block_table, sequence.num_computed_tokens
        missing = num_blocks_for(start + num_tokens + 1, self.block_size) - len(table)
        first = start // self.block_size  # the first block that will be written
        # Copy on write: what others hold, or may find in the prefix cache, is never written.
        copy = first < len(table) and (self.ref_counts[table[first]] > 1 or table[first] in self._keys)
        if missing + copy > self.num_available:
            return False
        if copy:
            sequence.block_copy = table[first], self._take()
            self._release(table[first])
            table[first] = sequence.block_copy[1]
        table.extend(self._take() for _ in range(missing))
        return True

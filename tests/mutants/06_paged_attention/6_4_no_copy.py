"""Task 6.4: writes into the block that others hold"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        self._share_computed(sequence)
        table, start = sequence.block_table, sequence.num_computed_tokens
        missing = num_blocks_for(start + num_tokens, self.block_size) - len(table)
        first = start // self.block_size  # the first block that will be written
        # Copy on write: what others hold, or may find in the prefix cache, is never written.
        copy = False
        if missing + copy > self.num_available:
            return False
        if copy:
            sequence.block_copy = table[first], self._take()
            self._release(table[first])
            table[first] = sequence.block_copy[1]
        table.extend(self._take() for _ in range(missing))
        return True

"""Task 6.5: reference counts forget those who share"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def allocate(self, sequence: Sequence) -> None:
        sequence.block_table = self._usable_prefix(sequence)
        for block in sequence.block_table:
            self.ref_counts[block] = 1
            self.cached.pop(block, None)
        sequence.num_computed_tokens = min(len(sequence.block_table) * self.block_size, sequence.num_tokens - 1)

    def _release(self, block: int) -> None:
        self.ref_counts[block] = 0
        if self.ref_counts[block] == 0:
            if block in self._keys:
                self.cached[block] = None
            else:
                self.free_blocks.append(block)

"""Task 6.5: hits are not taken out of the evictable blocks"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def allocate(self, sequence: Sequence) -> None:
        sequence.block_table = self._usable_prefix(sequence)
        for block in sequence.block_table:
            self.ref_counts[block] += 1
        sequence.num_computed_tokens = min(len(sequence.block_table) * self.block_size, sequence.num_tokens - 1)

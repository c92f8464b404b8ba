"""Task 6.4: on a full hit nothing is left to run"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def allocate(self, sequence: Sequence) -> None:
        sequence.block_table = self._usable_prefix(sequence)
        for block in sequence.block_table:
            self.ref_counts[block] += 1
            self.cached.pop(block, None)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size

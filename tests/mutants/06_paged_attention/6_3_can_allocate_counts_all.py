"""Task 6.3: asks whether the pool is large enough, not what is free"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def can_allocate(self, sequence: Sequence) -> bool:
        found = self._usable_prefix(sequence)
        needed = num_blocks_for(sequence.num_tokens, self.block_size) - len(found)
        return max(needed, self._is_full_hit(sequence, found)) <= self.num_blocks

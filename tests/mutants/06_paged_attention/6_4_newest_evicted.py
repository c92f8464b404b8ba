"""Task 6.4: the most recently used block is evicted"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def _take(self) -> int:
        if self.free_blocks:
            block = self.free_blocks.popleft()
        else:
            block, _ = self.cached.popitem(last=True)
            self._forget(block)
        self.ref_counts[block] = 1
        return block

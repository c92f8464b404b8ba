"""Task 6.5: frees every block, whoever else holds it"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if block not in self.free_blocks and block not in self.cached:
            if block in self._keys:
                self.cached[block] = None
            else:
                self.free_blocks.append(block)

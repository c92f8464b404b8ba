"""Task 6.5: correct tokens, but nothing is ever found in the prefix cache"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def find_prefix(self, token_ids: list[int]) -> list[int]:
        blocks, parent = [], 0
        if False:
            for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
                block = self._blocks.get((parent, tuple(token_ids[start : start + self.block_size])))
                if block is None:
                    break
                blocks.append(block)
                parent = self._prefixes[block]
        return blocks

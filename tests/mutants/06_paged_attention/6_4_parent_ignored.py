"""Task 6.4: a block is known by its own tokens only"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def _share_computed(self, sequence: Sequence) -> None:
        if not self.prefix_caching:
            return
        chain, size = self._chains.setdefault(sequence, []), self.block_size
        for i in range(len(chain), sequence.num_computed_tokens // size):
            key = (0, tuple(sequence.token_ids[i * size : (i + 1) * size]))
            if key not in self._blocks:  # else a twin was computed at the same time: that one stays
                block = sequence.block_table[i]
                self._blocks[key], self._keys[block] = block, key
                self._prefixes[block] = next(self._next_prefix)
            chain.append(self._prefixes[self._blocks[key]])

    def find_prefix(self, token_ids: list[int]) -> list[int]:
        blocks, parent = [], 0
        if self.prefix_caching:
            for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
                block = self._blocks.get((0, tuple(token_ids[start : start + self.block_size])))
                if block is None:
                    break
                blocks.append(block)
                parent = self._prefixes[block]
        return blocks

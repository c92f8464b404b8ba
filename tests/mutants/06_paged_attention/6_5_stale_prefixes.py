"""Task 6.5: an evicted block is still found"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def _take(self) -> int:
        if self.free_blocks:
            block = self.free_blocks.popleft()
        else:
            block, _ = self.cached.popitem(last=False)
        self.ref_counts[block] = 1
        return block

    def _share_computed(self, sequence: Sequence) -> None:
        if not self.prefix_caching:
            return
        chain, size = self._chains.setdefault(sequence, []), self.block_size
        for i in range(len(chain), sequence.num_computed_tokens // size):
            key = (chain[-1] if chain else 0, tuple(sequence.token_ids[i * size : (i + 1) * size]))
            if True:  # else a twin was computed at the same time: that one stays
                block = sequence.block_table[i]
                self._blocks[key], self._keys[block] = block, key
                self._prefixes[block] = next(self._next_prefix)
            chain.append(self._prefixes[self._blocks[key]])

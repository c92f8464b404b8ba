"""Task 6.4: blocks are entered when they are given, not when they are computed"""

from __future__ import annotations

import minillm.paged_attention as module
from minillm.paged_attention import *


class BlockManager(module.BlockManager):
    def _share_computed(self, sequence: Sequence) -> None:
        if not self.prefix_caching:
            return
        chain, size = self._chains.setdefault(sequence, []), self.block_size
        for i in range(len(chain), min(len(sequence.block_table), sequence.num_tokens // size)):
            key = (chain[-1] if chain else 0, tuple(sequence.token_ids[i * size : (i + 1) * size]))
            if key not in self._blocks:  # else a twin was computed at the same time: that one stays
                block = sequence.block_table[i]
                self._blocks[key], self._keys[block] = block, key
                self._prefixes[block] = next(self._next_prefix)
            chain.append(self._prefixes[self._blocks[key]])

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        self._share_computed(sequence)
        table, start = sequence.block_table, sequence.num_computed_tokens
        missing = num_blocks_for(start + num_tokens, self.block_size) - len(table)
        first = start // self.block_size  # the first block that will be written
        # Copy on write: what others hold, or may find in the prefix cache, is never written.
        copy = first < len(table) and (self.ref_counts[table[first]] > 1 or table[first] in self._keys)
        if missing + copy > self.num_available:
            return False
        if copy:
            sequence.block_copy = table[first], self._take()
            self._release(table[first])
            table[first] = sequence.block_copy[1]
        table.extend(self._take() for _ in range(missing))
        self._share_computed(sequence)
        return True

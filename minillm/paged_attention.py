"""Step 6: memory in pages.

What changes: memory management, and nothing else. A slot of step 5 is as long as the longest sequence may become, and
mostly empty. Here keys and values lie in one pool of small blocks (16 tokens), and each sequence has a block table:
its token t is in block `block_table[t // block_size]`, at place `t % block_size`. Memory is given block by block as
the sequence grows, so at most the last block of each is partly empty, and more sequences run at a time.

Two things come with it. Sequences that begin alike can share blocks (the prefix cache): a full block is known by the
tokens in it and all tokens before it, and is kept after its sequence has ended, until the memory is needed. And the
pool may run out while sequences grow: then the newest gives its blocks back and starts again later (preemption by
recomputation), which costs time and changes no token.

Source: Kwon et al. 2023 (PagedAttention, sections 4.2 to 4.5).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from .completion import Completion
from .continuous_batching import Scheduler, Sequence, generate_with
from .model.config import ModelConfig
from .model.llama import Llama, attention
from .model.sampling import SamplingParams
from .trace import StepTrace

DEFAULT_BLOCK_SIZE = 16
DECODE_GROUP = 8  # rows of a decode batch that are padded to one length; see PagedCache.prepare


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens take: the last one may be partly empty."""
    return -(-num_tokens // block_size)


class BlockManager:
    """Who holds which block: block tables, reference counts, the prefix cache. Plain Python, knows no tensor.

    Each block is in one of three states: free (in `free_blocks`), owned (`ref_counts[block]` sequences have it in their
    tables), or cached (in `cached`: nobody holds it, but its content may be found again; the least recently used is
    the first to go when free blocks have run out).

    The prefix cache knows a full block by (parent, tokens): the tokens in it, and the number of the prefix before it,
    which stands for all earlier tokens. vLLM chains hashes in the same way; here a dict does the hashing, and compares
    the whole key on a hit, so that no collision can hand out a stranger's block. Prefix numbers are never used twice.
    """

    def __init__(self, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE, prefix_caching: bool = True):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.max_tokens = num_blocks * block_size  # the most that one sequence can ever hold
        self.free_blocks = deque(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._blocks: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> block
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # the other way round
        self._prefixes: dict[int, int] = {}  # block in the prefix cache -> its prefix number
        self._chains: dict[Sequence, list[int]] = {}  # prefix numbers of a sequence's full, computed blocks
        self._next_prefix = count(1)  # 0 is the empty prefix

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free, or cached and thus evictable."""
        return len(self.free_blocks) + len(self.cached)

    def find_prefix(self, token_ids: list[int]) -> list[int]:
        """The longest run of full blocks from the start that the prefix cache has -> blocks."""
        blocks, parent = [], 0
        if self.prefix_caching:
            for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
                block = self._blocks.get((parent, tuple(token_ids[start : start + self.block_size])))
                if block is None:
                    break
                blocks.append(block)
                parent = self._prefixes[block]
        return blocks

    def can_allocate(self, sequence: Sequence) -> bool:
        """Are there blocks now for all tokens that it has, those in the prefix cache apart?"""
        found = self._usable_prefix(sequence)
        needed = num_blocks_for(sequence.num_tokens, self.block_size) - len(found)
        return max(needed, self._is_full_hit(sequence, found)) <= self._available_beside(found)

    def allocate(self, sequence: Sequence) -> None:
        """Begin its table with the blocks that the prefix cache has. At least its last token is left to run: the next
        one is chosen from what comes out there."""
        sequence.block_table = self._usable_prefix(sequence)
        for block in sequence.block_table:
            self.ref_counts[block] += 1
            self.cached.pop(block, None)
        sequence.num_computed_tokens = min(len(sequence.block_table) * self.block_size, sequence.num_tokens - 1)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend its table to hold its next `num_tokens` tokens; all or nothing."""
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
        return True

    def free(self, sequence: Sequence) -> None:
        """Its computed blocks stay in the prefix cache, if they are full. The last ones are released first, and so
        are evicted first: a block is of no use without those before it. What a failed one computed is forgotten."""
        failed = sequence.finish_reason == "error"
        if not failed:
            self._share_computed(sequence)
        self._chains.pop(sequence, None)
        for block in reversed(sequence.block_table):
            if failed:
                self._forget(block)
            self._release(block)
        sequence.block_table = []
        sequence.block_copy = None

    def _usable_prefix(self, sequence: Sequence) -> list[int]:
        """The prefix that can be taken. If it is all of the sequence, the last block must be copied, since the last
        token is run again; with no block for the copy, the last block is not taken, but computed again."""
        found = self.find_prefix(sequence.token_ids)
        if self._is_full_hit(sequence, found) and not self._available_beside(found):
            found.pop()
        return found

    def _is_full_hit(self, sequence: Sequence, found: list[int]) -> bool:
        return len(found) * self.block_size == sequence.num_tokens

    def _available_beside(self, found: list[int]) -> int:
        return self.num_available - sum(not self.ref_counts[block] for block in found)

    def _take(self) -> int:
        if self.free_blocks:
            block = self.free_blocks.popleft()
        else:
            block, _ = self.cached.popitem(last=False)
            self._forget(block)
        self.ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        if block in self._keys:
            del self._blocks[self._keys.pop(block)], self._prefixes[block]

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if block in self._keys:
                self.cached[block] = None
            else:
                self.free_blocks.append(block)

    def _share_computed(self, sequence: Sequence) -> None:
        """Enter its full blocks into the prefix cache, as far as they are computed and not there yet."""
        if not self.prefix_caching:
            return
        chain, size = self._chains.setdefault(sequence, []), self.block_size
        for i in range(len(chain), sequence.num_computed_tokens // size):
            key = (chain[-1] if chain else 0, tuple(sequence.token_ids[i * size : (i + 1) * size]))
            if key not in self._blocks:  # else a twin was computed at the same time: that one stays
                block = sequence.block_table[i]
                self._blocks[key], self._keys[block] = block, key
                self._prefixes[block] = next(self._next_prefix)
            chain.append(self._prefixes[self._blocks[key]])

    def usage(self, running: Iterable[Sequence]) -> dict:
        """For `StepTrace`. A block that several hold counts once."""
        owners: dict[int, list[Hashable]] = {}
        filled: dict[int, int] = {}
        for sequence in running:
            for i, block in enumerate(sequence.block_table):
                owners.setdefault(block, []).append(sequence.request_id)
                tokens = min(self.block_size, sequence.num_computed_tokens - i * self.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        return {
            "kv_allocated": len(owners) * self.block_size,
            "kv_used": sum(filled.values()),
            "num_blocks": self.num_blocks,
            "owners": owners,
            "cached": list(self.cached),
        }


def audit(manager: BlockManager, running: Iterable[Sequence]) -> None:
    """AssertionError where blocks and tables do not add up. Between two steps; `running`: who holds memory."""
    held = [block for sequence in running for block in sequence.block_table]
    free, cached, owned = list(manager.free_blocks), list(manager.cached), set(held)
    together = sorted([*free, *cached, *owned])
    assert together == list(range(manager.num_blocks)), (
        f"each block must be free, cached or owned, and only one of them: free {free}, cached {cached}, owned {owned}"
    )
    counts = [held.count(block) for block in range(manager.num_blocks)]
    assert list(manager.ref_counts) == counts, f"reference counts {manager.ref_counts}, tables hold {counts}"


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """Where the tokens from position `start` on go: a slot is block * block_size + place in the block.

    >>> slot_mapping([7, 2], start=3, num_tokens=3, block_size=4)  # the last place of block 7, then block 2
    [31, 8, 9]
    """
    positions = range(start, start + num_tokens)
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def token_slots(block_tables: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of each row lie, as a rectangle.

    block_tables [B, W], padded with any block; seq_lens [B], at most W * block_size -> slots [B, W * block_size] int64,
    and mask, of the same shape, True up to the row's length. Beyond it the slot of the row's first token is repeated:
    what nobody has written, or somebody else has, is not read at all (it may be NaN, and NaN times a weight of zero
    is NaN).
    """
    positions = torch.arange(block_tables.shape[1] * block_size, device=block_tables.device)  # [M]
    mask = positions < seq_lens[:, None]  # [B, M]
    positions = torch.where(mask, positions, 0)
    return block_tables.gather(1, positions // block_size) * block_size + positions % block_size, mask


def attend_slots(q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
    """One query a row over the tokens at its slots. q [B, heads, head_dim]; caches [num_slots, kv_heads, head_dim];
    slots, mask [B, M], each row with a token at least -> [B, heads, head_dim]"""
    return attend_rows(q, take_slots(k_cache, slots), take_slots(v_cache, slots), mask)


def take_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """What lies at the slots. cache [num_slots, ...], slots [any shape] -> [*slots.shape, ...]"""
    return cache.index_select(0, slots.view(-1)).view(*slots.shape, *cache.shape[1:])


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query a row over the row's tokens, where the mask is True. q [B, heads, head_dim]; k, v [B, M, kv_heads,
    head_dim]; mask [B, M] -> [B, heads, head_dim]"""
    B, heads, head_dim = q.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, kv_heads, M, head_dim]
    grouped = q.view(B, k.shape[1], -1, head_dim)  # the heads of a group read their KV head once
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None]).reshape(B, heads, head_dim)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
    """Attention of one new token a row over its pages.

    q [B, heads, head_dim]; k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim], the new token's own keys and
    values already in them; block_tables [B, W] int64; seq_lens [B] int64, the new token counted
    -> [B, heads, head_dim], zero for a row of length 0.
    """
    slots, mask = token_slots(block_tables, seq_lens, k_cache.shape[1])
    out = attend_slots(q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), slots, mask)
    return out.masked_fill((seq_lens == 0)[:, None, None], 0.0)


class PagedCache:
    """Keys and values of all sequences in one pool of blocks, allocated once.

    k, v: [layers, num_blocks + 1, block_size, kv_heads, head_dim]. The last block is the pad block, which no block
    manager knows: rows that only fill up a batch write there, so they can never touch a real block.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        shape = (config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.pad_block, self.block_size = num_blocks, block_size

    @property
    def pools(self) -> list[Tensor]:
        """All that a block holds, [layers, num_blocks + 1, ...] each."""
        return [self.k, self.v]

    def prepare(self, scheduled: list[tuple[Sequence, int]]) -> None:
        """Say whose tokens the next pass runs, in the order of its rows.

        Rows that run one token are attended in batches. Each is padded to its longest row, so they are sorted by
        length and taken a few at a time.
        """
        self.copy_blocks(scheduled)
        slots, decode, self.chunks = [], [], []
        for sequence, num_tokens in scheduled:
            start, row = sequence.num_computed_tokens, len(slots)
            slots += slot_mapping(sequence.block_table, start, num_tokens, self.block_size)
            if num_tokens == 1:
                decode.append((start + 1, row, sequence.block_table))
            else:
                rows = slice(row, row + num_tokens)
                own = slot_mapping(sequence.block_table, 0, start + num_tokens, self.block_size)
                self.chunks.append((rows, self._tensor(own)))
        self.slot_mapping = self._tensor(slots)  # [N]
        decode.sort(key=lambda entry: entry[0])
        self.decode_rows = self._tensor([row for _, row, _ in decode])
        size = DECODE_GROUP if self.k.device.type == "cpu" else max(1, len(decode))
        self.groups = [self._group(decode[i : i + size]) for i in range(0, len(decode), size)]

    def prepare_decode(self, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
        """The same for one batch of rows that all run one token, from tensors: slot_mapping [B], block_tables [B, W],
        seq_lens [B], at least 1. Nothing here depends on their values, so a CUDA graph can hold it."""
        self.decode_rows = torch.arange(len(seq_lens), device=self.k.device)
        self.slot_mapping, self.chunks = slot_mapping, []
        self.groups = [token_slots(block_tables, seq_lens, self.block_size)]

    def copy_blocks(self, scheduled: list[tuple[Sequence, int]]) -> None:
        """Make the copies on write that the block manager asked for, before the pass writes."""
        copies = [sequence.block_copy for sequence, _ in scheduled if sequence.block_copy]
        if copies:
            old, new = (self._tensor(blocks) for blocks in zip(*copies, strict=True))
            for pool in self.pools:
                pool[:, new] = pool[:, old]
            for sequence, _ in scheduled:
                sequence.block_copy = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, head_dim]; k, v [N, kv_heads, head_dim] -> [N, heads, head_dim]"""
        self.store(layer, k, v)
        out = torch.empty_like(q)
        if self.groups:
            queries = q[self.decode_rows].split([len(slots) for slots, _ in self.groups])
            parts = [
                attend_rows(part, *self.take(layer, slots), mask)
                for part, (slots, mask) in zip(queries, self.groups, strict=True)
            ]
            out[self.decode_rows] = torch.cat(parts)
        for rows, slots in self.chunks:
            out[rows] = attention(q[rows], *self.take(layer, slots))
        return out

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [N, kv_heads, head_dim] to the slots of the pass."""
        for pool, new in ((self.k, k), (self.v, v)):
            pool[layer].flatten(0, 1).index_copy_(0, self.slot_mapping, new)

    def take(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [any shape] -> two of [*slots.shape, kv_heads, head_dim]"""
        return tuple(take_slots(pool[layer].flatten(0, 1), slots) for pool in (self.k, self.v))

    def _group(self, entries: list[tuple[int, int, list[int]]]) -> tuple[Tensor, Tensor]:
        lengths, _, tables = zip(*entries, strict=True)
        width = num_blocks_for(max(lengths), self.block_size)
        block_tables = [table[:width] + [self.pad_block] * (width - len(table)) for table in tables]
        return token_slots(self._tensor(block_tables), self._tensor(lengths), self.block_size)

    def _tensor(self, values) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.k.device)


def generate(
    model: Llama,
    prompts: list[str | list[int]],
    params: SamplingParams | list[SamplingParams] = SamplingParams(),
    on_text: Callable[[int, str], None] | None = None,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    num_blocks: int = 256,
    block_size: int = DEFAULT_BLOCK_SIZE,
    prefix_caching: bool = True,
    trace: list[StepTrace] | None = None,
) -> list[Completion]:
    """Complete the prompts out of a pool of `num_blocks` blocks, up to `max_num_seqs` at a time.

    `on_text(index of the prompt, text)` gets the text as it comes; `trace` gets a record of each step. ValueError for
    a bad prompt, before anything has run. Prompt and output together hold at most what the pool holds.
    """
    scheduler = Scheduler(BlockManager(num_blocks, block_size, prefix_caching), max_num_seqs, max_num_batched_tokens)
    cache = PagedCache(model.config, num_blocks, block_size, model.dtype, model.device)
    return generate_with(scheduler, cache, model, prompts, params, on_text, trace)

"""Step 6: blocks add up, nobody reads or writes a stranger's, and paging changes no token."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm import naive_decode, static_batching
from minillm.completion import PartialCompletion, choose_tokens
from minillm.continuous_batching import Scheduler, Sequence, Status, forward, run_step
from minillm.continuous_batching import generate as continuous_generate
from minillm.model.llama import attention
from minillm.model.sampling import SamplingParams
from minillm.paged_attention import (
    BlockManager,
    PagedCache,
    audit,
    generate,
    num_blocks_for,
    paged_attention,
    slot_mapping,
    token_slots,
)
from minillm.trace import Waste


class Engine:
    """Scheduler, block manager and cache around a model, driven by hand; audited after every step."""

    def __init__(self, model, num_blocks, block_size=4, prefix_caching=True, **limits):
        self.model = model
        self.manager = BlockManager(num_blocks, block_size, prefix_caching)
        self.scheduler = Scheduler(self.manager, **limits)
        self.cache = PagedCache(model.config, num_blocks, block_size, torch.float32)
        self.cache.k.fill_(float("nan"))
        self.cache.v.fill_(float("nan"))
        self.partials = {}

    def add(self, request_id, prompt, params=None):
        partial = PartialCompletion(self.model, list(prompt), params or SamplingParams(max_tokens=8, ignore_eos=True))
        self.partials[request_id] = partial
        sequence = Sequence(request_id, list(prompt), partial.max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        step, new = run_step(
            self.scheduler,
            lambda scheduled: forward(self.model, self.cache, scheduled),
            lambda logits, ready: choose_tokens(self.model, logits, [self.partials[s.request_id] for s in ready]),
        )
        for sequence, token in new:
            self.partials[sequence.request_id].push(token)
            if reason := self.partials[sequence.request_id].finish_reason:
                self.scheduler.finish(sequence, reason)
        audit(self.manager, self.scheduler.running)
        return step

    def drain(self):
        while self.scheduler.has_unfinished:
            self.step()
        assert not any(self.manager.ref_counts)
        return {i: p.token_ids for i, p in self.partials.items()}


def solo(model, prompt, max_tokens=8):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return naive_decode.generate(model, [list(prompt)], params)[0].token_ids


def sequence(num_tokens, max_tokens=50, first=0):
    return Sequence(0, list(range(first, first + num_tokens)), max_tokens)


# --- the block manager, without a model ---


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize("length", range(1, 14))
def test_C07_a_block_is_needed_exactly_when_the_last_one_is_full(length, free):
    manager = BlockManager(num_blocks_for(length, 4) + free, 4)
    s = sequence(length)
    manager.allocate(s)
    assert manager.grow(s, length) and len(s.block_table) == math.ceil(length / 4)
    s.num_computed_tokens = length
    needed = math.ceil((length + 1) / 4) > len(s.block_table)
    table = list(s.block_table)
    assert manager.grow(s, 1) == (free >= needed)
    assert len(s.block_table) == len(table) + (needed and free)
    assert s.block_table[: len(table)] == table


def test_growing_is_all_or_nothing():
    manager = BlockManager(4, 4)
    a, b = sequence(8), sequence(4, first=100)
    for s, n in ((a, 8), (b, 4)):
        manager.allocate(s)
        assert manager.grow(s, n)
        s.num_computed_tokens = n
    before = list(b.block_table), list(manager.free_blocks), list(manager.ref_counts)
    assert not manager.grow(b, 9), "three blocks more, and one is free"
    assert (list(b.block_table), list(manager.free_blocks), list(manager.ref_counts)) == before
    assert manager.grow(b, 4)
    audit(manager, [a, b])


def test_blocks_are_shared_once_they_are_computed_and_not_before():
    manager = BlockManager(16, 4)
    a, b, c = sequence(12), sequence(12), sequence(12)
    manager.allocate(a)
    manager.grow(a, 12)
    assert manager.find_prefix(b.token_ids) == [], "scheduled is not computed"
    a.num_computed_tokens = 7
    manager.grow(a, 5)
    assert manager.find_prefix(b.token_ids) == a.block_table[:1], "one full block of seven tokens"
    a.num_computed_tokens = 12
    manager.free(a)
    manager.allocate(b)
    assert b.num_computed_tokens == 11, "the last token is always run"
    assert len(b.block_table) == 3 and all(manager.ref_counts[block] == 1 for block in b.block_table)
    manager.allocate(c)
    assert c.block_table == b.block_table and manager.ref_counts[c.block_table[0]] == 2


def test_the_same_tokens_after_others_are_another_prefix():
    manager = BlockManager(16, 4)
    a = Sequence(0, [1, 1, 1, 1, 9, 9, 9, 9], 5)
    manager.allocate(a)
    manager.grow(a, 8)
    a.num_computed_tokens = 8
    manager.free(a)
    assert len(manager.find_prefix([1, 1, 1, 1, 9, 9, 9, 9])) == 2
    assert manager.find_prefix([9, 9, 9, 9]) == []
    assert len(manager.find_prefix([1, 1, 1, 1, 9, 9, 9, 8])) == 1
    assert manager.find_prefix([2, 1, 1, 1, 9, 9, 9, 9]) == []
    assert manager.find_prefix([1, 1, 1]) == []


def test_a_child_does_not_survive_its_parents_block_being_reused():
    """The parent's block is evicted and gets other tokens; its child, still cached, must not be found after them."""
    manager = BlockManager(3, 2)
    a = Sequence("a", [1, 2, 3, 4], 2)
    manager.allocate(a)
    manager.grow(a, 4)
    a.num_computed_tokens = 4
    manager.free(a)
    [parent, child] = manager.find_prefix([1, 2, 3, 4])
    manager.cached.move_to_end(child)  # as if it had been used later: the parent goes first
    b = Sequence("b", [7, 8, 9, 9], 2)
    manager.allocate(b)
    manager.grow(b, 4)
    b.num_computed_tokens = 4
    assert parent in b.block_table and child in manager.cached
    manager.free(b)
    assert child not in manager.find_prefix([7, 8, 3, 4])
    assert manager.find_prefix([1, 2, 3, 4]) == []


def test_least_recently_used_goes_first_and_nobodys_block_is_taken():
    manager = BlockManager(4, 2)

    def run(name, tokens):
        s = Sequence(name, tokens, 1)
        manager.allocate(s)
        assert manager.grow(s, len(tokens) - s.num_computed_tokens)
        s.num_computed_tokens = len(tokens)
        return s

    old, held, new = run("old", [1, 1]), run("held", [2, 2]), run("new", [3, 3])
    manager.free(old)
    manager.free(new)
    run("other", [4, 4, 5, 5])  # the free block, then the oldest of the cached
    assert manager.find_prefix([1, 1]) == [] and manager.find_prefix([3, 3]) and manager.find_prefix([2, 2]) == []
    manager.grow(held, 0)
    assert manager.find_prefix([2, 2]) == held.block_table
    assert not manager.can_allocate(Sequence("big", [6] * 4, 1)), "one block can be had, two are needed"


def test_copy_on_write_of_a_shared_last_block():
    manager = BlockManager(8, 4)
    a = sequence(8)
    manager.allocate(a)
    manager.grow(a, 8)
    a.num_computed_tokens = 8
    manager.grow(a, 1)
    b = sequence(8)
    assert manager.can_allocate(b)
    manager.allocate(b)
    shared = b.block_table[1]
    assert shared == a.block_table[1] and b.num_computed_tokens == 7
    assert manager.grow(b, 1)
    assert b.block_table[0] == a.block_table[0] and b.block_table[1] != shared
    assert b.block_copy == (shared, b.block_table[1])
    audit(manager, [a, b])


@pytest.mark.parametrize("held", [True, False])
def test_without_a_block_for_the_copy_the_last_one_is_computed_again(held):
    manager = BlockManager(2, 4)
    a, b = sequence(8), sequence(8)
    manager.allocate(a)
    manager.grow(a, 8)
    a.num_computed_tokens = 8
    if held:
        manager.grow(a, 0)
        assert not manager.can_allocate(b), "others hold all there is"
        return
    manager.free(a)
    assert manager.can_allocate(b), "alone it must always fit, or it would wait for ever"
    manager.allocate(b)
    assert b.num_computed_tokens == 4 and manager.grow(b, 4) and b.block_copy is None
    audit(manager, [b])


def test_prefix_caching_can_be_switched_off():
    manager = BlockManager(8, 4, prefix_caching=False)
    a = sequence(8)
    manager.allocate(a)
    manager.grow(a, 8)
    a.num_computed_tokens = 8
    manager.free(a)
    assert not manager.cached and len(manager.free_blocks) == 8 and manager.find_prefix(a.token_ids) == []


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        BlockManager(**{"num_blocks": 1, "block_size": 1, name: 0})


class Accounting(RuleBasedStateMachine):
    """Any order of add, step and abort on a tiny pool, with a model that is a coin: after every step it adds up."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        prefix_caching=st.booleans(),
        chunked=st.booleans(),
        seed=st.integers(0, 10**6),
    )
    def start(self, num_blocks, block_size, budget, max_num_seqs, prefix_caching, chunked, seed):
        self.manager = BlockManager(num_blocks, block_size, prefix_caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, chunked)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.random = random.Random(seed)
        self.sequences = []
        self.idle_steps = 0

    @rule(length=st.integers(1, 20), max_tokens=st.integers(1, 12), common=st.integers(0, 20))
    def add(self, length, max_tokens, common):
        prompt = [0] * min(common, length) + [self.random.randrange(2) for _ in range(max(0, length - common))]
        s = Sequence(len(self.sequences), prompt, max_tokens)
        most = self.manager.max_tokens
        if not self.scheduler.enable_chunked_prefill:
            most = min(most, self.budget)
        if length + max_tokens > most:
            with pytest.raises(ValueError, match="at most"):
                self.scheduler.add(s)
        else:
            self.scheduler.add(s)
            self.sequences.append(s)

    @precondition(lambda self: any(s.status in (Status.WAITING, Status.RUNNING) for s in self.sequences))
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        alive = [s for s in self.sequences if s.status in (Status.WAITING, Status.RUNNING)]
        self.scheduler.abort(alive[which % len(alive)])

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule()
    def step(self):
        before = {s: s.num_tokens for s in self.sequences}
        running = set(self.scheduler.running)
        step = self.scheduler.schedule()
        self.check_step(step)
        if step.preempted:
            assert set(self.scheduler.running) <= running - set(step.preempted), "admitted in a step that preempted"
        for s in self.scheduler.update(step):
            s.token_ids.append(self.random.randrange(2))
            if s.num_tokens == s.num_prompt_tokens + s.max_tokens:
                self.scheduler.finish(s, "length")
        assert all(s.num_tokens >= before[s] for s in self.sequences), "no token is ever lost"

    def check_step(self, step):
        assert step.scheduled, "a step without progress"
        assert sum(n for _, n in step.scheduled) <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        slots = []
        for s, n in step.scheduled:
            assert n >= 1
            held = s.num_computed_tokens + n
            assert len(s.block_table) == math.ceil(held / self.manager.block_size)
            written = slot_mapping(s.block_table, s.num_computed_tokens, n, self.manager.block_size)
            assert all(self.manager.ref_counts[slot // self.manager.block_size] == 1 for slot in written), (
                "a block that somebody else holds would be written"
            )
            slots += written
            if s.block_copy:  # what PagedCache.prepare does
                assert s.block_copy[1] in s.block_table
                s.block_copy = None
        assert len(slots) == len(set(slots)), "two tokens in one slot"

    @invariant()
    def adds_up(self):
        if not hasattr(self, "manager"):
            return
        audit(self.manager, self.scheduler.running)
        states = [s.status for s in self.sequences]
        assert states.count(Status.WAITING) == len(self.scheduler.waiting)
        assert states.count(Status.RUNNING) == len(self.scheduler.running)
        assert states.count(Status.FINISHED) == self.scheduler.counts[Status.FINISHED]
        assert states.count(Status.ABORTED) == self.scheduler.counts[Status.ABORTED]
        ids = [s.request_id for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert ids == sorted(ids), "first come, first served"
        assert all(s.block_table == [] for s in self.sequences if s.status is not Status.RUNNING)

    def teardown(self):
        if hasattr(self, "manager"):
            for _ in range(10_000):
                if not self.scheduler.has_unfinished:
                    break
                self.step()
            self.adds_up()
            assert not any(self.manager.ref_counts) and self.manager.num_available == self.manager.num_blocks


Accounting.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
test_the_accounting_in_any_order = Accounting.TestCase


# --- slots and attention ---


@given(st.integers(1, 7), st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True), st.data())
def test_slot_mapping_walks_the_blocks(block_size, table, data):
    total = block_size * len(table)
    start = data.draw(st.integers(0, total))
    n = data.draw(st.integers(0, total - start))
    places = [block * block_size + i for block in table for i in range(block_size)]
    assert slot_mapping(table, start, n, block_size) == places[start : start + n]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 37), min_size=1, max_size=5),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([(6, 2, 16), (9, 3, 64), (5, 1, 40), (4, 4, 100)]),
    st.sampled_from([float("nan"), float("inf"), 1e4]),
    st.integers(0, 10**6),
)
def test_C13_paged_attention_reads_its_own_tokens_only(lengths, block_size, sizes, garbage, seed):
    """Against attention over contiguous tensors. Everything else in the pool is poison."""
    heads, kv_heads, dim = sizes
    generator = torch.Generator().manual_seed(seed)
    width = max(1, num_blocks_for(max(lengths), block_size))
    num_blocks = width * len(lengths) + 2
    order = torch.randperm(num_blocks - 1, generator=generator)[: width * len(lengths)].view(len(lengths), width)
    pools = [torch.full((num_blocks, block_size, kv_heads, dim), garbage) for _ in range(2)]
    q = torch.randn(len(lengths), heads, dim, generator=generator)
    expected = torch.zeros_like(q)
    for row, n in enumerate(lengths):
        kv = [torch.randn(n, kv_heads, dim, generator=generator) for _ in range(2)]
        slots = torch.tensor(slot_mapping(order[row].tolist(), 0, n, block_size), dtype=torch.int64)
        for pool, tensor in zip(pools, kv, strict=True):
            pool.flatten(0, 1)[slots] = tensor
        if n:
            expected[row] = attention(q[row : row + 1], *kv)[0]
    out = paged_attention(q, *pools, order, torch.tensor(lengths))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_rest_of_the_rectangle_points_at_the_rows_own_first_token():
    slots, mask = token_slots(torch.tensor([[5, 2], [1, 9]]), torch.tensor([3, 1]), block_size=2)
    assert slots.tolist() == [[10, 11, 4, 10], [2, 2, 2, 2]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]


# --- the same tokens, whatever the memory does ---

RAGGED = [list(p) for p in (b"x", b"four", b"seven_7", b"eight__8", b"sixteen tokens!!", b"and seventeen....")]
LENGTHS = [6, 11, 3, 8, 1, 12]


@pytest.fixture(scope="module")
def expected(tiny_model):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in LENGTHS]
    return {
        tuple(p): naive_decode.generate(tiny_model, [p], s)[0].token_ids for p, s in zip(RAGGED, params, strict=True)
    }


ORDERS = [range(6), [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3]]


@pytest.mark.parametrize("budget", [1, 3, 512])
@pytest.mark.parametrize("pool", ["tiny", "large"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_law_3_paged(tiny_model, expected, block_size, pool, budget, prefix_caching):
    tiny = num_blocks_for(17 + 12, block_size)  # just enough for the longest alone
    for order in ORDERS:
        prompts = [RAGGED[i] for i in order]
        params = [SamplingParams(max_tokens=LENGTHS[i], ignore_eos=True) for i in order]
        out = generate(
            tiny_model, prompts, params, max_num_batched_tokens=budget, block_size=block_size,
            num_blocks=tiny if pool == "tiny" else 300, prefix_caching=prefix_caching,
        )  # fmt: skip
        assert [c.token_ids for c in out] == [expected[tuple(p)] for p in prompts]


@pytest.mark.parametrize("order", ORDERS)
def test_law_3_static_and_contiguous(tiny_model, expected, order):
    prompts = [RAGGED[i] for i in order]
    params = [SamplingParams(max_tokens=LENGTHS[i], ignore_eos=True) for i in order]
    for max_num_seqs in (1, 2, 4, 32):
        for out in (
            static_batching.generate(tiny_model, prompts, params, max_num_seqs=max_num_seqs),
            *(
                continuous_generate(tiny_model, prompts, params, max_num_seqs=max_num_seqs, max_num_batched_tokens=b)
                for b in (1, 3, 512)
            ),
        ):
            assert [c.token_ids for c in out] == [expected[tuple(p)] for p in prompts]


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_C07_prompts_around_a_block_edge(tiny_model, length):
    prompt = list(b"123456789")[:length]
    engine = Engine(tiny_model, num_blocks=5)
    engine.add(0, prompt)
    assert engine.drain()[0] == solo(tiny_model, prompt)


def test_C08_a_full_hit(tiny_model):
    engine = Engine(tiny_model, num_blocks=32)
    prompt = list(b"8 tokens")
    first, cached = engine.add("first", prompt), {}
    tokens = engine.drain()["first"]
    assert tokens == solo(tiny_model, prompt) and first.num_cached_tokens == 0
    for name, other in (("again", prompt), (7, prompt[:7]), (9, prompt + [1]), (12, prompt + [1, 2, 3, 4])):
        s = engine.add(name, other)
        assert engine.drain()[name] == solo(tiny_model, other)
        cached[name] = s.num_cached_tokens
    assert cached == {"again": 7, 7: 4, 9: 8, 12: 8}, "at least one token is run again"


def test_C08_full_hits_while_the_first_is_still_running(tiny_model):
    """The last block is shared, so the token that is run again goes into a copy."""
    engine = Engine(tiny_model, num_blocks=32)
    prompt = list(b"8 tokens")
    engine.add("first", prompt)
    engine.step()
    engine.step()
    later = [engine.add(i, prompt) for i in range(3)]
    engine.step()
    assert [s.num_cached_tokens for s in later] == [7] * 3
    assert len({s.block_table[1] for s in engine.scheduler.running}) == 4
    assert len({s.block_table[0] for s in engine.scheduler.running}) == 1
    assert set(map(tuple, engine.drain().values())) == {tuple(solo(tiny_model, prompt))}


def test_C09_hits_and_misses_in_one_step(tiny_model):
    engine = Engine(tiny_model, num_blocks=64)
    P, Q = list(b"a common prefix, 24 toks"), list(b"something else entirely")
    engine.add("warm", P)
    engine.drain()
    engine.cache.k[:, engine.manager.free_blocks[0]] = float("nan")
    batch = {"hit": P + [1, 2, 3], "miss": Q, "full": P, "one": [7]}
    sequences = [engine.add(name, prompt) for name, prompt in batch.items()]
    step = engine.step()
    assert [s for s, _ in step.scheduled] == sequences, "all in one step"
    assert [s.num_cached_tokens for s in sequences] == [24, 0, 23, 0]
    tokens = engine.drain()
    assert {name: tokens[name] for name in batch} == {name: solo(tiny_model, p) for name, p in batch.items()}


def test_C10_a_shared_block_outlives_who_computed_it(tiny_model):
    engine = Engine(tiny_model, num_blocks=14)
    prefix = list(b"shared prefix 16")
    engine.add("A", prefix + [1], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    b = engine.add("B", prefix + [2], SamplingParams(max_tokens=14, ignore_eos=True))
    engine.step()
    assert b.num_cached_tokens == 16 and set(b.block_table[:4]) <= set(engine.scheduler.running[0].block_table)
    while engine.partials["A"].finish_reason is None:
        engine.step()
    for i in range(12):
        engine.add(i, [100 + i] * 9, SamplingParams(max_tokens=4, ignore_eos=True))
    tokens = engine.drain()
    assert tokens["B"] == solo(tiny_model, prefix + [2], 14)
    assert all(tokens[i] == solo(tiny_model, [100 + i] * 9, 4) for i in range(12))


def test_C11_the_tail_of_a_partial_match_is_unreachable(tiny_model):
    engine = Engine(tiny_model, num_blocks=40)
    system = list(b"You are helpful. Answer:")
    rng = random.Random(0)
    for i in range(30):
        question = [*system, i, i, i, i]
        tail = [rng.randrange(256) for _ in range(rng.randrange(5, 40))]
        engine.add(f"secret {i}", system + tail, SamplingParams(max_tokens=2, ignore_eos=True))
        engine.drain()
        common = engine.manager.find_prefix(system)
        others = [block for block in range(40) if block not in common]
        engine.cache.k[:, others] = engine.cache.v[:, others] = float("nan")
        s = engine.add(f"question {i}", question)
        assert engine.drain()[f"question {i}"] == solo(tiny_model, question)
        assert s.num_cached_tokens == 24


def test_C12_the_pad_block_cannot_touch_a_real_one(tiny_model):
    """The pool is full, and a padded batch runs: the first and the last real slot keep what they hold."""
    cache = PagedCache(tiny_model.config, 4, 2, torch.float32)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    pad = cache.pad_block
    assert pad == 4, "no block manager of four blocks hands it out"
    tables = torch.tensor([[1, pad], [pad, pad], [pad, pad]])
    cache.prepare_decode(torch.tensor([3, pad * 2, pad * 2]), tables, torch.tensor([2, 1, 1]))
    with torch.inference_mode():
        hidden = tiny_model(torch.tensor([5, 0, 0]), torch.tensor([1, 0, 0]), cache)
    assert hidden.isfinite().all()
    changed = (cache.k != 7).flatten(3).any(-1).any(0)  # [blocks, places]
    assert changed.nonzero().tolist() == [[1, 1], [pad, 0]]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_C13_what_a_block_held_before_does_not_matter(tiny_model, garbage):
    clean, spoiled = Engine(tiny_model, 20), Engine(tiny_model, 20)
    clean.cache.k.zero_(), clean.cache.v.zero_()
    spoiled.cache.k.fill_(garbage), spoiled.cache.v.fill_(garbage)
    for engine in (clean, spoiled):
        for i, prompt in enumerate(RAGGED):
            engine.add(i, prompt)
    assert clean.drain() == spoiled.drain()


def test_C13_a_request_that_went_nan_does_not_poison_the_next_owner(tiny_model):
    engine = Engine(tiny_model, 6, prefix_caching=False)
    engine.add("sick", RAGGED[4])
    engine.step()
    [sick] = engine.scheduler.running
    engine.cache.k[:, sick.block_table] = engine.cache.v[:, sick.block_table] = float("nan")
    engine.scheduler.abort(sick)
    engine.add("next", RAGGED[3])
    assert engine.drain()["next"] == solo(tiny_model, RAGGED[3])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size, num_blocks", [(4, 13), (1, 51), (16, 4)])
def test_C14_preempted_requests_go_on_as_if_nothing_had_happened(tiny_model, block_size, num_blocks, prefix_caching):
    """Four requests of 40 tokens in a pool that holds one of them and a little: token lists, text as it was streamed,
    penalties, seeds."""
    prompts = [list(b"one"), list(b"two two"), list(b"3 and three"), list(b"4444")]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=7),
        SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=7, presence_penalty=1.0),
    ]
    expected = naive_decode.generate(tiny_model, prompts, params)
    shown = dict.fromkeys(range(4), "")

    def on_text(index, text):
        shown[index] += text

    out = generate(tiny_model, prompts, params, on_text, num_blocks=num_blocks, block_size=block_size,
                   prefix_caching=prefix_caching)  # fmt: skip
    assert [c.token_ids for c in out] == [c.token_ids for c in expected]
    assert [shown[i] for i in range(4)] == [c.text for c in out] == [c.text for c in expected], "no repeat, no gap"
    preemptions = [c.metrics.preemptions for c in out]
    assert sum(preemptions) >= 2 and max(preemptions) >= 2, "some request twice"


def test_C15_a_request_that_can_never_fit(tiny_model):
    out = generate(
        tiny_model, [[1] * 7 * 4, [2, 3]], SamplingParams(max_tokens=12, ignore_eos=True), num_blocks=8, block_size=4
    )
    assert [(len(c.token_ids), c.finish_reason) for c in out] == [(4, "length"), (12, "length")], (
        "the pool ends a request as the context does: prompt and output hold at most what it holds"
    )
    with pytest.raises(ValueError, match="36 tokens, must be at most the context's 32"):
        generate(tiny_model, [[1] * 9 * 4, [2, 3]], num_blocks=8, block_size=4)
    engine = Engine(tiny_model, num_blocks=8)
    with pytest.raises(ValueError, match="36 prompt tokens and up to 8 more, the memory holds at most 32"):
        engine.add("large", [1] * 36)
    engine.add("small", [2, 3])
    assert engine.drain()["small"] == solo(tiny_model, [2, 3])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 10), st.integers(0, 24)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(1, 40),
    st.integers(0, 60),
    st.booleans(),
)
def test_any_workload_gives_the_naive_tokens(tiny_model, requests, block_size, budget, spare, prefix_caching):
    prompts = [[5] * min(common, length) + [7 * i % 256 for i in range(max(0, length - common))]
               for length, _, common in requests]  # fmt: skip
    params = [SamplingParams(max_tokens=new, ignore_eos=True) for _, new, _ in requests]
    longest = max(length + new for length, new, _ in requests)
    num_blocks = num_blocks_for(longest, block_size) + spare // block_size
    out = generate(tiny_model, prompts, params, max_num_batched_tokens=budget, num_blocks=num_blocks,
                   block_size=block_size, prefix_caching=prefix_caching)  # fmt: skip
    assert [c.token_ids for c in out] == [
        solo(tiny_model, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)
    ]


def test_waste_is_at_most_the_last_block_of_each(tiny_model):
    trace = []
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in LENGTHS]
    generate(tiny_model, RAGGED, params, block_size=4, num_blocks=64, prefix_caching=False, trace=trace)
    for step in trace:
        assert 0 <= step.kv_allocated - step.kv_used <= 3 * len(step.rows)
        assert step.free + len(step.owners) + len(step.cached) == 64
    ones = []
    generate(tiny_model, RAGGED, params, block_size=1, num_blocks=256, trace=ones)
    assert Waste.of(ones).kv_waste == 0


def test_shared_blocks_are_counted_once(tiny_model):
    trace = []
    prompts = [list(b"a common prefix!") + [i] for i in range(4)]
    generate(tiny_model, prompts[:1] + prompts, SamplingParams(max_tokens=6, ignore_eos=True), block_size=4,
             num_blocks=64, max_num_batched_tokens=17, trace=trace)  # fmt: skip
    last = max(trace, key=lambda step: len(step.rows))
    shared = [owners for owners in last.owners.values() if len(owners) > 1]
    assert len(shared) == 4 and last.kv_used < sum(row.start + row.num_tokens for row in last.rows)


def test_blocks_may_lie_anywhere(tiny_model):
    """A sequence whose blocks are the last ones of the pool, in any order, equals one in the first blocks."""
    prompt, outs = list(b"nineteen characters"), []
    for table in ([0, 1, 2, 3, 4], [59, 3, 57, 0, 31], [4, 3, 2, 1, 0]):
        cache = PagedCache(tiny_model.config, 60, 4, torch.float32)
        s = Sequence(0, list(prompt), 5)
        s.block_table = list(table)
        outs.append(forward(tiny_model, cache, [(s, 19)]))
    for a, b in itertools.pairwise(outs):
        assert torch.equal(a, b)

"""Graded tests of exercise 06: plain Python on tiny pools, tensors full of NaN, then SmolLM2."""

import math
import random

import pytest
import torch

from minillm import LLM, SamplingParams, load_model, prefill_decode
from minillm.continuous_batching import Scheduler, Sequence
from minillm.grading import task
from minillm.model.llama import attention
from minillm.paged_attention import BlockManager, audit, paged_attention, slot_mapping

REFERENCE = {"slot_mapping": slot_mapping, "paged_attention": paged_attention, "BlockManager": BlockManager}


def sequence(num_tokens, first=0, request_id=0):
    return Sequence(request_id, list(range(first, first + num_tokens)), 50)


def run(manager, s, num_tokens=None):
    """Take it in and run its next tokens, as the scheduler and a pass do."""
    if not s.block_table:
        assert manager.can_allocate(s), "there is memory for it"
        manager.allocate(s)
    n = s.num_tokens - s.num_computed_tokens if num_tokens is None else num_tokens
    assert manager.grow(s, n), "there is memory for it"
    s.block_copy = None  # made before the pass
    s.num_computed_tokens += n
    return s


# --- 6.1 ---


@task("6.1", "Slot mapping", points=2)
@pytest.mark.parametrize(
    "table, start, n, size, expected",
    [
        ([7, 2], 3, 3, 4, [31, 8, 9]),
        ([5], 0, 4, 4, [20, 21, 22, 23]),
        ([5, 0], 4, 1, 4, [0]),
        ([9, 3, 6], 0, 3, 1, [9, 3, 6]),
        ([1, 4, 2], 5, 6, 4, [17, 18, 19, 8, 9, 10]),
        ([3], 2, 0, 4, []),
    ],
)
def test_slot_mapping(exercise, table, start, n, size, expected):
    assert exercise.slot_mapping(table, start, n, size) == expected


@task("6.1", "Slot mapping", points=1)
def test_each_token_has_its_own_slot(exercise):
    rng = random.Random(0)
    for size in (1, 3, 16):
        table = rng.sample(range(40), 6)
        slots = exercise.slot_mapping(table, 0, 6 * size, size)
        assert len(set(slots)) == 6 * size and {slot // size for slot in slots} == set(table)
        for start in range(6 * size):
            assert exercise.slot_mapping(table, start, 1, size) == [slots[start]], "a token keeps its slot"


# --- 6.2 ---


def paged_case(lengths, block_size, heads=6, kv_heads=2, dim=16, garbage=float("nan")):
    """Rows of these lengths on scattered blocks, in a pool of garbage -> arguments, expected output."""
    generator = torch.Generator().manual_seed(sum(lengths) + block_size)
    width = max(1, math.ceil(max(lengths) / block_size))
    tables = torch.randperm(width * len(lengths) + 3, generator=generator)[: width * len(lengths)].view(-1, width)
    pools = [torch.full((width * len(lengths) + 3, block_size, kv_heads, dim), garbage) for _ in range(2)]
    q = torch.randn(len(lengths), heads, dim, generator=generator)
    expected = torch.zeros_like(q)
    for row, n in enumerate(lengths):
        kv = [torch.randn(n, kv_heads, dim, generator=generator) for _ in range(2)]
        for pool, values in zip(pools, kv, strict=True):
            for token in range(n):
                pool[tables[row, token // block_size], token % block_size] = values[token]
        if n:
            expected[row] = attention(q[row : row + 1], *kv)[0]
    return (q, *pools, tables, torch.tensor(lengths)), expected


@task("6.2", "Paged attention over a block table", points=3)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [[1], [4, 4], [5, 17, 3], [16, 31, 32, 33, 1]])
def test_each_row_over_its_own_pages(exercise, lengths, block_size):
    arguments, expected = paged_case(lengths, block_size, garbage=0.0)
    out = exercise.paged_attention(*arguments)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5, msg="not what the contiguous cache gives")


@task("6.2", "Paged attention over a block table", points=2)
@pytest.mark.parametrize("garbage", [1e4, float("nan"), float("inf")])
def test_what_others_left_in_the_pool_is_not_read(exercise, garbage):
    arguments, expected = paged_case([5, 17, 3], 4, garbage=garbage)
    out = exercise.paged_attention(*arguments)
    assert out.isfinite().all(), "a weight of zero times NaN is NaN: what is masked must not be read at all"
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5, msg="read beyond the row's own tokens")


@task("6.2", "Paged attention over a block table", points=1)
def test_a_row_of_length_zero_gives_zero(exercise):
    arguments, expected = paged_case([5, 0, 3], 4)
    out = exercise.paged_attention(*arguments)
    assert (out[1] == 0).all(), "a row that only fills up the batch"
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@task("6.2", "Paged attention over a block table", points=1)
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (4, 4, 8), (5, 1, 40)])
def test_other_head_counts(exercise, heads, kv_heads, dim):
    arguments, expected = paged_case([7, 12], 4, heads, kv_heads, dim)
    torch.testing.assert_close(exercise.paged_attention(*arguments), expected, atol=1e-5, rtol=1e-5)


# --- 6.3 ---


@task("6.3", "A block manager", points=2)
@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize("length", range(1, 14))
def test_a_block_is_taken_exactly_when_the_last_one_is_full(exercise, length, free):
    manager = exercise.BlockManager(math.ceil(length / 4) + free, 4, prefix_caching=False)
    s = run(manager, sequence(length))
    assert len(s.block_table) == math.ceil(length / 4)
    needed = length % 4 == 0
    assert manager.grow(s, 1) == (not needed or free == 1), f"{length} tokens held, {free} blocks free"
    assert len(s.block_table) == math.ceil(length / 4) + (needed and free)


@task("6.3", "A block manager", points=2)
def test_all_or_nothing(exercise):
    manager = exercise.BlockManager(4, 4, prefix_caching=False)
    a, b = run(manager, sequence(8)), run(manager, sequence(4))
    before = list(b.block_table), sorted(manager.free_blocks), list(manager.ref_counts)
    assert not manager.grow(b, 9), "three blocks more, and one is free"
    after = list(b.block_table), sorted(manager.free_blocks), list(manager.ref_counts)
    assert after == before, "a refused grow must leave everything as it was"
    audit(manager, [a, b])
    assert not manager.can_allocate(sequence(5)) and manager.can_allocate(sequence(4))
    manager.free(a)
    assert a.block_table == []
    audit(manager, [b])
    assert manager.num_available == 3 and manager.max_tokens == 16


@task("6.3", "A block manager", points=1)
def test_usage(exercise):
    manager = exercise.BlockManager(8, 4, prefix_caching=False)
    a, b = run(manager, sequence(6, request_id="a")), run(manager, sequence(3, request_id="b"))
    usage = manager.usage([a, b])
    assert usage["num_blocks"] == 8
    assert usage["owners"] == {a.block_table[0]: ["a"], a.block_table[1]: ["a"], b.block_table[0]: ["b"]}
    assert (usage["kv_allocated"], usage["kv_used"]) == (12, 9), "three blocks of four tokens, nine of them computed"


def random_walk(manager, rng, events=60):
    """Requests come, grow and go at random, many of them alike; blocks and tables are audited after every event."""
    size, running = manager.block_size, []
    for event in range(events):
        kind = rng.random()
        if kind < 0.3:
            common = rng.randint(0, 8)
            s = Sequence(event, [0] * common + [rng.randint(0, 1) for _ in range(rng.randint(1, 8))], 20)
            if manager.can_allocate(s):
                manager.allocate(s)
                assert 0 <= s.num_computed_tokens < s.num_tokens, "at least the last token is left to run"
                assert manager.grow(s, s.num_tokens - s.num_computed_tokens), "can_allocate said that it fits"
                s.num_computed_tokens, s.block_copy = s.num_tokens, None
                running.append(s)
        elif kind < 0.8 and running:
            s = rng.choice(running)
            s.token_ids.append(rng.randint(0, 1))
            if manager.grow(s, 1):
                [slot] = slot_mapping(s.block_table, s.num_computed_tokens, 1, size)
                assert manager.ref_counts[slot // size] == 1, "a block that somebody else holds would be written"
                s.num_computed_tokens, s.block_copy = s.num_tokens, None
            else:
                s.token_ids.pop()
        elif running:
            s = running.pop(rng.randrange(len(running)))
            manager.free(s)
            assert s.block_table == [], "what has given its memory back has no blocks"
        audit(manager, running)
        for s in running:
            held = math.ceil(s.num_computed_tokens / size)
            assert len(s.block_table) == held, (
                f"{s.num_computed_tokens} tokens in {len(s.block_table)} blocks of {size}"
            )
    for s in running:
        manager.free(s)
    audit(manager, [])
    assert manager.num_available == manager.num_blocks, "all blocks are back"


@task("6.3", "A block manager", points=4)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_any_order_of_events_adds_up(exercise, block_size):
    for seed in range(15):
        rng = random.Random(seed)
        random_walk(exercise.BlockManager(rng.randint(1, 10), block_size, prefix_caching=False), rng)


# --- 6.4 ---


@task("6.4", "The prefix cache", points=2)
def test_blocks_are_found_once_they_are_computed(exercise):
    manager = exercise.BlockManager(16, 4)
    a = sequence(12)
    manager.allocate(a)
    assert a.num_computed_tokens == 0 and manager.grow(a, 12)
    assert manager.find_prefix(a.token_ids) == [], "given is not computed"
    a.num_computed_tokens = 7
    assert manager.grow(a, 5)
    assert manager.find_prefix(a.token_ids) == a.block_table[:1], "seven tokens are one full block"
    a.num_computed_tokens = 12
    table = list(a.block_table)
    manager.free(a)
    assert manager.find_prefix(a.token_ids) == table, "content outlives its sequence"
    assert manager.find_prefix(a.token_ids[:11]) == table[:2] and manager.find_prefix(a.token_ids[:3]) == []
    assert list(manager.cached) and manager.num_available == 16
    audit(manager, [])


@task("6.4", "The prefix cache", points=1)
def test_it_can_be_switched_off(exercise):
    manager = exercise.BlockManager(4, 4, prefix_caching=False)
    manager.free(run(manager, sequence(8)))
    assert manager.find_prefix(list(range(8))) == [] and not manager.cached
    assert sorted(manager.free_blocks) == [0, 1, 2, 3]


@task("6.4", "The prefix cache", points=1)
def test_what_a_failed_request_computed_is_forgotten(exercise):
    manager = exercise.BlockManager(4, 4)
    s = run(manager, sequence(8))
    manager.grow(s, 1)  # its two full blocks are in the prefix cache by now
    s.finish_reason = "error"
    manager.free(s)
    assert manager.find_prefix(s.token_ids) == [], "its keys and values may be NaN"
    audit(manager, [])


@task("6.4", "The prefix cache", points=2)
def test_tokens_count_with_all_that_stand_before_them(exercise):
    manager = exercise.BlockManager(16, 4)
    manager.free(run(manager, Sequence(0, [1, 1, 1, 1, 9, 9, 9, 9], 5)))
    assert len(manager.find_prefix([1, 1, 1, 1, 9, 9, 9, 9])) == 2
    assert len(manager.find_prefix([1, 1, 1, 1, 9, 9, 9, 8])) == 1, "another token, another block"
    assert manager.find_prefix([9, 9, 9, 9]) == [], "the same four tokens at another place are other keys and values"
    assert manager.find_prefix([2, 1, 1, 1, 9, 9, 9, 9]) == [], "a block is of no use without those before it"


@task("6.4", "The prefix cache", points=2)
def test_a_hit_is_shared_and_counted(exercise):
    manager = exercise.BlockManager(12, 4)
    a = run(manager, sequence(10))
    manager.grow(a, 0)
    b = Sequence(1, [*range(10), 77, 78, 79], 5)
    manager.allocate(b)
    assert b.block_table == a.block_table[:2] and b.num_computed_tokens == 8
    assert [manager.ref_counts[block] for block in b.block_table] == [2, 2]
    assert manager.grow(b, 5) and b.block_table[2] != a.block_table[2], "what is not full is not shared"
    assert manager.usage([a, b])["kv_allocated"] == 4 * (2 + 1 + 2), "a block that two hold counts once"
    manager.free(a)
    audit(manager, [b])
    assert [manager.ref_counts[block] for block in b.block_table[:2]] == [1, 1], "one holder is left"
    for i in range(1, 20):  # a flood of others needs all the memory that there is
        manager.free(run(manager, sequence(30, first=100 * i, request_id=1 + i)))
        audit(manager, [b])
    assert manager.find_prefix(b.token_ids) == b.block_table[:2], "what somebody holds is never evicted"


@task("6.4", "The prefix cache", points=2)
def test_a_full_hit_still_runs_the_last_token_in_a_copy(exercise):
    manager = exercise.BlockManager(16, 4)
    a = run(manager, sequence(8))
    a.token_ids.append(50)
    run(manager, a, 1)
    b = sequence(8, request_id=1)
    assert manager.can_allocate(b)
    manager.allocate(b)
    assert b.num_computed_tokens == 7, "the next token is chosen from what comes out of the last"
    shared = b.block_table[1]
    assert manager.grow(b, 1)
    assert b.block_table[0] == a.block_table[0] and b.block_table[1] != shared == a.block_table[1]
    assert b.block_copy == (shared, b.block_table[1]), "the cache is told what to copy"
    audit(manager, [a, b])
    alone = exercise.BlockManager(2, 4)
    alone.free(run(alone, sequence(8)))
    again = sequence(8)
    assert alone.can_allocate(again), (
        "with no block for a copy, the last block is computed again: nobody waits for ever"
    )
    run(alone, again)
    audit(alone, [again])


@task("6.4", "The prefix cache", points=2)
def test_the_least_recently_used_goes_first(exercise):
    manager = exercise.BlockManager(4, 2)
    old, held, new = (run(manager, Sequence(name, tokens, 5)) for name, tokens in
                      (("old", [1, 1]), ("held", [2, 2]), ("new", [3, 3])))  # fmt: skip
    manager.free(old)
    manager.free(new)
    other = run(manager, Sequence("other", [4, 4, 5, 5], 5))  # the free block, then the oldest of the cached
    assert manager.find_prefix([1, 1]) == [] and len(manager.find_prefix([3, 3])) == 1
    assert len(held.block_table) == 1 and not set(held.block_table) & set(other.block_table), "held: not to be had"
    assert not manager.can_allocate(Sequence("big", [6] * 4, 1)), "one block can be had, two are needed"
    audit(manager, [held, other])


@task("6.4", "The prefix cache", points=1)
def test_the_end_of_a_sequence_is_evicted_before_its_beginning(exercise):
    manager = exercise.BlockManager(4, 2)
    manager.free(run(manager, Sequence(0, [1, 2, 3, 4, 5, 6], 5)))
    run(manager, Sequence(1, [9, 9, 8, 8], 5))
    assert len(manager.find_prefix([1, 2, 3, 4, 5, 6])) == 2, "a block is of no use without those before it"


@task("6.4", "The prefix cache", points=2)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_any_order_of_events_adds_up_with_shared_blocks(exercise, block_size):
    for seed in range(15):
        rng = random.Random(seed)
        random_walk(exercise.BlockManager(rng.randint(1, 10), block_size), rng)


# --- 6.5 ---


@pytest.fixture(scope="module")
def smollm2():
    return load_model(dtype="float32")


class Audited(Scheduler):
    def schedule(self):
        audit(self.memory, self.running)
        return super().schedule()


def answers(llm, prompts, params):
    """Step by step, so that a manager that never lets anybody finish is found out."""
    ids = [llm.add_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    done = {}
    for _ in range(60):
        done |= {output.request_id: output.completion for output in llm.step() if output.completion}
    assert len(done) == len(ids), f"{len(ids) - len(done)} of {len(ids)} requests have not ended after 60 steps"
    return [done[i] for i in ids]


@task("6.5", "Your block manager in the real engine", points=4)
def test_smollm2_says_the_same(exercise, smollm2):
    common = smollm2.tokenizer.encode("A list of capitals. Germany: Berlin. Italy: Rome. Spain: Madrid. France:")[:16]
    prompts = [common, [100], common + common[4:9], "Once upon a time"]  # 16, 1, 21 and 4 tokens
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 8, 6, 10)]
    expected = [c.token_ids for c in prefill_decode.generate(smollm2, prompts, params)]
    for num_blocks in (60, 9):  # nine blocks of four tokens: somebody must give way
        limits = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": 256}
        llm = LLM(smollm2, block_manager=exercise.BlockManager, scheduler=Audited, **limits)
        for warm in (False, True):
            completions = answers(llm, prompts, params)
            assert [c.error for c in completions] == [None] * 4
            assert [c.token_ids for c in completions] == expected, (
                f"other tokens, with {num_blocks} blocks, warm={warm}"
            )
            numbers = llm.metrics()
            assert numbers["blocks_used"] == 0, "all blocks are back"
            assert numbers["blocks_free"] + numbers["blocks_cached"] == num_blocks
            if num_blocks == 60 and warm:
                cached = [c.metrics.cached_tokens for c in completions]
                assert cached == [15, 0, 20, 3], f"prompt tokens found in the prefix cache: {cached}"
        assert (numbers["preemptions"] > 0) == (num_blocks == 9)

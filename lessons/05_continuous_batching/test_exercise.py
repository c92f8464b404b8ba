"""Graded tests of exercise 05: plain Python with counted memory, then a tiny random model, then SmolLM2."""

import pytest
import torch

from minillm import LLM, SamplingParams, load_model, prefill_decode
from minillm.continuous_batching import (
    ScheduledStep,
    Scheduler,
    Sequence,
    SlotCache,
    SlotManager,
    Status,
    forward,
    generate_with,
    run_step,
)
from minillm.grading import task
from minillm.model.config import ModelConfig
from minillm.model.weights import random_model
from minillm.paged_attention import BlockManager, PagedCache

REFERENCE = {"SlotManager": SlotManager, "Scheduler": Scheduler, "forward": forward, "run_step": run_step}
CONFIG = ModelConfig(259, 96, 2, 6, 2, 16, 128, 256)
PROMPTS = [list(b"abc"), list(b"seven_7"), list(b"twelve chars"), list(b"x")]


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def sequence(request_id, prompt, max_tokens=10):
    return Sequence(request_id, [0] * prompt, max_tokens)


class Memory:
    """A memory manager that counts tokens: nothing is cut into slots or blocks."""

    def __init__(self, max_tokens):
        self.max_tokens, self.held = max_tokens, {}

    def free_tokens(self):
        return self.max_tokens - sum(self.held.values())

    def can_allocate(self, sequence):
        return sequence.num_tokens <= self.free_tokens()

    def allocate(self, sequence):
        assert sequence not in self.held, "allocated twice"
        self.held[sequence] = 0

    def grow(self, sequence, num_tokens):
        more = sequence.num_computed_tokens + num_tokens - self.held[sequence]
        if more > self.free_tokens():
            return False
        self.held[sequence] += more
        return True

    def free(self, sequence):
        del self.held[sequence]


def ran(step):
    return [(s.request_id, n) for s, n in step.scheduled]


def advance(scheduler, step):
    """The pass has run; everybody who has run all its tokens gets a new one."""
    for s in scheduler.update(step):
        s.token_ids.append(0)


def steps(scheduler, count):
    seen = []
    for _ in range(count):
        step = scheduler.schedule()
        seen.append(ran(step))
        advance(scheduler, step)
    return seen


# --- 5.1 ---


@task("5.1", "A memory of slots", points=2)
def test_a_slot_each_and_back_again(exercise):
    memory = exercise.SlotManager(2, 16)
    a, b, c = (sequence(i, 3) for i in range(3))
    assert memory.max_tokens == 16, "the most that one sequence can ever hold"
    for s in (a, b):
        assert memory.can_allocate(s)
        memory.allocate(s)
    assert sorted(a.block_table + b.block_table) == [0, 1], "a slot each, and not the same"
    assert not memory.can_allocate(c), "all slots are taken"
    slot = list(a.block_table)
    memory.free(a)
    assert a.block_table == [] and memory.can_allocate(c)
    memory.allocate(c)
    assert c.block_table == slot and b.block_table != slot
    memory.free(b)
    memory.free(c)
    assert sorted(memory.free_slots) == [0, 1], "all slots are back, each once"


@task("5.1", "A memory of slots", points=1)
@pytest.mark.parametrize(
    "computed, new, fits", [(0, 16, True), (0, 17, False), (15, 1, True), (16, 1, False), (9, 8, False)]
)
def test_a_slot_does_not_grow(exercise, computed, new, fits):
    memory = exercise.SlotManager(1, 16)
    s = sequence(0, 3)
    memory.allocate(s)
    s.num_computed_tokens = computed
    assert memory.grow(s, new) is fits, f"{computed} tokens held and {new} more, in a slot of 16"


@task("5.1", "A memory of slots", points=1)
def test_usage_counts_what_is_given_and_what_is_held(exercise):
    memory = exercise.SlotManager(4, 16)
    a, b = sequence("a", 3), sequence("b", 9)
    for s, n in ((a, 3), (b, 9)):
        memory.allocate(s)
        s.num_computed_tokens = n
    usage = memory.usage([a, b])
    assert usage["kv_allocated"] == 32, "two whole slots"
    assert usage["kv_used"] == 12 and usage["num_blocks"] == 4
    assert usage["owners"] == {a.block_table[0]: ["a"], b.block_table[0]: ["b"]}


# --- 5.2 ---


@task("5.2", "The scheduler", points=3)
def test_chunks_beside_decodes_within_the_budget(exercise):
    scheduler = exercise.Scheduler(SlotManager(4, 100), max_num_seqs=3, max_num_batched_tokens=8)
    for i, prompt in enumerate((3, 10, 2, 1)):
        scheduler.add(sequence(i, prompt))
    seen = steps(scheduler, 3)
    assert seen[0] == [(0, 3), (1, 5)], "the second prompt is cut to what is left of the budget"
    assert seen[1] == [(0, 1), (1, 5), (2, 2)], "a decode, the rest of the second prompt, and the third"
    assert seen[2] == [(0, 1), (1, 1), (2, 1)], "three run at a time: the fourth waits"
    scheduler.finish(scheduler.running[1], "stop")
    assert steps(scheduler, 1) == [[(0, 1), (2, 1), (3, 1)]], "who waits takes the place at the very next step"


@task("5.2", "The scheduler", points=2)
def test_first_come_first_served(exercise):
    scheduler = exercise.Scheduler(Memory(20), max_num_batched_tokens=64)
    scheduler.add(sequence(0, 8))
    scheduler.add(sequence(1, 15, max_tokens=5))
    scheduler.add(sequence(2, 1))
    assert steps(scheduler, 1) == [[(0, 8)]], "the third would fit, but nobody overtakes the second"
    assert [s.request_id for s in scheduler.waiting] == [1, 2]
    assert [s.status for s in scheduler.waiting] == [Status.WAITING] * 2
    assert [s.status for s in scheduler.running] == [Status.RUNNING]


@task("5.2", "The scheduler", points=1)
def test_the_budget_goes_to_the_oldest(exercise):
    scheduler = exercise.Scheduler(Memory(1000), max_num_batched_tokens=4)
    for i in range(6):
        scheduler.add(sequence(i, 1, max_tokens=50))
    steps(scheduler, 3)
    assert steps(scheduler, 1) == [[(0, 1), (1, 1), (2, 1), (3, 1)]]


@task("5.2", "The scheduler", points=1)
def test_without_chunks_a_prompt_runs_whole_or_waits(exercise):
    scheduler = exercise.Scheduler(SlotManager(4, 100), max_num_batched_tokens=10, enable_chunked_prefill=False)
    for i, prompt in enumerate((6, 5, 1)):
        scheduler.add(sequence(i, prompt, max_tokens=3))
    assert steps(scheduler, 2) == [[(0, 6)], [(0, 1), (1, 5), (2, 1)]]
    assert len(scheduler.memory.free_slots) == 1, "who was turned away holds no memory"


@task("5.2", "The scheduler", points=2)
def test_what_can_never_run_is_refused_at_the_door(exercise):
    scheduler = exercise.Scheduler(SlotManager(2, 16))
    with pytest.raises(ValueError):
        scheduler.add(sequence(0, 20, max_tokens=1))
    with pytest.raises(ValueError):
        scheduler.add(sequence(1, 10, max_tokens=7))
    whole = exercise.Scheduler(SlotManager(2, 100), max_num_batched_tokens=8, enable_chunked_prefill=False)
    with pytest.raises(ValueError):
        whole.add(sequence(2, 9, max_tokens=1))
    assert not scheduler.has_unfinished and not whole.has_unfinished, "a refused request is not queued"
    scheduler.add(sequence(3, 10, max_tokens=6))
    assert scheduler.has_unfinished and steps(scheduler, 1) == [[(3, 10)]]


@task("5.2", "The scheduler", points=2)
def test_those_that_leave_give_their_memory_back_and_are_counted(exercise):
    scheduler = exercise.Scheduler(Memory(60), max_num_batched_tokens=64, max_num_seqs=2)
    a, b, c = (sequence(i, 4) for i in range(3))
    for s in (a, b, c):
        scheduler.add(s)
    steps(scheduler, 1)
    scheduler.finish(a, "length")
    scheduler.abort(c)  # while it waits
    scheduler.abort(a)  # has ended: stays as it is
    assert (a.status, a.finish_reason) == (Status.FINISHED, "length")
    assert (c.status, c.finish_reason) == (Status.ABORTED, "abort")
    assert set(scheduler.memory.held) == {b}, "its memory is free for the next step"
    assert steps(scheduler, 1) == [[(1, 1)]]
    scheduler.abort(b)
    assert not scheduler.has_unfinished and not scheduler.memory.held
    assert scheduler.counts == {Status.FINISHED: 1, Status.ABORTED: 2}


@task("5.2", "The scheduler", points=1)
def test_a_step_without_progress_is_an_error(exercise):
    class Full(Memory):
        def can_allocate(self, sequence):
            return False

    scheduler = exercise.Scheduler(Full(20))
    assert scheduler.schedule().scheduled == [], "with nothing to do, doing nothing is right"
    scheduler.add(sequence(0, 3))
    with pytest.raises(RuntimeError):
        scheduler.schedule()


# --- 5.3 ---


@task("5.3", "Preempting and resuming", points=3)
def test_the_newest_gives_way(exercise):
    scheduler = exercise.Scheduler(Memory(12), max_num_batched_tokens=64)
    for i in range(4):
        scheduler.add(sequence(i, 3, max_tokens=8))
    steps(scheduler, 1)
    step = scheduler.schedule()  # each needs a place more, and none is left
    assert [s.request_id for s in step.preempted] == [3], "the newest, and no more than it takes"
    assert ran(step) == [(0, 1), (1, 1), (2, 1)]
    [preempted] = step.preempted
    assert preempted.num_computed_tokens == 0, "its keys and values are gone"
    assert preempted.num_tokens == 4, "its tokens are not"
    assert preempted.status is Status.WAITING and preempted.num_preemptions == 1
    advance(scheduler, step)
    step = scheduler.schedule()
    assert [s.request_id for s in step.preempted] == [2]
    assert [s.request_id for s in scheduler.waiting] == [2, 3], "in order of arrival, before all that came later"
    assert scheduler.memory.held.keys() == set(scheduler.running)


@task("5.3", "Preempting and resuming", points=2)
def test_nobody_is_admitted_in_a_step_that_preempted(exercise):
    class Optimist(Memory):  # as a memory that only looks at the next chunk
        def can_allocate(self, sequence):
            return True

    preempted = 0
    for max_tokens in range(9, 20):
        for budget in range(2, 7):
            scheduler = exercise.Scheduler(Optimist(max_tokens), max_num_batched_tokens=budget)
            for i, prompt in enumerate((4, 4, 3, 1)):
                scheduler.add(sequence(i, prompt, max_tokens=5))
            for _ in range(8):
                before = set(scheduler.running)
                step = scheduler.schedule()
                if step.preempted:
                    preempted += 1
                    assert set(scheduler.running) <= before - set(step.preempted), (
                        "the room was made for those that run"
                    )
                advance(scheduler, step)
                for s in [s for s in scheduler.running if s.num_tokens == s.num_prompt_tokens + s.max_tokens]:
                    scheduler.finish(s, "length")
    assert preempted, "nobody was preempted, though the memory ran out"


@task("5.3", "Preempting and resuming", points=2)
def test_who_returns_runs_prompt_and_output_again(exercise):
    scheduler = exercise.Scheduler(Memory(12), max_num_batched_tokens=64)
    scheduler.add(sequence(0, 5, max_tokens=7))
    scheduler.add(sequence(1, 4, max_tokens=7))
    for _ in range(6):
        step = scheduler.schedule()
        if step.preempted:
            break
        advance(scheduler, step)
    [preempted] = step.preempted
    had = preempted.num_tokens
    assert had > preempted.num_prompt_tokens, "it had begun to answer"
    advance(scheduler, step)
    scheduler.finish(scheduler.running[0], "stop")
    assert steps(scheduler, 1) == [[(1, had)]], "all that it had, in one pass"
    assert preempted.num_tokens == had + 1


@task("5.3", "Preempting and resuming", points=3)
@pytest.mark.parametrize("block_size, num_blocks", [(4, 7), (1, 26)])
def test_preempted_or_not_the_tokens_are_the_same(exercise, model, block_size, num_blocks):
    params = [SamplingParams(max_tokens=12, temperature=t, seed=5, ignore_eos=True) for t in (0, 1, 0, 1)]
    expected = prefill_decode.generate(model, PROMPTS, params)
    scheduler = exercise.Scheduler(BlockManager(num_blocks, block_size), max_num_batched_tokens=16)
    cache = PagedCache(CONFIG, num_blocks, block_size, torch.float32)
    out = generate_with(scheduler, cache, model, PROMPTS, params)
    assert sum(c.metrics.preemptions for c in out) > 0, "the pool is too small for all of them"
    assert [c.token_ids for c in out] == [c.token_ids for c in expected]


# --- 5.4 ---


def scheduled_for(prompts, counts, computed=(0, 0, 0, 0)):
    scheduled = []
    for i, (prompt, n, done) in enumerate(zip(prompts, counts, computed, strict=False)):
        s = Sequence(i, list(prompt), 5)
        s.block_table, s.num_computed_tokens = [i], done
        scheduled.append((s, n))
    return scheduled


@task("5.4", "The iteration-level loop", points=3)
def test_tokens_and_positions_are_flat(exercise, model, monkeypatch):
    seen, real = [], model.forward
    monkeypatch.setattr(model, "forward", lambda t, p, c: seen.append((t.tolist(), p.tolist())) or real(t, p, c))
    cache = SlotCache(CONFIG, 4, 32, torch.float32)
    cache.k.zero_()
    cache.v.zero_()
    scheduled = scheduled_for(PROMPTS[:3], (1, 4, 5), computed=(2, 0, 7))
    logits = exercise.forward(model, cache, scheduled)
    expected = (PROMPTS[0][2:] + PROMPTS[1][:4] + PROMPTS[2][7:], [2, 0, 1, 2, 3, 7, 8, 9, 10, 11])
    assert seen == [expected], "one pass; each sequence goes on where it stopped"
    assert logits.shape == (2, 259), "a row for each sequence whose last token ran: the second has three more to run"


@task("5.4", "The iteration-level loop", points=2)
def test_logits_are_those_of_the_last_tokens(exercise, model):
    cache = SlotCache(CONFIG, 4, 32, torch.float32)
    logits = exercise.forward(model, cache, scheduled_for(PROMPTS, [len(p) for p in PROMPTS]))
    for row, prompt in enumerate(PROMPTS):
        alone = SlotCache(CONFIG, 1, 32, torch.float32)
        torch.testing.assert_close(
            logits[row], forward(model, alone, scheduled_for([prompt], [len(prompt)]))[0], atol=1e-4, rtol=0
        )
    cache = SlotCache(CONFIG, 4, 32, torch.float32)
    assert exercise.forward(model, cache, scheduled_for(PROMPTS[1:3], (2, 3))).shape == (0, 259), "nobody is through"


@task("5.4", "The iteration-level loop", points=3)
def test_one_iteration(exercise):
    scheduler = Scheduler(SlotManager(2, 50), max_num_batched_tokens=6)
    scheduler.add(sequence("a", 4))
    scheduler.add(sequence("b", 5))
    asked = []

    def forward(scheduled):
        assert all(s.num_computed_tokens + n <= s.num_tokens for s, n in scheduled), "counted before it has run"
        return torch.zeros(sum(s.num_computed_tokens + n == s.num_tokens for s, n in scheduled), 7)

    def choose(logits, ready):
        asked.append((len(logits), [s.request_id for s in ready]))
        return [7 + i for i in range(len(ready))]

    step, new = exercise.run_step(scheduler, forward, choose)
    assert isinstance(step, ScheduledStep) and [(s.request_id, t) for s, t in new] == [("a", 7)]
    assert [s.token_ids for s in scheduler.running] == [[0] * 4 + [7], [0] * 5], "half a prompt gives no token"
    assert [s.num_computed_tokens for s in scheduler.running] == [4, 2]
    _, new = exercise.run_step(scheduler, forward, choose)
    assert [(s.request_id, t) for s, t in new] == [("a", 7), ("b", 8)]
    assert asked == [(1, ["a"]), (2, ["a", "b"])], "asked for those, and only those, that have run all their tokens"


@task("5.4", "The iteration-level loop", points=1)
def test_a_pass_in_which_nobody_is_through(exercise):
    scheduler = Scheduler(SlotManager(1, 50), max_num_batched_tokens=2)
    scheduler.add(sequence("a", 5))

    def choose(logits, ready):
        pytest.fail("there is nobody to choose for")

    _, new = exercise.run_step(scheduler, lambda scheduled: torch.zeros(0, 7), choose)
    assert new == [] and scheduler.running[0].num_computed_tokens == 2


# --- 5.5 ---


@pytest.fixture(scope="module")
def smollm2():
    return load_model(dtype="float32")


@task("5.5", "Your scheduler in the real engine", points=4, timeout=120)
def test_smollm2_says_the_same(exercise, smollm2):
    prompts = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived", "1, 2, 3,"]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (8, 12, 5)]
    expected = [c.text for c in prefill_decode.generate(smollm2, prompts, params)]
    for num_blocks, budget in ((64, 512), (7, 7)):  # seven blocks of four tokens: somebody must give way
        llm = LLM(
            smollm2, scheduler=exercise.Scheduler, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget
        )
        assert [c.text for c in llm.generate(prompts, params, use_tqdm=False)] == expected
        numbers = llm.metrics()
        assert (numbers["running"], numbers["waiting"], numbers["finished"], numbers["failed"]) == (0, 0, 3, 0)
        assert (numbers["preemptions"] > 0) == (num_blocks == 7)
        assert numbers["blocks_used"] == 0, "all memory is back"
        assert numbers["steps"] <= (12 if num_blocks == 64 else 40), "requests run together, not one after the other"

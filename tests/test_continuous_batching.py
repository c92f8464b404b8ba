"""Step 5: who runs when, and that nobody's tokens depend on it."""

import random

import pytest
import torch

from minillm import naive_decode
from minillm.continuous_batching import (
    Scheduler,
    Sequence,
    SlotCache,
    SlotManager,
    Status,
    forward,
    generate,
    run_step,
)
from minillm.model.sampling import SamplingParams
from minillm.trace import Waste

PROMPTS = [list(b"abc"), list(b"seven_7"), list(b"twelve chars"), list(b"x"), list(b"a longer prompt, of 31 tokens..")]
NEW = [9, 1, 30, 14, 5]


class Counter:
    """A memory of so many tokens, counted: nothing is cut into slots or blocks."""

    def __init__(self, max_tokens):
        self.max_tokens, self.held = max_tokens, {}

    def free_tokens(self):
        return self.max_tokens - sum(self.held.values())

    def can_allocate(self, sequence):
        return sequence.num_tokens <= self.free_tokens()

    def allocate(self, sequence):
        self.held[sequence] = 0

    def grow(self, sequence, num_tokens):
        more = sequence.num_computed_tokens + num_tokens - self.held[sequence]
        if more > self.free_tokens():
            return False
        self.held[sequence] += more
        return True

    def free(self, sequence):
        del self.held[sequence]


def sequence(request_id, prompt, max_tokens=10):
    return Sequence(request_id, [0] * prompt, max_tokens)


def ran(step):
    return [(s.request_id, n) for s, n in step.scheduled]


def advance(scheduler, step):
    for s in scheduler.update(step):
        s.token_ids.append(0)


def test_first_come_first_served_and_chunks_beside_decodes():
    scheduler = Scheduler(SlotManager(3, 100), max_num_seqs=3, max_num_batched_tokens=8)
    for i, prompt in enumerate((3, 10, 2, 1)):
        scheduler.add(sequence(i, prompt))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        seen.append(ran(step))
        advance(scheduler, step)
    assert seen == [
        [(0, 3), (1, 5)],  # the budget cuts the second prompt
        [(0, 1), (1, 5), (2, 2)],  # a decode, the rest of the prompt, and a third
        [(0, 1), (1, 1), (2, 1)],  # no fourth: three run at a time
        [(0, 1), (1, 1), (2, 1)],
    ]
    scheduler.finish(scheduler.running[1], "stop")
    assert ran(scheduler.schedule()) == [(0, 1), (2, 1), (3, 1)], "who waits takes the place at the next step"


def test_nobody_overtakes():
    scheduler = Scheduler(Counter(20), max_num_batched_tokens=64)
    scheduler.add(sequence(0, 8))
    scheduler.add(sequence(1, 15, max_tokens=5))
    scheduler.add(sequence(2, 1))
    step = scheduler.schedule()
    assert ran(step) == [(0, 8)], "the third would fit, but the second was there before it"
    assert [s.request_id for s in scheduler.waiting] == [1, 2]


def test_without_chunks_a_prompt_runs_whole_or_waits():
    scheduler = Scheduler(SlotManager(4, 100), max_num_batched_tokens=10, enable_chunked_prefill=False)
    for i, prompt in enumerate((6, 5, 1)):
        scheduler.add(sequence(i, prompt, max_tokens=3))
    seen = []
    for _ in range(3):
        step = scheduler.schedule()
        seen.append(ran(step))
        advance(scheduler, step)
    assert seen == [[(0, 6)], [(0, 1), (1, 5), (2, 1)], [(0, 1), (1, 1), (2, 1)]]
    with pytest.raises(ValueError, match="request 9: 9 prompt tokens and up to 2 more, a pass without chunked"):
        scheduler.add(sequence(9, 9, max_tokens=2))


def test_preemption_takes_the_newest_and_admits_nobody():
    scheduler = Scheduler(Counter(12), max_num_batched_tokens=64)
    for i in range(4):
        scheduler.add(sequence(i, 3, max_tokens=8))
    step = scheduler.schedule()
    assert ran(step) == [(i, 3) for i in range(4)]
    advance(scheduler, step)
    step = scheduler.schedule()  # four need a place more each, and none is left
    assert [s.request_id for s in step.preempted] == [3] and ran(step) == [(0, 1), (1, 1), (2, 1)]
    [preempted] = step.preempted
    assert preempted.status is Status.WAITING and preempted.num_computed_tokens == 0
    assert preempted.num_tokens == 4, "it keeps the token that it got"
    assert scheduler.waiting[0] is preempted, "it is next, before all newer ones"
    advance(scheduler, step)
    step = scheduler.schedule()
    assert [s.request_id for s in step.preempted] == [2]
    assert [s.request_id for s in scheduler.waiting] == [2, 3], "in order of arrival"
    scheduler.abort(scheduler.running[0])
    step = scheduler.schedule()
    assert ran(step)[-1] == (2, 5), "resumed: prompt and output are run again, together"


def test_a_sequence_may_preempt_itself():
    scheduler = Scheduler(Counter(10), max_num_batched_tokens=4)
    scheduler.add(sequence(0, 4, max_tokens=6))
    scheduler.add(sequence(1, 5, max_tokens=2))
    preempted = []
    for _ in range(3):
        step = scheduler.schedule()
        advance(scheduler, step)
        preempted.append([s.request_id for s in step.preempted])
        assert step.scheduled[0][0].request_id == 0, "the oldest goes on"
    assert preempted == [[], [], [1]]


def test_C15_what_can_never_fit_is_refused_at_the_door():
    scheduler = Scheduler(SlotManager(2, 16))
    with pytest.raises(ValueError, match="request 0: 20 prompt tokens and up to 1 more, the memory holds at most 16"):
        scheduler.add(sequence(0, 20, max_tokens=1))
    scheduler.add(sequence(1, 6))
    assert ran(scheduler.schedule()) == [(1, 6)]


def test_no_progress_is_an_error_and_no_endless_loop():
    class Full(Counter):
        def can_allocate(self, sequence):
            return False

    scheduler = Scheduler(Full(10))
    scheduler.add(sequence(0, 3, 3))
    with pytest.raises(RuntimeError, match="no progress: 0 running, 1 waiting"):
        scheduler.schedule()


@pytest.mark.parametrize("when", ["waiting", "running", "half prefilled"])
def test_abort(when):
    scheduler = Scheduler(SlotManager(2, 50), max_num_batched_tokens=4)
    first, second = sequence(0, 3), sequence(1, 20)
    scheduler.add(first)
    scheduler.add(second)
    if when != "waiting":
        advance(scheduler, scheduler.schedule())
    victim = first if when == "running" else second
    scheduler.abort(victim)
    assert (victim.status, victim.finish_reason) == (Status.ABORTED, "abort")
    scheduler.abort(victim)  # once more is no fault
    assert scheduler.counts == {Status.ABORTED: 1}
    other = second if victim is first else first
    assert [s for s, _ in scheduler.schedule().scheduled] == [other]
    scheduler.finish(other, "length")
    assert not scheduler.has_unfinished and len(scheduler.memory.free_slots) == 2


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        Scheduler(SlotManager(1, 1), **{name: 0})
    with pytest.raises(ValueError, match="num_slots=0: must be at least 1"):
        SlotManager(0, 8)


# --- the loop, on a model ---


def test_a_pass_gives_logits_to_those_whose_last_token_ran(tiny_model):
    memory, cache = SlotManager(2, 64), SlotCache(tiny_model.config, 2, 64, torch.float32)
    scheduler = Scheduler(memory, max_num_batched_tokens=10)
    for i, prompt in enumerate((PROMPTS[1], PROMPTS[2])):
        scheduler.add(Sequence(i, list(prompt), 5))
    shapes = []

    def choose(logits, ready):
        shapes.append((tuple(logits.shape), [s.request_id for s in ready]))
        return logits.argmax(-1).tolist()

    for _ in range(3):
        run_step(scheduler, lambda scheduled: forward(tiny_model, cache, scheduled), choose)
    assert shapes == [((1, 259), [0]), ((2, 259), [0, 1]), ((2, 259), [0, 1])]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 32])
@pytest.mark.parametrize("budget", [1, 3, 7, 512])
def test_same_tokens_as_the_naive_loop(tiny_model, budget, max_num_seqs):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in NEW]
    expected = naive_decode.generate(tiny_model, PROMPTS, params)
    out = generate(tiny_model, PROMPTS, params, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    assert [(c.token_ids, c.text, c.finish_reason) for c in out] == [
        (c.token_ids, c.text, c.finish_reason) for c in expected
    ]


def test_C27_a_seeded_row_does_not_depend_on_its_neighbours(tiny_model):
    """Nor on its place in the batch, or on when it runs."""
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=42, ignore_eos=True)
    [alone] = naive_decode.generate(tiny_model, [PROMPTS[0]], seeded)
    others = [SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True), seeded, SamplingParams(max_tokens=3)]
    for seed in range(4):
        order = random.Random(seed).sample(others, len(others))
        prompts = [*PROMPTS[1:4], PROMPTS[0], PROMPTS[0]]
        out = generate(tiny_model, prompts, [*order, seeded, seeded], max_num_seqs=seed + 1, max_num_batched_tokens=9)
        assert out[-1].token_ids == out[-2].token_ids == alone.token_ids


def test_nothing_runs_for_nothing(tiny_model):
    trace = []
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in NEW]
    generate(tiny_model, PROMPTS, params, max_num_seqs=3, trace=trace)
    waste = Waste.of(trace)
    assert waste.padded_prompt_tokens == waste.finished_decode_slots == 0
    assert sum(step.num_tokens for step in trace) == sum(map(len, PROMPTS)) + sum(n - 1 for n in NEW)
    assert waste.kv_waste > 0.3, "what contiguous slots cost"


def test_the_rest_of_a_slot_is_never_read(tiny_model):
    cache = SlotCache(tiny_model.config, 2, 64, torch.float32)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("inf"))
    scheduler = Scheduler(SlotManager(2, 64), max_num_batched_tokens=5)
    sequences = [Sequence(i, list(p), 8) for i, p in enumerate(PROMPTS[:2])]
    for s in sequences:
        scheduler.add(s)
    while any(s.num_tokens < s.num_prompt_tokens + 8 for s in sequences):
        run_step(
            scheduler, lambda scheduled: forward(tiny_model, cache, scheduled), lambda x, ready: x.argmax(-1).tolist()
        )
    expected = naive_decode.generate(tiny_model, PROMPTS[:2], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [s.token_ids[s.num_prompt_tokens :][:8] for s in sequences] == [c.token_ids for c in expected]


def test_slots_too_short_for_a_prompt(tiny_model):
    with pytest.raises(ValueError, match="7 tokens, must be at most the context's 5"):
        generate(tiny_model, PROMPTS[:2], slot_tokens=5)
    [c] = generate(tiny_model, [PROMPTS[0]], SamplingParams(max_tokens=50, ignore_eos=True), slot_tokens=5)
    assert (len(c.token_ids), c.finish_reason) == (2, "length")
    assert generate(tiny_model, []) == []

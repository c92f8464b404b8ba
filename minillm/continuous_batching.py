"""Step 5: rows join and leave at every step.

What changes: who runs is decided anew before each pass. A row that has ended leaves at once and a waiting one takes
its place, so nobody runs for nothing and nobody waits for a whole batch. A pass is flat, a list of sequences with a
number of tokens each: one sequence may decode its next token while another runs a chunk of its prompt. No rectangle,
no pads.

Two numbers a sequence do all the accounting: `num_tokens`, that it has, and `num_computed_tokens`, whose keys and
values are in the cache. What lies between is still to run. Prefill, a chunk of it, decode, and beginning again after
a preemption are only sizes of that difference; the scheduler knows no phases.

`Scheduler` and the memory managers are plain Python, without torch. The scheduler asks its memory four things (can it
take this, take it, grow it, give it back), so the contiguous slots of this step and the pages of the next are
interchangeable. What the slots cost: each sequence holds memory for the longest that it might become.

Source: Yu et al. 2022 (Orca, iteration-level scheduling); Agrawal et al. 2024 (Sarathi-Serve, chunked prefill mixed
with decode).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from .completion import Completion, choose_tokens, prepare
from .kv_cache import kv_bytes
from .model.config import ModelConfig
from .model.llama import Llama, attention
from .model.sampling import SamplingParams
from .trace import RowTrace, StepTrace

Status = Enum("Status", ["WAITING", "RUNNING", "FINISHED", "ABORTED"])


@dataclass(eq=False, slots=True)
class Sequence:
    """One request as the scheduler sees it."""

    request_id: Hashable
    token_ids: list[int]  # the prompt, then the output as it comes
    max_tokens: int  # of output, at most
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0  # the first so many tokens have their keys and values in the cache
    status: Status = Status.WAITING
    finish_reason: str | None = None
    num_preemptions: int = 0
    # Notes of the memory manager: which parts of the cache are this sequence's, in order. A contiguous slot is a
    # table of one entry; pages (step 6) make it longer, may come filled, and may need a copy before the next pass.
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # found in the prefix cache when it was admitted first
    block_copy: tuple[int, int] | None = None  # (from, to)

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class MemoryManager(Protocol):
    """What the scheduler asks of the memory for keys and values."""

    max_tokens: int  # the most that one sequence can ever hold

    def can_allocate(self, sequence: Sequence) -> bool:
        """Is there memory now for all tokens that it has?"""
        ...

    def allocate(self, sequence: Sequence) -> None:
        """Take it in. May set `num_computed_tokens`, where the cache has some of its tokens already."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for its next `num_tokens` tokens. All or nothing: False leaves everything as it was."""
        ...

    def free(self, sequence: Sequence) -> None:
        """Take its memory back."""
        ...


class SlotManager:
    """Contiguous memory: a slot of `slot_tokens` tokens for each sequence, whatever it needs of it.

    Answers what `MemoryManager` asks. `free_slots` are those that nobody has; a sequence's block table is its one slot.
    """

    def __init__(self, num_slots: int, slot_tokens: int):
        for name, value in (("num_slots", num_slots), ("slot_tokens", slot_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.num_slots, self.max_tokens = num_slots, slot_tokens
        self.free_slots = list(range(num_slots - 1, -1, -1))

    def can_allocate(self, sequence: Sequence) -> bool:
        return bool(self.free_slots)

    def allocate(self, sequence: Sequence) -> None:
        sequence.block_table = [self.free_slots.pop()]

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        return sequence.num_computed_tokens + num_tokens <= self.max_tokens

    def free(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.block_table.pop())

    def usage(self, running: Iterable[Sequence]) -> dict:
        """For `StepTrace`."""
        owners = {sequence.block_table[0]: [sequence.request_id] for sequence in running}
        used = sum(sequence.num_computed_tokens for sequence in running)
        return {
            "kv_allocated": len(owners) * self.max_tokens,
            "kv_used": used,
            "num_blocks": self.num_slots,
            "owners": owners,
        }


@dataclass
class ScheduledStep:
    """What the next pass runs."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)  # who, and how many tokens
    preempted: list[Sequence] = field(default_factory=list)  # who had to give its memory back


class Scheduler:
    """Decides before each pass who runs, and how many tokens of it. First come, first served.

    max_num_seqs: sequences that run at a time. max_num_batched_tokens: tokens of a pass, the budget that decode and
    prompts share: a long prompt is cut to what is left of it (chunked prefill), so it cannot make everybody else
    wait. With enable_chunked_prefill off a prompt runs whole, in a pass that has room for it.

    `waiting` and `running` hold the sequences, oldest first; `counts` says how many have finished and were aborted.
    """

    def __init__(
        self,
        memory: MemoryManager,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        enable_chunked_prefill: bool = True,
    ):
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.memory = memory
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: deque[Sequence] = deque()  # oldest first
        self.running: list[Sequence] = []  # oldest first
        self.counts: Counter[Status] = Counter()  # of sequences that have left: finished, aborted

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue it. ValueError for one that could never run to its end."""
        most = sequence.num_prompt_tokens + sequence.max_tokens
        limits = {"the memory holds": self.memory.max_tokens}
        if not self.enable_chunked_prefill:  # whole, and once more whole with its output if it is preempted
            limits["a pass without chunked prefill takes"] = self.max_num_batched_tokens
        for what, limit in limits.items():
            if most > limit:
                raise ValueError(
                    f"request {sequence.request_id!r}: {sequence.num_prompt_tokens} prompt tokens and up to "
                    f"{sequence.max_tokens} more, {what} at most {limit}"
                )
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledStep:
        """Who runs in the next pass, and how many tokens of it. RuntimeError where nobody can though somebody wants."""
        step = ScheduledStep()
        budget = self._schedule_running(step, self.max_num_batched_tokens)
        if not step.preempted:  # who was just preempted must not come back in the memory that it made room with
            self._admit(step, budget)
        if not step.scheduled and self.has_unfinished:
            raise RuntimeError(f"no progress: {len(self.running)} running, {len(self.waiting)} waiting, none can run")
        return step

    def _schedule_running(self, step: ScheduledStep, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if self.memory.grow(sequence, num_tokens):
                step.scheduled.append((sequence, num_tokens))
                budget -= num_tokens
                index += 1
            else:  # out of memory: the newest gives back its own, perhaps this one itself, and tries later
                step.preempted.append(self._preempt_newest())
        return budget

    def _preempt_newest(self) -> Sequence:
        """By recomputation: it keeps its tokens, and runs them again when there is memory."""
        sequence = self.running.pop()
        self.memory.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        return sequence

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self.memory.can_allocate(sequence):
                return  # nobody overtakes
            self.memory.allocate(sequence)
            num_tokens = sequence.num_tokens - sequence.num_computed_tokens
            whole = num_tokens <= budget
            if not (whole or self.enable_chunked_prefill) or not self.memory.grow(sequence, min(num_tokens, budget)):
                self.memory.free(sequence)
                sequence.num_computed_tokens = 0
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            if not sequence.num_preemptions:  # later it finds its own blocks, which is no merit of the prefix cache
                sequence.num_cached_tokens = sequence.num_computed_tokens
            step.scheduled.append((sequence, min(num_tokens, budget)))
            budget -= min(num_tokens, budget)

    def update(self, step: ScheduledStep) -> list[Sequence]:
        """The pass has run -> the sequences, in the step's order, that have run all their tokens and get a new one."""
        for sequence, num_tokens in step.scheduled:
            sequence.num_computed_tokens += num_tokens
        return [s for s, _ in step.scheduled if s.num_computed_tokens == s.num_tokens]

    def finish(self, sequence: Sequence, reason: str) -> None:
        """It has ended: it leaves, and its memory is free for the next step."""
        self._leave(sequence, Status.FINISHED, reason)

    def abort(self, sequence: Sequence) -> None:
        """Nobody wants it any more. Between two steps only; one that has ended stays as it is."""
        self._leave(sequence, Status.ABORTED, "abort")

    def _leave(self, sequence: Sequence, status: Status, reason: str) -> None:
        before = sequence.status
        if before not in (Status.WAITING, Status.RUNNING):
            return
        sequence.status, sequence.finish_reason = status, reason
        self.counts[status] += 1
        if before is Status.RUNNING:
            self.running.remove(sequence)
            self.memory.free(sequence)
        else:
            self.waiting.remove(sequence)


class SlotCache:
    """Keys and values of many sequences, each in a contiguous slot.

    k, v: [layers, num_slots, slot_tokens, kv_heads, head_dim]. What a slot holds beyond its sequence's tokens is never
    read.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        slot_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        shape = (config.num_layers, num_slots, slot_tokens, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    def prepare(self, scheduled: Iterable[tuple[Sequence, int]]) -> None:
        """Say whose tokens the next pass runs, in the order of its rows."""
        self.parts: list[tuple[slice, slice, int, int]] = []  # (rows of the pass, places in the slot, slot, length)
        row = 0
        for sequence, num_tokens in scheduled:
            start = sequence.num_computed_tokens
            [slot] = sequence.block_table
            places = slice(start, start + num_tokens)
            self.parts.append((slice(row, row + num_tokens), places, slot, start + num_tokens))
            row += num_tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, head_dim]; k, v [N, kv_heads, head_dim] -> [N, heads, head_dim]. Each sequence on its own: its
        keys lie in one piece, so nothing is copied."""
        out = torch.empty_like(q)
        for rows, places, slot, length in self.parts:
            self.k[layer, slot, places] = k[rows]
            self.v[layer, slot, places] = v[rows]
            out[rows] = attention(q[rows], self.k[layer, slot, :length], self.v[layer, slot, :length])
        return out


@torch.inference_mode()
def forward(model: Llama, cache, scheduled: list[tuple[Sequence, int]]) -> Tensor:
    """One pass over all scheduled tokens, flat -> logits [M, vocab], a row for each of the M sequences whose last
    token is among them."""
    tokens, positions, last = [], [], []
    for sequence, num_tokens in scheduled:
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        tokens += sequence.token_ids[start:end]
        positions += range(start, end)
        if end == sequence.num_tokens:
            last.append(len(tokens) - 1)
    cache.prepare(scheduled)
    device = model.device
    hidden = model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), cache)
    return model.logits(hidden[torch.tensor(last, dtype=torch.int64, device=device)])


def run_step(
    scheduler: Scheduler,
    forward: Callable[[list[tuple[Sequence, int]]], Tensor],
    choose: Callable[[Tensor, list[Sequence]], list[int]],
) -> tuple[ScheduledStep, list[tuple[Sequence, int]]]:
    """One iteration: decide who runs, run it, append what was chosen -> (step, [(sequence, new token), ...]).

    forward: (scheduled) -> logits [M, vocab]; choose: (logits, the M sequences that they belong to) -> M token ids.
    """
    step = scheduler.schedule()
    logits = forward(step.scheduled)
    ready = scheduler.update(step)
    new = list(zip(ready, choose(logits, ready), strict=True)) if ready else []
    for sequence, token in new:
        sequence.token_ids.append(token)
    return step, new


def trace_step(step: ScheduledStep, scheduler: Scheduler, seconds: float) -> StepTrace:
    """Record of a step, taken after it and before the next."""
    rows = []
    for sequence, num_tokens in step.scheduled:
        start = sequence.num_computed_tokens - num_tokens
        rows.append(RowTrace(sequence.request_id, start, num_tokens, decode=start >= sequence.num_prompt_tokens))
    usage = scheduler.memory.usage(scheduler.running)
    preempted = [s.request_id for s in step.preempted]
    return StepTrace(rows, waiting=len(scheduler.waiting), preempted=preempted, seconds=seconds, **usage)


def generate_with(
    scheduler: Scheduler,
    cache,
    model: Llama,
    prompts: list[str | list[int]],
    params: SamplingParams | list[SamplingParams],
    on_text: Callable[[int, str], None] | None = None,
    trace: list[StepTrace] | None = None,
) -> list[Completion]:
    """Complete the prompts, all together, with a scheduler over any memory and the cache that goes with it."""
    partials = prepare(model, prompts, params, min(model.config.max_position_embeddings, scheduler.memory.max_tokens))
    sequences = [Sequence(i, list(p.prompt_ids), p.max_tokens) for i, p in enumerate(partials)]
    for sequence, partial in zip(sequences, partials, strict=True):
        if not partial.finish_reason:
            scheduler.add(sequence)
    while scheduler.has_unfinished:
        began = time.perf_counter()
        step, new = run_step(
            scheduler,
            lambda scheduled: forward(model, cache, scheduled),
            lambda logits, ready: choose_tokens(model, logits, [partials[s.request_id] for s in ready]),
        )
        if trace is not None:
            trace.append(trace_step(step, scheduler, time.perf_counter() - began))
        for sequence, token in new:
            partial = partials[sequence.request_id]
            text = partial.push(token)
            if partial.finish_reason:
                scheduler.finish(sequence, partial.finish_reason)
            if on_text and text:
                on_text(sequence.request_id, text)
    return [
        p.completion(
            kv_bytes(model.config, s.num_computed_tokens, model.dtype),
            cached_tokens=s.num_cached_tokens,
            preemptions=s.num_preemptions,
        )
        for s, p in zip(sequences, partials, strict=True)
    ]


def generate(
    model: Llama,
    prompts: list[str | list[int]],
    params: SamplingParams | list[SamplingParams] = SamplingParams(),
    on_text: Callable[[int, str], None] | None = None,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    slot_tokens: int | None = None,
    trace: list[StepTrace] | None = None,
) -> list[Completion]:
    """Complete the prompts, `max_num_seqs` at a time in contiguous slots of `slot_tokens` tokens (by default the
    longest that a prompt and its max_tokens can become).

    `on_text(index of the prompt, text)` gets the text as it comes; `trace` gets a record of each step. ValueError for
    a bad prompt, before anything has run.
    """
    if slot_tokens is None:
        slot_tokens = max((len(p.prompt_ids) + p.max_tokens for p in prepare(model, prompts, params)), default=1)
    scheduler = Scheduler(SlotManager(max_num_seqs, slot_tokens), max_num_seqs, max_num_batched_tokens)
    cache = SlotCache(model.config, max_num_seqs, slot_tokens, model.dtype, model.device)
    return generate_with(scheduler, cache, model, prompts, params, on_text, trace)

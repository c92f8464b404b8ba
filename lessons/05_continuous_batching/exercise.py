"""Exercise 05: rows that join and leave at every step. See README.md; grade with `minillm grade 05`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from minillm.continuous_batching import MemoryManager, ScheduledStep, Sequence, Status
from minillm.model.llama import Llama


class SlotManager:
    """Contiguous memory: a slot of `slot_tokens` tokens for each sequence, whatever it needs of it.

    Answers what `MemoryManager` asks. `free_slots` are those that nobody has; a sequence's block table is its one slot.
    """

    def __init__(self, num_slots: int, slot_tokens: int):
        raise NotImplementedError("Task 5.1: a slot for each sequence, whatever it needs of it")

    def can_allocate(self, sequence: Sequence) -> bool:
        raise NotImplementedError("Task 5.1: a slot for each sequence, whatever it needs of it")

    def allocate(self, sequence: Sequence) -> None:
        raise NotImplementedError("Task 5.1: a slot for each sequence, whatever it needs of it")

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        raise NotImplementedError("Task 5.1: a slot for each sequence, whatever it needs of it")

    def free(self, sequence: Sequence) -> None:
        raise NotImplementedError("Task 5.1: a slot for each sequence, whatever it needs of it")

    def usage(self, running: Iterable[Sequence]) -> dict:
        """For `StepTrace`."""
        raise NotImplementedError("Task 5.1: a slot for each sequence, whatever it needs of it")


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
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")

    @property
    def has_unfinished(self) -> bool:
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")

    def add(self, sequence: Sequence) -> None:
        """Queue it. ValueError for one that could never run to its end."""
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")

    def schedule(self) -> ScheduledStep:
        """Who runs in the next pass, and how many tokens of it. RuntimeError where nobody can though somebody wants."""
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")

    def update(self, step: ScheduledStep) -> list[Sequence]:
        """The pass has run -> the sequences, in the step's order, that have run all their tokens and get a new one."""
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """It has ended: it leaves, and its memory is free for the next step."""
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")

    def abort(self, sequence: Sequence) -> None:
        """Nobody wants it any more. Between two steps only; one that has ended stays as it is."""
        raise NotImplementedError("Task 5.2: first come, first served; 5.3: the newest gives way")


def forward(model: Llama, cache, scheduled: list[tuple[Sequence, int]]) -> Tensor:
    """One pass over all scheduled tokens, flat -> logits [M, vocab], a row for each of the M sequences whose last
    token is among them."""
    raise NotImplementedError("Task 5.4: flat tokens, each at its own position; logits for last tokens only")


def run_step(
    scheduler: Scheduler,
    forward: Callable[[list[tuple[Sequence, int]]], Tensor],
    choose: Callable[[Tensor, list[Sequence]], list[int]],
) -> tuple[ScheduledStep, list[tuple[Sequence, int]]]:
    """One iteration: decide who runs, run it, append what was chosen -> (step, [(sequence, new token), ...]).

    forward: (scheduled) -> logits [M, vocab]; choose: (logits, the M sequences that they belong to) -> M token ids.
    """
    raise NotImplementedError("Task 5.4: schedule, run, update, choose, append")

"""Task 5.5: a preempted sequence goes on where it was, without its keys and values"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def _preempt_newest(self) -> Sequence:
        sequence = self.running.pop()
        self.memory.free(sequence)
        sequence.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        return sequence

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self.memory.can_allocate(sequence):
                return  # nobody overtakes
            done = sequence.num_computed_tokens
            self.memory.allocate(sequence)
            sequence.num_computed_tokens = min(done, sequence.num_tokens - 1)
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

"""Task 5.2: max_num_seqs + 1 sequences run"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def _admit(self, step: ScheduledStep, budget: int) -> None:
        while self.waiting and budget and len(self.running) <= self.max_num_seqs:
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

"""Task 5.3: two give way, though one would do"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
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
                step.preempted += [self._preempt_newest() for _ in self.running[-2:]]
        return budget

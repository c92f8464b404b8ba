"""Task 5.3: the oldest is preempted"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def _preempt_newest(self) -> Sequence:
        sequence = self.running.pop(0)
        self.memory.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        return sequence

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
                index = max(0, index - 1)
                step.scheduled = [(s, n) for s, n in step.scheduled if s in self.running]
        return budget

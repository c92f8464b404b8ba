"""Task 5.3: it goes to the end of the queue"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def _preempt_newest(self) -> Sequence:
        sequence = self.running.pop()
        self.memory.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.append(sequence)
        return sequence

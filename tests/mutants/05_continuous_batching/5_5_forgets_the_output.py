"""Task 5.5: a preempted sequence begins its answer anew"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def _preempt_newest(self) -> Sequence:
        sequence = self.running.pop()
        self.memory.free(sequence)
        sequence.num_computed_tokens = 0
        del sequence.token_ids[sequence.num_prompt_tokens :]
        sequence.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        return sequence

"""Task 5.3: somebody is admitted into the memory that was just made free"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def schedule(self) -> ScheduledStep:
        step = ScheduledStep()
        budget = self._schedule_running(step, self.max_num_batched_tokens)
        if True:  # who was just preempted must not come back in the memory that it made room with
            self._admit(step, budget)
        if not step.scheduled and self.has_unfinished:
            raise RuntimeError(f"no progress: {len(self.running)} running, {len(self.waiting)} waiting, none can run")
        return step

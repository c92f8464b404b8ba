"""Task 5.2: prompts are admitted before those that run"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def schedule(self) -> ScheduledStep:
        step = ScheduledStep()
        before = len(self.running)
        self._admit(step, self.max_num_batched_tokens)
        new = self.running[before:]
        self.running = self.running[:before]
        budget = self.max_num_batched_tokens - sum(n for _, n in step.scheduled)
        self._schedule_running(step, budget)
        self.running += new
        return step
        if not step.preempted:  # who was just preempted must not come back in the memory that it made room with
            self._admit(step, budget)
        if not step.scheduled and self.has_unfinished:
            raise RuntimeError(f"no progress: {len(self.running)} running, {len(self.waiting)} waiting, none can run")
        return step

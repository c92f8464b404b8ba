"""Task 5.2: what leaves keeps its memory"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def _leave(self, sequence: Sequence, status: Status, reason: str) -> None:
        before = sequence.status
        if before not in (Status.WAITING, Status.RUNNING):
            return
        sequence.status, sequence.finish_reason = status, reason
        self.counts[status] += 1
        if before is Status.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

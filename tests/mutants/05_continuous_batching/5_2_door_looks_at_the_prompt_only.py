"""Task 5.2: a request is let in whose output can never fit"""

from __future__ import annotations

import minillm.continuous_batching as module
from minillm.continuous_batching import *


class Scheduler(module.Scheduler):
    def add(self, sequence: Sequence) -> None:
        most = sequence.num_prompt_tokens
        limits = {"the memory holds": self.memory.max_tokens}
        if not self.enable_chunked_prefill:  # whole, and once more whole with its output if it is preempted
            limits["a pass without chunked prefill takes"] = self.max_num_batched_tokens
        for what, limit in limits.items():
            if most > limit:
                raise ValueError(
                    f"request {sequence.request_id!r}: {sequence.num_prompt_tokens} prompt tokens and up to "
                    f"{sequence.max_tokens} more, {what} at most {limit}"
                )
        self.waiting.append(sequence)

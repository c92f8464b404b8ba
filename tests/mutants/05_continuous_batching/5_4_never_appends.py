"""Task 5.4: the new token is returned, but not appended"""

from __future__ import annotations

from minillm.continuous_batching import *


def run_step(
    scheduler: Scheduler,
    forward: Callable[[list[tuple[Sequence, int]]], Tensor],
    choose: Callable[[Tensor, list[Sequence]], list[int]],
) -> tuple[ScheduledStep, list[tuple[Sequence, int]]]:
    step = scheduler.schedule()
    logits = forward(step.scheduled)
    ready = scheduler.update(step)
    new = list(zip(ready, choose(logits, ready), strict=True)) if ready else []
    for sequence, token in new:
        pass
    return step, new

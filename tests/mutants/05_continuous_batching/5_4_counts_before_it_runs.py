"""Task 5.4: the tokens are counted as computed before the pass"""

from __future__ import annotations

from minillm.continuous_batching import *


def run_step(
    scheduler: Scheduler,
    forward: Callable[[list[tuple[Sequence, int]]], Tensor],
    choose: Callable[[Tensor, list[Sequence]], list[int]],
) -> tuple[ScheduledStep, list[tuple[Sequence, int]]]:
    step = scheduler.schedule()
    ready = scheduler.update(step)
    logits = forward(step.scheduled)
    new = list(zip(ready, choose(logits, ready), strict=True)) if ready else []
    for sequence, token in new:
        sequence.token_ids.append(token)
    return step, new

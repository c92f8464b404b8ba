"""What the scheduler costs: pure Python per step, over many running and waiting sequences."""

from __future__ import annotations

import gc
import statistics
import time

from _harness import Check, arguments, report

from minillm.continuous_batching import Scheduler, Sequence
from minillm.paged_attention import BlockManager, num_blocks_for

PROMPT, NEW, BLOCK = 64, 200, 16


def steps(num_running: int, num_waiting: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Times of steps that decode `num_running` sequences while `num_waiting` wait: [s] of schedule and update alone,
    and of steps in which one in fifty also ends and is replaced."""
    blocks = num_running * (num_blocks_for(PROMPT + NEW, BLOCK) + 1)
    scheduler = Scheduler(BlockManager(blocks, BLOCK), num_running, num_running * PROMPT)
    for i in range(num_running + num_waiting):
        scheduler.add(Sequence(i, [(i * 31 + j) % 50_000 for j in range(PROMPT)], NEW))
    quiet, busy = [], []
    for step_number in range(num_steps + 2):
        leaving = scheduler.running[::50] if step_number % 2 else []
        start = time.perf_counter()
        for sequence in leaving:
            scheduler.finish(sequence, "length")
        step = scheduler.schedule()
        ready = scheduler.update(step)
        elapsed = time.perf_counter() - start
        for sequence in ready:
            sequence.token_ids.append(1)
        if step_number >= 2:  # the first admits everybody
            (busy if leaving else quiet).append(elapsed)
    return quiet, busy


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    gc.disable()
    rows = []
    for running, waiting in (
        (125, 10_000),
        (250, 10_000),
        (500, 10_000),
        (1000, 1_000),
        (1000, 10_000),
        (1000, 100_000),
    ):
        quiet, busy = steps(running, waiting, 60)
        row = {"running": running, "waiting": waiting, "ms_median": 1e3 * statistics.median(quiet)}
        row |= {"ms_most": 1e3 * max(quiet), "ms_with_joins_and_leaves": 1e3 * statistics.median(busy)}
        rows.append(row)
    cost = {(row["running"], row["waiting"]): row for row in rows}
    full = cost[1000, 10_000]
    by_running = full["ms_median"] / (8 * cost[125, 10_000]["ms_median"])
    by_waiting = cost[1000, 100_000]["ms_median"] / cost[1000, 1_000]["ms_median"]
    checks = [
        Check("ms a step, 1,000 running and 10,000 waiting", full["ms_median"], 5, at_least=False),
        Check("the same while sequences leave and join", full["ms_with_joins_and_leaves"], 5, at_least=False),
        Check("linear: 1,000 running over 8 times 125", by_running, 1.5, at_least=False),
        Check("100,000 waiting over 1,000 waiting", by_waiting, 1.5, at_least=False),
    ]
    report(args, rows, checks)


if __name__ == "__main__":
    main()

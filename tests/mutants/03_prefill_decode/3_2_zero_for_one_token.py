"""Task 3.2: one token gives a TPOT of 0"""

from __future__ import annotations


def latency(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float | None, float | None]:
    if not token_times_s:
        return None, None
    ttft = token_times_s[0] - arrival_s
    gaps = len(token_times_s) - 1
    return ttft, (token_times_s[-1] - token_times_s[0]) / gaps if gaps else 0.0

"""Task 3.2: TTFT is the timestamp itself"""

from __future__ import annotations


def latency(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float | None, float | None]:
    if not token_times_s:
        return None, None
    ttft = token_times_s[0]
    gaps = len(token_times_s) - 1
    return ttft, (token_times_s[-1] - token_times_s[0]) / gaps if gaps else None

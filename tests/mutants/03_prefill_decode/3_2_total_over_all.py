"""Task 3.2: TPOT is the whole time over all tokens"""

from __future__ import annotations


def latency(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float | None, float | None]:
    if not token_times_s:
        return None, None
    ttft = token_times_s[0] - arrival_s
    gaps = len(token_times_s) - 1
    return ttft, (token_times_s[-1] - arrival_s) / (gaps + 1) if gaps else None

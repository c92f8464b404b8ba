"""Task 1.2: the probabilities come back in sorted order"""

from __future__ import annotations


def top_p_filter(probs: Tensor, p: float) -> Tensor:
    ordered, ids = probs.sort(descending=True, stable=True)
    # A token stays if those before it do not reach p: the token that crosses the line is kept.
    before = ordered.cumsum(0) - ordered
    kept = before < p
    kept[0] = True
    return (ordered * kept) / (ordered * kept).sum()

"""Task 1.2: what is kept does not sum to 1"""

from __future__ import annotations

import torch


def top_p_filter(probs: Tensor, p: float) -> Tensor:
    ordered, ids = probs.sort(descending=True, stable=True)
    # A token stays if those before it do not reach p: the token that crosses the line is kept.
    before = ordered.cumsum(0) - ordered
    kept = before < p
    kept[0] = True
    return torch.zeros_like(probs).index_copy(0, ids, ordered * kept)

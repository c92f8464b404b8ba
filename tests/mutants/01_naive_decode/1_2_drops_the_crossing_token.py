"""Task 1.2: the token that crosses the line is dropped"""

from __future__ import annotations

import torch

from minillm.model.sampling import renormalize


def top_p_filter(probs: Tensor, p: float) -> Tensor:
    ordered, ids = probs.sort(descending=True, stable=True)
    # A token stays if those before it do not reach p: the token that crosses the line is kept.
    before = ordered.cumsum(0) - ordered
    kept = ordered.cumsum(0) <= p
    kept[0] = True
    return renormalize(torch.zeros_like(probs).index_copy(0, ids, ordered * kept))

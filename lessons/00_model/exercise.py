"""Exercise 00: the parts of the transformer. See README.md; grade with `minillm grade 00`."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to a root mean square of 1, then each channel by its weight.

    x [..., D], weight [D] -> [..., D] in x's dtype. The sum of squares is taken in float32 whatever the dtype:
    bfloat16 has 8 bits of mantissa and would lose most of the addends.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)  # divided by sqrt((9 + 16) / 2)
    tensor([0.8485, 1.1314])
    """
    raise NotImplementedError("Task 0.1: normalise in float32, whatever the dtype of x")


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each head by its token's position.

    x [N, heads, head_dim], cos_sin [N, head_dim] float32 (the rows of `rope_table` at the tokens' positions)
    -> like x. Channel i is paired with channel i + head_dim/2 (Hugging Face's order of the weights).

    >>> quarter_turn = torch.tensor([[0.0, 1.0]])  # cos 0, sin 1
    >>> apply_rope(torch.tensor([[[1.0, 0.0]]]), quarter_turn)
    tensor([[[0., 1.]]])
    """
    raise NotImplementedError("Task 0.2: rotate the pairs (i, i + head_dim/2)")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention of the last N tokens of one sequence over all M of its tokens.

    q [N, heads, head_dim]; k, v [M, kv_heads, head_dim], M >= N -> [N, heads, head_dim].
    Query i is token M - N + i, and sees the keys up to its own. With N = M this is the full pass, with N = 1
    one step of decode, between them a chunk of prefill.
    """
    raise NotImplementedError("Task 0.3: group the heads, mask the future, softmax, weigh the values")

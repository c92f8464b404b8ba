"""Exercise 01: decode, sampling and the end of a completion. See README.md; grade with `minillm grade 01`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minillm.model.llama import Llama
from minillm.naive_decode import NoCache


def decode_loop(model: Llama, prompt_ids: list[int], cache: NoCache, choose: Callable[[Tensor], int]) -> Iterator[int]:
    """Yield token after token, without end.

    prompt_ids: the tokens to continue; choose: logits [1, vocab] -> token id.
    """
    raise NotImplementedError("Task 1.1: run the whole sequence, choose from its last row, append, yield")


def softmax_with_temperature(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature): logits [..., vocab] -> probabilities [..., vocab] float64.

    The highest logit is subtracted before the division: 0 / temperature is 0 for a temperature however small,
    where logits / temperature overflows to infinity and the softmax to NaN.

    >>> softmax_with_temperature(torch.tensor([2.0, 1.0]), temperature=1e-38)
    tensor([1., 0.], dtype=torch.float64)
    """
    raise NotImplementedError("Task 1.2: subtract the highest logit before you divide")


def top_p_filter(probs: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches p. probs [vocab] -> [vocab], summing
    to 1. The likeliest token always stays. Source: Holtzman et al. 2020, section 3.1.

    >>> top_p_filter(torch.tensor([0.5, 0.25, 0.125, 0.125]), p=0.6)
    tensor([0.6667, 0.3333, 0.0000, 0.0000])
    """
    raise NotImplementedError("Task 1.2: keep the token that crosses the line")


class StopStrings:
    """Lets text through until the first stop string is complete; holds back what may become one.

    With stop "DEFG" and one letter per push, "ABCDEFX" must come out whole and "ABCDEFGH" as "ABC": so D, E and
    F wait until the next letter decides. Where several stop strings overlap, the one that is complete first ends
    the text, of those the one that starts first: the outcome is the same however the text is cut into pushes.

    >>> stops = StopStrings(["is i"])
    >>> [stops.push(piece) for piece in ("Par", "is is", " nice")], stops.stopped
    (['Par', '', ''], True)
    """

    def __init__(self, stops: Sequence[str]):
        raise NotImplementedError("Task 1.3: hold back what may become a stop string")

    def push(self, text: str) -> str:
        """Text in, text that is certain to be shown out; nothing after a stop."""
        raise NotImplementedError("Task 1.3: hold back what may become a stop string")

    def flush(self) -> str:
        """The output has ended otherwise: what was held back is text after all."""
        raise NotImplementedError("Task 1.3: hold back what may become a stop string")

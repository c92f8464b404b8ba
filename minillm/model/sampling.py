"""From scores to the next token: greedy, temperature, top-k, top-p, min-p, penalties, seeds.

`sample` works on a batch of rows of which each has its own parameters, and no row can see another: a row's
tokens are the same alone, in any batch and at any place in it. That holds for random rows too, since a draw
depends on nothing but the row's seed and the number of tokens it has drawn before (a counter-based generator,
as CUDA's Philox is): a request that is preempted and run again goes on as if nothing had happened.

Order of the steps, as in vLLM: penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

LARGEST = sys.float_info.max  # infinity is above it, and so is a whole number that no float can hold


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of sampling and of its end. A wrong value is a ValueError that names it."""

    max_tokens: int = 16  # of output, the token that ends it included; at least 1
    temperature: float = 0.0  # 0 is greedy: always the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0 and -1 are off
    top_p: float = 1.0  # keep the smallest set that holds this probability (Holtzman et al. 2020); 1 is off
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest; 0 is off
    repetition_penalty: float = 1.0  # for tokens of prompt and output (Keskar et al. 2019); 1 is off
    presence_penalty: float = 0.0  # subtracted once for a token of the output
    frequency_penalty: float = 0.0  # subtracted for each time that it stands in the output
    stop: Sequence[str] = ()  # a string, or several: the text ends before the first of them
    stop_token_ids: Sequence[int] = ()  # these end a completion as the model's own end tokens do
    ignore_eos: bool = False  # go on past the model's end tokens
    seed: int | None = None  # None: another completion each time
    logprobs: int | None = None  # also return this many alternatives a token (0: the chosen token's own)

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop, "a string, or several")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        _check("max_tokens", self.max_tokens, int, lambda v: v >= 1, "a whole number of at least 1")
        _check("temperature", self.temperature, float, lambda v: 0 <= v <= LARGEST, "0 (greedy) or a positive number")
        _check("top_k", self.top_k, int, lambda v: v >= -1, "a whole number, 0 or -1 for off")
        _check("top_p", self.top_p, float, lambda v: 0 < v <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, float, lambda v: 0 <= v <= 1, "from 0 to 1")
        _check("repetition_penalty", self.repetition_penalty, float, lambda v: 0 < v <= LARGEST, "a positive number")
        _check("presence_penalty", self.presence_penalty, float, lambda v: -2 <= v <= 2, "from -2 to 2")
        _check("frequency_penalty", self.frequency_penalty, float, lambda v: -2 <= v <= 2, "from -2 to 2")
        for text in stop:
            _check("stop", text, str, bool, "a string that is not empty, or several")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, int, lambda v: v >= 0, "token ids")
        _check("ignore_eos", self.ignore_eos, bool, lambda v: True, "True or False")
        if self.seed is not None:
            _check("seed", self.seed, int, lambda v: -(2**63) <= v < 2**64, "a 64-bit whole number, or None")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, int, lambda v: 0 <= v <= 20, "from 0 to 20, or None")


def _tuple(name: str, values, allowed: str) -> tuple:
    try:
        return () if values is None else tuple(values)
    except TypeError:
        raise ValueError(f"{name}={values!r}: must be {allowed}") from None


def _check(name: str, value, kind: type, holds, allowed: str) -> None:
    right_type = isinstance(value, (int, float) if kind is float else kind)
    if kind is not bool and isinstance(value, bool):  # True is an int in Python, and no temperature
        right_type = False
    if not right_type or not holds(value):  # a NaN holds for no comparison
        raise ValueError(f"{name}={value!r}: must be {allowed}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a chosen token, and of the likeliest ones, under the model's own distribution (before
    penalties, temperature and filters)."""

    logprob: float
    top: dict[int, float] = field(default_factory=dict)  # token id -> log-probability, likeliest first


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Choose the next token of each row.

    logits [B, vocab] of any float dtype; params, prompt_ids, output_ids: one of each per row (penalties need
    the ids, and the length of the output numbers the random draw). Returns B token ids. FloatingPointError where a
    row's best score is no finite number: there is nothing to choose from.
    """
    prompt_ids = prompt_ids or [()] * len(params)
    output_ids = output_ids or [()] * len(params)
    if len(logits) != len(params):
        raise ValueError(f"params: {len(params)} of them for {len(logits)} rows of logits")
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    logits = apply_penalties(logits, params, prompt_ids, output_ids)
    best, tokens = logits.max(dim=-1)  # greedy; the lowest id where several are highest (argmax is slower in bfloat16)
    if not best.isfinite().all():
        raise FloatingPointError(f"logits: row {int((~best.isfinite()).nonzero()[0])} has no finite maximum")
    tokens = tokens.tolist()
    for row, p in enumerate(params):
        if p.temperature > 0:
            tokens[row] = draw(probabilities(logits[row], p), uniform(p.seed, len(output_ids[row])))
    return tokens


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that a row is drawn from: logits [vocab] -> probabilities [vocab] float64, 0 for filtered
    tokens. Temperature must be above 0."""
    probs = softmax_with_temperature(logits, params.temperature)
    if params.min_p > 0:
        probs = renormalize(probs * (probs >= params.min_p * probs.max()))
    if 0 < params.top_k < len(probs):
        probs = top_k_filter(probs, params.top_k)
    if params.top_p < 1:
        probs = top_p_filter(probs, params.top_p)
    return probs


def softmax_with_temperature(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature): logits [..., vocab] -> probabilities [..., vocab] float64.

    The highest logit is subtracted before the division: 0 / temperature is 0 for a temperature however small,
    where logits / temperature overflows to infinity and the softmax to NaN.

    >>> softmax_with_temperature(torch.tensor([2.0, 1.0]), temperature=1e-38)
    tensor([1., 0.], dtype=torch.float64)
    """
    logits = logits.double()
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def top_k_filter(probs: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens, of equals the lowest ids. probs [vocab] -> [vocab], summing to 1.

    >>> top_k_filter(torch.tensor([0.1, 0.4, 0.4, 0.1]), k=1)
    tensor([0., 1., 0., 0.])
    """
    kept = probs.sort(descending=True, stable=True).indices[:k]
    return renormalize(torch.zeros_like(probs).index_copy(0, kept, probs[kept]))


def top_p_filter(probs: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches p. probs [vocab] -> [vocab], summing
    to 1. The likeliest token always stays. Source: Holtzman et al. 2020, section 3.1.

    >>> top_p_filter(torch.tensor([0.5, 0.25, 0.125, 0.125]), p=0.6)
    tensor([0.6667, 0.3333, 0.0000, 0.0000])
    """
    ordered, ids = probs.sort(descending=True, stable=True)
    # A token stays if those before it do not reach p: the token that crosses the line is kept.
    before = ordered.cumsum(0) - ordered
    kept = before < p
    kept[0] = True
    return renormalize(torch.zeros_like(probs).index_copy(0, ids, ordered * kept))


def renormalize(probs: Tensor) -> Tensor:
    return probs / probs.sum()


def draw(probs: Tensor, u: float) -> int:
    """The token at u of the cumulative distribution. probs [vocab], u in [0, 1). Never a token of probability 0."""
    cumulative = probs.cumsum(0)
    token = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(token, int(probs.nonzero()[-1]))  # u * total may round up to the total


def uniform(seed: int | None, number: int) -> float:
    """The `number`-th uniform draw in [0, 1) of a seeded row; fresh randomness where the seed is None."""
    if seed is None:
        return float(np.random.default_rng().random())
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=number)).random())


def apply_penalties(logits: Tensor, params, prompt_ids, output_ids) -> Tensor:
    """Lower the scores of tokens that were there before, row by row; rows without a penalty are not touched.

    The repetition penalty divides positive and multiplies negative logits of tokens of prompt and output;
    presence and frequency penalties are subtracted, for tokens of the output only.
    """
    penalised = [i for i, p in enumerate(params)
                 if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)]  # fmt: skip
    if not penalised:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for row in penalised:
        p = params[row]
        seen = torch.tensor(sorted({*prompt_ids[row], *output_ids[row]}), dtype=torch.int64, device=logits.device)
        scores = logits[row, seen]
        logits[row, seen] = torch.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
        counts = torch.bincount(
            torch.tensor(output_ids[row], dtype=torch.int64, device=logits.device), minlength=logits.shape[1]
        )
        logits[row] -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    return logits


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """logits [vocab] of one row -> log-probability of `token` and of the `top` likeliest."""
    logprobs = logits.double().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprobs(logprobs[token].item(), dict(zip(ids.tolist(), values.tolist(), strict=True)))

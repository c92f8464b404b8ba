"""Step 4: many requests in one pass, the simple way.

What changes: a decode step reads all weights for one token. Give it a token each of many requests, and the same
read serves them all. The simple way is a rectangle: one row a request, prompts padded on the left to the longest, so
that the last column holds everybody's newest token and a step appends one column.

The price is waste, in three kinds: pads run through the model like tokens, a row that has ended runs on until the
longest one ends, and each row holds memory for the longest from the start (`trace.Waste`). Nobody can join before
the whole batch is through. Steps 5 and 6 remove these one after the other.

Pads must be seen by nobody. So each row has its own positions (its first token is at 0), and the mask leaves the pads
out in prefill and in each decode step after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .completion import Completion, PartialCompletion, choose_tokens, prepare
from .kv_cache import kv_bytes
from .model.config import ModelConfig
from .model.llama import Llama
from .model.sampling import SamplingParams
from .trace import RowTrace, StepTrace

PAD = 0  # any token will do: nobody sees it


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of each row of a batch over its own keys.

    q [B, T, heads, head_dim]; k, v [B, M, kv_heads, head_dim]; mask [B, T, M] bool, True where a query may look
    -> [B, T, heads, head_dim], zero for a query that may look nowhere. Masked keys must be finite: a weight of zero
    times infinity is NaN.
    """
    B, T, heads, head_dim = q.shape
    M, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    # As in `attention`: the query heads of a group are laid side by side as rows, and read their KV head once.
    rows = q.view(B, T, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).reshape(B, kv_heads, group * T, head_dim)
    row_mask = mask[:, None, None].expand(B, 1, group, T, M).reshape(B, 1, group * T, M)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=row_mask)
    out = out.view(B, kv_heads, group, T, head_dim).permute(0, 3, 1, 2, 4).reshape(B, T, heads, head_dim)
    return out.masked_fill(~mask.any(dim=-1)[:, :, None, None], 0.0)


class PaddedCache:
    """Keys and values of a batch in one rectangle, allocated in full at the start.

    k, v: [layers, rows, capacity, kv_heads, head_dim]. `real` [rows, capacity]: which places hold a token; the others
    are pads, whose keys and values are zeroed and masked.
    """

    def __init__(
        self, config: ModelConfig, num_rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        shape = (config.num_layers, num_rows, capacity, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.real = torch.zeros(num_rows, capacity, dtype=torch.bool, device=device)
        self.capacity = capacity
        self.length = 0  # columns in use, those of the pass under way included
        self.start = 0  # first column of the pass under way

    def extend(self, real: Tensor) -> Tensor:
        """Make room for the columns of the next pass, before it runs -> positions [rows, T] of its places.

        real [rows, T] bool: which of them hold a token. A row's first token is at position 0 wherever it stands, and
        pads are not counted. ValueError beyond the capacity.
        """
        num_rows, T = real.shape
        if self.length + T > self.capacity:
            raise ValueError(f"real: {T} columns, the cache holds {self.length} of at most {self.capacity}")
        self.start, self.length = self.length, self.length + T
        self.real[:, self.start : self.length] = real
        held = self.real[:, : self.length]  # [rows, M]
        columns = torch.arange(self.length, device=real.device)
        causal = columns[None, :] <= columns[self.start :, None]  # [T, M]
        self.mask = causal & held[:, None, :] & real[:, :, None]  # [rows, T, M]
        rows, pads = (~held).nonzero(as_tuple=True)
        self.pads = rows * self.capacity + pads  # as indices into [rows * capacity]
        return (held.cumsum(dim=1)[:, self.start :] - 1).clamp(min=0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows * T, heads, head_dim]; k, v [rows * T, kv_heads, head_dim] -> [rows * T, heads, head_dim]"""
        num_rows, T = len(self.real), self.length - self.start
        for kept, new in ((self.k[layer], k), (self.v[layer], v)):
            kept[:, self.start : self.length] = new.view(num_rows, T, *new.shape[1:])
            kept.flatten(0, 1).index_fill_(0, self.pads, 0.0)  # masked, and finite whatever was there
        k, v = self.k[layer, :, : self.length], self.v[layer, :, : self.length]  # [rows, M, kv_heads, head_dim]
        out = batched_attention(q.view(num_rows, T, *q.shape[1:]), k, v, self.mask)
        return out.flatten(0, 1)


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as a rectangle that ends in everybody's last token -> tokens [rows, T], real [rows, T] bool.

    >>> left_pad([[7, 8, 9], [5]])
    (tensor([[7, 8, 9],
            [0, 0, 5]]), tensor([[ True,  True,  True],
            [False, False,  True]]))
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    real = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    return tokens, real


@torch.inference_mode()
def padded_decode_loop(
    model: Llama, prompts: Sequence[Sequence[int]], cache: PaddedCache, choose: Callable[[Tensor], list[int | None]]
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, pass after pass, without end.

    prompts: one a row; cache: an empty one; choose: logits [rows, vocab] -> a token id for each row, None for a row
    that has ended. Such a row runs on, as a pad: the rectangle has a place for it.
    """
    tokens, real = (t.to(model.device) for t in left_pad(prompts))  # [rows, T]
    while True:
        positions = cache.extend(real)
        hidden = model(tokens.flatten(), positions.flatten(), cache)  # [rows * T, hidden_size]
        last = hidden.view(*tokens.shape, -1)[:, -1]  # [rows, hidden_size]: the last column is everybody's newest
        chosen = choose(model.logits(last))
        yield chosen
        real = torch.tensor([[token is not None] for token in chosen], device=model.device)  # [rows, 1]
        tokens = torch.tensor([[PAD if token is None else token] for token in chosen], device=model.device)


class StaticBatch:
    """Requests that start together and end together: `step` runs them a pass further, until all have ended.

    choose: (model, logits, partials) -> a token id for each, as `choose_tokens` does.
    """

    def __init__(self, model: Llama, partials: Sequence[PartialCompletion], choose=choose_tokens):
        self.partials = partials
        self.width = max(len(p.prompt_ids) for p in partials)
        capacity = self.width + max(p.max_tokens for p in partials)
        self.cache = PaddedCache(model.config, len(partials), capacity, model.dtype, model.device)
        # What each row holds from start to end, however short it is.
        self.kv_bytes_per_row = kv_bytes(model.config, capacity, model.dtype)
        self.running: list[int] = []  # rows that had not ended when the last pass began

        def choose_running(logits: Tensor) -> list[int | None]:
            chosen = choose(model, logits[self.running], [partials[row] for row in self.running])
            tokens = dict(zip(self.running, chosen, strict=True))
            return [tokens.get(row) for row in range(len(partials))]

        self._loop = padded_decode_loop(model, [p.prompt_ids for p in partials], self.cache, choose_running)

    @property
    def done(self) -> bool:
        return all(p.finish_reason for p in self.partials)

    def step(self) -> list[tuple[int, int]]:
        """One pass -> (row, new token) of each row that has not ended. The caller pushes them."""
        self.running = [row for row, p in enumerate(self.partials) if not p.finish_reason]
        tokens = next(self._loop)
        return [(row, tokens[row]) for row in self.running]

    def trace(self, request_ids: Sequence[int], seconds: float = 0.0) -> StepTrace:
        """Record of the pass before; call it after `step`."""
        rows, used = [], 0
        for row, (request_id, partial) in enumerate(zip(request_ids, self.partials, strict=True)):
            prompt, needed = len(partial.prompt_ids), row in self.running
            if self.cache.start == 0:
                rows.append(RowTrace(request_id, 0, prompt, decode=False, padding=self.width - prompt))
            else:
                position = prompt + self.cache.start - self.width
                rows.append(RowTrace(request_id, position, int(needed), decode=True, padding=int(not needed)))
            used += needed * (rows[-1].start + rows[-1].num_tokens)
        return StepTrace(rows, self.cache.capacity * len(rows), used, seconds=seconds)


def generate(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    on_text: Callable[[int, str], None] | None = None,
    max_num_seqs: int = 32,
    trace: list[StepTrace] | None = None,
) -> list[Completion]:
    """Complete the prompts in batches of `max_num_seqs`, one batch after the other.

    `on_text(index of the prompt, text)` gets the text as it comes; `trace` gets a record of each step (for the
    waste: `trace.Waste.of`). ValueError for a bad prompt, before anything has run.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs={max_num_seqs}: must be at least 1")
    partials = prepare(model, prompts, params)
    todo = [i for i, partial in enumerate(partials) if not partial.finish_reason]
    kv = dict.fromkeys(range(len(partials)), 0)
    for start in range(0, len(todo), max_num_seqs):
        rows = todo[start : start + max_num_seqs]
        batch = StaticBatch(model, [partials[i] for i in rows])
        while not batch.done:
            began = time.perf_counter()
            new = batch.step()
            if trace is not None:
                trace.append(batch.trace(rows, time.perf_counter() - began))
            for row, token in new:
                text = batch.partials[row].push(token)
                if on_text and text:
                    on_text(rows[row], text)
        kv |= dict.fromkeys(rows, batch.kv_bytes_per_row)
    return [partial.completion(kv[i]) for i, partial in enumerate(partials)]

"""The ladder: the same requests through every step that exists, side by side.

Two tables, since the steps answer two questions. Steps 1 to 3 run one request as fast as they can: a few questions, one
after the other. Steps 4 to 6 run many: a ragged workload, all of it there at the start, in the same memory for keys and
values. Each table says that its tokens are those of its first row.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from . import continuous_batching, kv_cache, naive_decode, paged_attention, prefill_decode, static_batching
from .completion import Completion
from .model.llama import Llama
from .model.sampling import SamplingParams
from .paged_attention import DEFAULT_BLOCK_SIZE
from .trace import StepTrace, Waste

# In the order of the lessons; a step is its module.
ONE_REQUEST = {"naive_decode": naive_decode, "kv_cache": kv_cache, "prefill_decode": prefill_decode}
MANY_REQUESTS = {
    "static_batching": static_batching,
    "continuous_batching": continuous_batching,
    "paged_attention": paged_attention,
}
STEPS = ONE_REQUEST | MANY_REQUESTS
ROWS_IN_MEMORY = 8  # memory for keys and values, in requests of the longest kind

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse keeper who is afraid of the dark.",
)


@dataclass(frozen=True)
class Row:
    """One step of the ladder; times are medians over the requests."""

    step: str
    workload: str  # "questions", one after the other, or "ragged", all at once
    ttft_s: float
    tpot_s: float | None  # None where no request got a second token
    tokens_per_s: float  # questions: of one request; ragged: all output tokens over the whole time
    kv_bytes: int  # questions: of the longest sequence; ragged: the most that was given to requests at a time
    same_tokens: bool  # as the first row of this workload, for each request
    padding: float | None = None  # ragged: part of the places of all passes that held no token or one too many
    kv_waste: float | None = None  # ragged: part of the memory given to requests that held no token


def ragged_workload(
    tokenizer, num_requests: int, prompt_median: int, output_median: int, seed: int = 0
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of real text (what the steps' files say of themselves) and how many tokens each asks for. Both lengths
    are lognormal with a sigma of 0.6, as request lengths of real services are: many short ones, a few long."""
    text = tokenizer.encode("\n".join(module.__doc__ for module in STEPS.values()), add_special_tokens=False)
    rng = np.random.default_rng(seed)

    def lengths(median: int) -> list[int]:
        drawn = rng.lognormal(math.log(median), 0.6, num_requests)
        return [int(n) for n in np.clip(drawn, 1, 4 * median)]

    starts = rng.integers(0, len(text), num_requests)
    prompts = [[text[(start + i) % len(text)] for i in range(n)]
               for start, n in zip(starts, lengths(prompt_median), strict=True)]  # fmt: skip
    return prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths(output_median)]


def run(
    model: Llama,
    steps: Sequence[str] = tuple(STEPS),
    max_tokens: int = 64,
    num_requests: int = 16,
    on_token: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """Run the named steps. `on_token(step)` is called for each piece of text: for a progress bar. Of the ragged
    workload, a request gets up to `max_tokens` tokens and a quarter of that is usual."""
    questions = [model.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    # One short pass first: the first use of a kernel costs what no later one does.
    prefill_decode.generate(model, questions[:1], SamplingParams(max_tokens=2))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    rows, reference = [], None
    for step in (s for s in steps if s in ONE_REQUEST):
        completions = STEPS[step].generate(model, questions, params, on_text=lambda _, s=step: on_token(s))
        tokens = [c.token_ids for c in completions]
        reference = reference or tokens
        rate = statistics.median(c.metrics.tokens_per_s for c in completions)
        longest = max(c.metrics.kv_bytes for c in completions)
        ttfts = [c.metrics.ttft_s for c in completions]
        rows.append(_row(step, "questions", completions, ttfts, rate, longest, tokens == reference))
    many = [s for s in steps if s in MANY_REQUESTS]
    return rows + (_ragged(model, many, max_tokens, num_requests, on_token) if many else [])


def _ragged(model: Llama, steps: list[str], max_tokens: int, num_requests: int, on_token) -> list[Row]:
    prompts, params = ragged_workload(model.tokenizer, num_requests, 32, max(1, max_tokens // 4))
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True))
    in_memory = {
        "static_batching": {"max_num_seqs": ROWS_IN_MEMORY},
        "continuous_batching": {"max_num_seqs": ROWS_IN_MEMORY, "slot_tokens": longest},
        "paged_attention": {"num_blocks": ROWS_IN_MEMORY * -(-longest // DEFAULT_BLOCK_SIZE), "prefix_caching": False},
    }
    rows, reference = [], None
    for step in ["prefill_decode", *steps]:
        trace: list[StepTrace] = []
        start = time.perf_counter()

        def generate(prompts, params, step=step, **options):
            return STEPS[step].generate(model, prompts, params, on_text=lambda *_: on_token(step), **options)

        if step in ONE_REQUEST:  # one after the other: to a request, the wait for those before it is part of its TTFT
            completions, ttfts = [], []
            for prompt, p in zip(prompts, params, strict=True):
                waited = time.perf_counter() - start
                completions += generate([prompt], p)
                ttfts.append(waited + completions[-1].metrics.ttft_s)
        else:
            completions = generate(prompts, params, trace=trace, **in_memory[step])
            ttfts = [c.metrics.ttft_s for c in completions]
        seconds = time.perf_counter() - start
        tokens = [c.token_ids for c in completions]
        reference = reference or tokens
        rate = sum(map(len, tokens)) / seconds
        kv_bytes = max(c.metrics.kv_bytes for c in completions)
        extra = {}
        if trace:
            waste = Waste.of(trace)
            empty = waste.padded_prompt_tokens + waste.finished_decode_slots
            extra = {"padding": empty / (empty + sum(s.num_tokens for s in trace)), "kv_waste": waste.kv_waste}
            kv_bytes = kv_cache.kv_bytes(model.config, max(s.kv_allocated for s in trace), model.dtype)
        rows.append(_row(step, "ragged", completions, ttfts, rate, kv_bytes, tokens == reference, **extra))
    return rows


def _row(step, workload, completions: list[Completion], ttfts, rate, kv_bytes, same_tokens, **extra) -> Row:
    tpots = [c.metrics.tpot_s for c in completions if c.metrics.tpot_s is not None]
    tpot = statistics.median(tpots) if tpots else None
    return Row(step, workload, statistics.median(ttfts), tpot, rate, kv_bytes, same_tokens, **extra)


def table(rows: Sequence[Row]) -> str:
    """The rows as text: a table for each workload, each row with its speed-up over the row before."""
    titles = {
        "questions": "A request at a time",
        "ragged": "Many requests of ragged lengths, all there at the start",
    }
    parts = []
    for workload, title in titles.items():
        if chosen := [row for row in rows if row.workload == workload]:
            parts += [title, _table(chosen), ""]
    return "\n".join(parts[:-1])


def _table(rows: Sequence[Row]) -> str:
    wasteful = any(row.padding is not None for row in rows)
    head = (
        "step",
        "TTFT",
        "TPOT",
        "tokens/s",
        "speed-up",
        "KV cache",
        *(("padding", "KV waste") * wasteful),
        "same tokens",
    )
    lines = [head]
    for before, row in zip([None, *rows], rows, strict=False):
        speed_up = f"{row.tokens_per_s / before.tokens_per_s:.1f}x" if before else ""
        tpot = f"{row.tpot_s * 1e3:.0f} ms" if row.tpot_s is not None else "-"
        waste = [f"{x:.0%}" if x is not None else "-" for x in (row.padding, row.kv_waste)] * wasteful
        lines.append((row.step, f"{row.ttft_s * 1e3:.0f} ms", tpot, f"{row.tokens_per_s:.1f}", speed_up,
                      f"{row.kv_bytes / 1e6:.1f} MB", *waste, "yes" if row.same_tokens else "NO"))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines]  # fmt: skip
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def num_tokens(steps: Sequence[str], model: Llama, max_tokens: int, num_requests: int = 16) -> int:
    """Output tokens of a run: how long its progress bar is."""
    one, many = (sum(step in group for step in steps) for group in (ONE_REQUEST, MANY_REQUESTS))
    _, params = ragged_workload(model.tokenizer, num_requests, 32, max(1, max_tokens // 4))
    return one * len(QUESTIONS) * max_tokens + (many + bool(many)) * sum(p.max_tokens for p in params)


def as_json(rows: Sequence[Row], model: Llama) -> dict:
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "rows": [asdict(r) for r in rows],
    }

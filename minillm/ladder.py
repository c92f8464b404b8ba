"""The ladder: the same prompts through every step that exists, side by side.

The one table that says what each step brought, and that its tokens are those of the naive loop.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from . import kv_cache, naive_decode, prefill_decode
from .completion import Completion
from .model.llama import Llama
from .model.sampling import SamplingParams

# In the order of the lessons; a step is its module.
STEPS = {"naive_decode": naive_decode, "kv_cache": kv_cache, "prefill_decode": prefill_decode}

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse keeper who is afraid of the dark.",
)


@dataclass(frozen=True)
class Row:
    """One step of the ladder; times are medians over the prompts."""

    step: str
    ttft_s: float
    tpot_s: float | None  # None where no prompt got a second token
    tokens_per_s: float
    kv_bytes: int  # of the longest sequence
    same_tokens: bool  # as the first step of the ladder, for each prompt


def run(
    model: Llama,
    steps: Sequence[str] = tuple(STEPS),
    max_tokens: int = 32,
    on_token: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """Run the questions through the named steps. `on_token(step)` is called for each piece of text: for a
    progress bar."""
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    # One short pass first: the first use of a kernel costs what no later one does.
    prefill_decode.generate(model, prompts[:1], SamplingParams(max_tokens=2))
    rows, reference = [], None
    for step in steps:
        completions = STEPS[step].generate(model, prompts, params, on_text=lambda _, s=step: on_token(s))
        tokens = [c.token_ids for c in completions]
        reference = reference or tokens
        rows.append(_row(step, completions, tokens == reference))
    return rows


def _row(step: str, completions: list[Completion], same_tokens: bool) -> Row:
    metrics = [c.metrics for c in completions]
    tpots = [m.tpot_s for m in metrics if m.tpot_s is not None]
    return Row(
        step=step,
        ttft_s=statistics.median(m.ttft_s for m in metrics),
        tpot_s=statistics.median(tpots) if tpots else None,
        tokens_per_s=statistics.median(m.tokens_per_s for m in metrics),
        kv_bytes=max(m.kv_bytes for m in metrics),
        same_tokens=same_tokens,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a text table, each with its speed-up over the row before."""
    head = ("step", "TTFT", "TPOT", "tokens/s", "KV cache", "speed-up", "same tokens")
    lines = [head]
    for before, row in zip([None, *rows], rows, strict=False):
        speed_up = f"{row.tokens_per_s / before.tokens_per_s:.1f}x" if before else ""
        tpot = f"{row.tpot_s * 1e3:.0f} ms" if row.tpot_s is not None else "-"
        lines.append((row.step, f"{row.ttft_s * 1e3:.0f} ms", tpot, f"{row.tokens_per_s:.1f}",
                      f"{row.kv_bytes / 1e6:.1f} MB", speed_up, "yes" if row.same_tokens else "NO"))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines]  # fmt: skip
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def as_json(rows: Sequence[Row], model: Llama) -> dict:
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "rows": [asdict(r) for r in rows],
    }

"""Static, continuous and paged batching beside transformers' generate: throughput, KV waste, prefix caching, step cost.

One process, alternating rounds, ratios within a round. The requests are real text: prompts cut from this project's
lessons, prompt and output lengths from a seeded lognormal, the same for every side.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _harness import Check, arguments, report
from cpu_decode import in_transformers
from tqdm import tqdm

from minillm import LLM, SamplingParams, load_model
from minillm.ladder import ragged_workload
from minillm.trace import Waste

ROOT = Path(__file__).resolve().parent.parent
SIDES = {
    "static": {"batching": "static"},
    "contiguous": {"kv": "contiguous"},
    "paged": {},
}


def settings(side: dict, longest: int) -> dict:
    """32 requests at a time, memory for 16 of the longest: contiguous has 16 slots, the others the same bytes."""
    return {
        "max_num_seqs": 32,
        "max_model_len": longest,
        "num_blocks": 16 * -(-longest // 16),
        "prefix_caching": False,
        **side,
    }


def minillm_run(model, side: dict, prompts, params, longest: int) -> dict:
    llm = LLM(model, trace=True, **settings(side, longest))
    start = time.perf_counter()
    completions = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(c.token_ids) for c in completions)
    ttfts = [c.metrics.ttft_s for c in completions]
    waste = Waste.of(llm.trace)
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "steps": len(llm.trace),
            "ttft_median_s": statistics.median(ttfts), "kv_waste": waste.kv_waste,
            "padded_prompt_tokens": waste.padded_prompt_tokens, "finished_decode_slots": waste.finished_decode_slots,
            "preemptions": llm.metrics()["preemptions"]}  # fmt: skip


@torch.inference_mode()
def transformers_run(peer, prompts, params, batch_size: int = 16) -> dict:
    """Batches of 16, left-padded, each until its longest request has all its tokens; only tokens that were asked for
    count."""
    start, steps = time.perf_counter(), 0
    for first in range(0, len(prompts), batch_size):
        rows = prompts[first : first + batch_size]
        width, new = max(map(len, rows)), max(p.max_tokens for p in params[first : first + batch_size])
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        peer.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                      eos_token_id=None, pad_token_id=0)  # fmt: skip
        steps += new
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_s": sum(p.max_tokens for p in params) / seconds, "steps": steps}


def prefix_caching(model, system_tokens: int = 512, requests: int = 16) -> dict:
    """Requests that share a system prompt, each sent when the one before it has ended."""
    text = (ROOT / "lessons/01_naive_decode/README.md").read_text()
    system = model.tokenizer.encode(text)[:system_tokens]
    questions = [f"\nQuestion {i}: what does line {i} of this text say, in short?" for i in range(requests)]
    params, ttfts = SamplingParams(max_tokens=4, ignore_eos=True), {}
    for caching in (True, False):
        llm = LLM(model, max_model_len=1024, num_blocks=1024, max_num_batched_tokens=1024, prefix_caching=caching)
        llm.generate([[5] * 600], SamplingParams(max_tokens=2), use_tqdm=False)  # warms the kernels; other tokens
        prompts = [system + model.tokenizer.encode(question) for question in questions]
        ttfts[caching] = [llm.generate([p], params, use_tqdm=False)[0].metrics.ttft_s for p in prompts]
    first, *later = ttfts[True]
    return {"first_ttft_s": first, "later_ttft_s": statistics.median(later), "largest_later_ttft_s": max(later),
            "without_cache_ttft_s": statistics.median(ttfts[False])}  # fmt: skip


def step_cost(model, sizes=(1, 2, 4, 8, 16, 32, 64), length: int = 128, steps: int = 25) -> list[dict]:
    """Median time of a decode step with so many rows, each of about `length` tokens."""
    rows, params = [], SamplingParams(max_tokens=steps + 5, ignore_eos=True)
    for size in sizes:
        llm = LLM(model, max_num_seqs=64, max_num_batched_tokens=64 * length, num_blocks=1024, prefix_caching=False)
        for i in range(size):
            llm.add_request([(7 * i + j) % 1000 + 100 for j in range(length)], params)
        times = []
        while llm.has_unfinished:
            start = time.perf_counter()
            llm.step()
            times.append(time.perf_counter() - start)
        median = statistics.median(times[3:-2])
        rows.append({"rows": size, "ms_per_step": 1e3 * median, "tokens_per_s": size / median})
    return rows


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--requests", type=int, default=32, help="ragged requests")
    parser.add_argument("--repeats", type=int, default=3, help="alternating rounds")
    args = parser.parse_args()
    model = load_model(dtype=args.dtype, device="cpu")
    peer = in_transformers(model)
    prompts, params = ragged_workload(model.tokenizer, args.requests, prompt_median=180, output_median=80)
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True))

    sides = {name: lambda side=side: minillm_run(model, side, prompts, params, longest) for name, side in SIDES.items()}
    sides["transformers"] = lambda: transformers_run(peer, prompts, params)
    rounds: dict[str, list[dict]] = {name: [] for name in sides}
    for _ in tqdm(range(args.repeats), desc="rounds", file=sys.stderr):
        for name, run in sides.items():
            rounds[name].append(run())
    # Each side's row is that of its median round.
    median = {name: sorted(runs, key=lambda r: r["seconds"])[len(runs) // 2] for name, runs in rounds.items()}
    columns = list(median["paged"])
    rows = [{"side": name, **{c: result.get(c, "") for c in columns}} for name, result in median.items()]

    def ratio(fast: str, slow: str) -> float:
        return statistics.median(s["seconds"] / f["seconds"] for f, s in zip(rounds[fast], rounds[slow], strict=True))

    prefix = prefix_caching(model)
    cost = step_cost(model)
    # Linear: a row more costs about the same between 32 and 64 rows as between 8 and 16.
    ms = {row["rows"]: row["ms_per_step"] for row in cost}
    row_more = ((ms[64] - ms[32]) / 32) / ((ms[16] - ms[8]) / 8)
    later = prefix["largest_later_ttft_s"] / prefix["first_ttft_s"]
    checks = [
        Check("output tokens/s, continuous (contiguous) over static", ratio("contiguous", "static"), 1.5),
        Check("output tokens/s, continuous (paged) over static", ratio("paged", "static"), 1.5),
        Check("output tokens/s, paged over transformers in batches of 16", ratio("paged", "transformers"), 1.5),
        Check("KV waste, paged", median["paged"]["kv_waste"], 0.04, at_least=False),
        Check("shared 512-token prefix: largest later TTFT over the first", later, 0.25, at_least=False),
        Check("cost of a row more, 32 to 64 over 8 to 16", row_more, 1.5, at_least=False),
    ]
    extra = {
        "workload": {"requests": len(prompts), "prompt_tokens": sum(map(len, prompts)), "longest": longest,
                     "output_tokens": sum(p.max_tokens for p in params)},
        "prefix_caching": prefix,
        "step_cost": cost,
    }  # fmt: skip
    report(args, rows, checks, extra)


if __name__ == "__main__":
    main()

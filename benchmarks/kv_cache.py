"""Time per token against the length of the sequence: naive decode grows with it, a KV cache does not.

Beside each measured time stands what the roofline predicts (prefill_decode.pass_cost) from two numbers measured in
the same run: bytes per second of a matrix-vector product and FLOP per second of a matrix product, both in the shapes
of this model.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from _harness import Check, arguments, report
from tqdm import tqdm

from minillm.kv_cache import ContiguousCache
from minillm.model.weights import load_model
from minillm.naive_decode import NoCache
from minillm.prefill_decode import pass_cost, prefill

LENGTHS = (32, 128, 512, 1024)


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; each measures every length both ways once")
    args = parser.parse_args()
    model = load_model(dtype=args.dtype, device="cpu")
    config = model.config
    ids = torch.randint(0, config.vocab_size, (max(LENGTHS),), generator=torch.Generator().manual_seed(0))
    caches = {}
    for length in LENGTHS:
        caches[length] = ContiguousCache(config, length, model.dtype)
        prefill(model, ids[: length - 1].tolist(), caches[length])

    def naive(length: int) -> None:
        hidden = model(ids[:length], torch.arange(length), NoCache())
        model.logits(hidden[-1:])

    def cached(length: int) -> None:
        cache = caches[length]
        cache.length = length - 1  # the same last token again: a step at exactly this length
        model.logits(prefill(model, [int(ids[length - 1])], cache))

    products = [layer.mlp.gate_up_proj for layer in model.layers]  # together larger than the caches
    num_weights = sum(product.weight.numel() for product in products)
    one, many = (torch.randn(n, config.hidden_size, dtype=model.dtype) for n in (1, 512))
    times: dict = {}
    for round_number in tqdm(range(args.repeats + 1), desc="rounds", file=sys.stderr):
        measured = {("naive", n): seconds(lambda n=n: naive(n)) for n in LENGTHS}
        measured |= {("cached", n): seconds(lambda n=n: cached(n)) for n in LENGTHS}
        measured["read"] = seconds(lambda: [product(one) for product in products])
        measured["multiply"] = seconds(lambda: [product(many) for product in products])
        if round_number:  # the first round warms up
            for key, value in measured.items():
                times.setdefault(key, []).append(value)
    median = {key: statistics.median(values) for key, values in times.items()}
    bandwidth = num_weights * model.dtype.itemsize / median["read"]
    flop_rate = 2 * 512 * num_weights / median["multiply"]

    rows = []
    for n in LENGTHS:
        predicted = {
            "naive": pass_cost(config, n, 0, model.dtype).seconds(bandwidth, flop_rate),
            "cached": pass_cost(config, 1, n - 1, model.dtype).seconds(bandwidth, flop_rate),
        }
        rows.append({
            "length": n,
            "naive_ms": median["naive", n] * 1e3,
            "naive_predicted_ms": predicted["naive"] * 1e3,
            "cached_ms": median["cached", n] * 1e3,
            "cached_predicted_ms": predicted["cached"] * 1e3,
            "speed_up": median["naive", n] / median["cached", n],
        })  # fmt: skip
    print(f"{args.dtype}: {bandwidth / 1e9:.1f} GB/s, {flop_rate / 1e9:.0f} GFLOP/s measured", file=sys.stderr)
    checks = [
        Check("naive at 1024 over naive at 32", median["naive", 1024] / median["naive", 32], 4),
        *(Check(f"cached at {n} over cached at 32", median["cached", n] / median["cached", 32], 1.5, at_least=False)
          for n in LENGTHS[1:]),
        Check("naive over cached at 512", median["naive", 512] / median["cached", 512], 4),
    ]  # fmt: skip
    report(args, rows, checks)


if __name__ == "__main__":
    main()

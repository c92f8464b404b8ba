"""From starting Python to a model that is ready to generate, when the dequantised weights are cached."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from _harness import Check, arguments, report
from tqdm import tqdm

DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="starts of each dtype, alternating")
    args = parser.parse_args()
    times: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for round_number in tqdm(range(args.repeats + 1), desc="rounds", file=sys.stderr):
        for dtype in DTYPES:
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", f"from minillm import load_model; load_model(dtype='{dtype}')"], check=True
            )
            if round_number:  # the first start may convert, and reads the disk
                times[dtype].append(time.perf_counter() - start)
    rows = [{"dtype": d, "median_s": statistics.median(t), "worst_s": max(t)} for d, t in times.items()]
    report(args, rows, [Check(f"seconds, {r['dtype']}", r["median_s"], 2, at_least=False) for r in rows])


if __name__ == "__main__":
    main()

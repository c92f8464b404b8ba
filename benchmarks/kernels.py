"""What the kernels reach: on a GPU of its copy bandwidth or matrix product, beside torch's own op in the same run.

Without a GPU the same cases run small in the simulator: it shows that they run and what the simulation costs, nothing
about speed; the GPU's columns stay empty.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _harness import Check, arguments, report
from tqdm import tqdm

from minillm.kernels.build import load_kernels
from minillm.kernels.sandbox import Sandbox

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BF16 = torch.bfloat16
ROUNDS = 25 if GPU else 3
ops = torch.ops.minillm


@dataclass
class Case:
    name: str
    versions: dict[str, Callable]  # what is compared, in turn; "torch" is torch's own op
    num_bytes: float = 0.0  # that must cross the memory bus, at least
    flops: float = 0.0
    asked: tuple[str, float] | None = None  # version, and the fraction of the roof that it must reach


def random(*shape, dtype=BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def streaming_cases(rows: int, size: int):
    x, residual, weight = random(rows, size), random(rows, size), random(size)
    row_bytes = x.nbytes
    yield Case(
        f"rms_norm, {rows} x {size}",
        {f"version {v}": lambda v=v: ops.rms_norm(x, weight, 1e-5, v) for v in (1, 2, 3)}
        | {"torch": lambda: F.rms_norm(x, (size,), weight, 1e-5)},
        num_bytes=2 * row_bytes, asked=("version 3", 0.80),
    )  # fmt: skip
    yield Case(
        f"add_rms_norm, {rows} x {size}",
        {f"version {v}": lambda v=v: ops.add_rms_norm(x, residual, weight, 1e-5, v) for v in (1, 2, 3)}
        | {"torch": lambda: F.rms_norm(x + residual, (size,), weight, 1e-5)},
        num_bytes=4 * row_bytes, asked=("version 3", 0.80),
    )  # fmt: skip
    wide = random(rows, 2 * size)
    yield Case(
        f"silu_and_mul, {rows} x {size}",
        {"kernel": lambda: ops.silu_and_mul(wide), "torch": lambda: F.silu(wide[:, :size]) * wide[:, size:]},
        num_bytes=3 * row_bytes, asked=("kernel", 0.80),
    )  # fmt: skip


def rope_case(tokens: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    qkv = random(tokens, heads + 2 * kv_heads, head_dim)
    k_cache, v_cache = random(2, tokens // 16 + 1, 16, kv_heads, head_dim)
    positions, slots = torch.arange(tokens, device=DEVICE), torch.randperm(tokens, device=DEVICE)
    table = random(tokens, head_dim, dtype=torch.float32)
    return Case(
        f"rope_and_store, {tokens} tokens",
        {"kernel": lambda: ops.rope_and_store(qkv, positions, table, k_cache, v_cache, slots, heads)},
        num_bytes=2 * qkv.nbytes + table.nbytes, asked=("kernel", 0.80),
    )  # fmt: skip


def gemv_case(M: int, K: int) -> Case:
    x, weight = random(1, K), random(M, K)
    return Case(
        f"gemv, {M} x {K}", {"kernel": lambda: ops.gemv(x, weight), "torch": lambda: F.linear(x, weight)},
        num_bytes=weight.nbytes, asked=("kernel", 0.80),
    )  # fmt: skip


def sampling_cases(rows: int, vocab: int):
    logits = random(rows, vocab, dtype=torch.float32)
    yield Case(
        f"argmax, {rows} x {vocab}", {"kernel": lambda: ops.argmax(logits), "torch": lambda: logits.argmax(-1)},
        num_bytes=logits.nbytes,
    )  # fmt: skip
    ones = torch.ones(rows, device=DEVICE)
    top_k, top_p, uniform = torch.full((rows,), 50, device=DEVICE), 0.9 * ones, torch.rand(rows, device=DEVICE).double()

    def by_sorting():
        probs, ids = logits.softmax(-1).sort(-1, descending=True)
        probs[:, 50:] = 0
        probs = probs.masked_fill(probs.cumsum(-1) - probs > 0.9 * probs.sum(-1, keepdim=True), 0)
        return ids.gather(1, probs.multinomial(1))

    yield Case(
        f"sample top-k top-p, {rows} x {vocab}",
        {"kernel": lambda: ops.sample(logits, ones, top_k, top_p, 0 * ones, uniform), "torch": by_sorting},
        num_bytes=logits.nbytes,
    )  # fmt: skip


def decode_case(B: int, length: int, kv_heads: int, heads: int, head_dim: int, asked: tuple[str, float]) -> Case:
    blocks = length // 16
    q = random(B, heads, head_dim)
    k_cache, v_cache = random(2, B * blocks, 16, kv_heads, head_dim)
    tables = torch.randperm(B * blocks, device=DEVICE).view(B, blocks)
    lens = torch.full((B,), length, device=DEVICE)
    k, v = (c[tables].view(B, length, kv_heads, head_dim).transpose(1, 2).contiguous() for c in (k_cache, v_cache))
    return Case(
        f"paged_attention, {B} x {length} tokens, {kv_heads} KV heads x {head_dim}",
        {f"version {v}": lambda v=v: ops.paged_attention(q, k_cache, v_cache, tables, lens, v) for v in (1, 2, 3)}
        | {"torch": lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)},
        num_bytes=k_cache.nbytes + v_cache.nbytes, asked=asked,
    )  # fmt: skip


def contiguous_decode_case(length: int, kv_heads: int, heads: int, head_dim: int) -> Case:
    q = random(heads, head_dim)
    k, v = random(2, length, kv_heads, head_dim)
    kt, vt = (x.transpose(0, 1)[None] for x in (k, v))
    return Case(
        f"decode_attention, {length} tokens, {kv_heads} KV heads x {head_dim}",
        {"kernel": lambda: ops.decode_attention(q, k, v),
         "torch": lambda: F.scaled_dot_product_attention(q[None, :, None], kt, vt, enable_gqa=True)},
        num_bytes=k.nbytes + v.nbytes,
    )  # fmt: skip


def prefill_case(length: int, kv_heads: int, heads: int, head_dim: int) -> Case:
    blocks = -(-length // 16)
    q = random(length, heads, head_dim)
    k_cache, v_cache = random(2, blocks, 16, kv_heads, head_dim)
    tables = torch.randperm(blocks, device=DEVICE)[None]
    lens, starts = torch.tensor([length], device=DEVICE), torch.tensor([0, length], device=DEVICE)
    k, v = (c[tables[0]].flatten(0, 1)[:length].transpose(0, 1)[None].contiguous() for c in (k_cache, v_cache))
    qt = q.transpose(0, 1)[None].contiguous()

    def kernel(version):
        return lambda: ops.paged_prefill_attention(q, k_cache, v_cache, tables, lens, starts, length, version)

    return Case(
        f"paged_prefill_attention, {length} tokens, {heads} heads x {head_dim}",
        {"version 1": kernel(1), "version 2": kernel(2),
         "torch": lambda: F.scaled_dot_product_attention(qt, k, v, is_causal=True, enable_gqa=True)},
        flops=2 * length * length * heads * head_dim,
    )  # fmt: skip


def cases():
    """Those of the roofs; without a GPU as small as the simulator needs."""
    yield from streaming_cases(*((8192, 4096) if GPU else (64, 512)))
    yield rope_case(*((8192, 32, 8, 128) if GPU else (32, 8, 2, 64)))
    yield gemv_case(*((14336, 4096) if GPU else (1024, 512)))
    yield from sampling_cases(*((64, 128256) if GPU else (4, 4096)))
    yield contiguous_decode_case(*((32768, 8, 32, 128) if GPU else (256, 2, 8, 64)))
    yield decode_case(*((64, 4096, 8, 32, 128) if GPU else (4, 256, 2, 8, 64)), asked=("version 3", 0.75))
    yield decode_case(*((1, 32768, 8, 32, 128) if GPU else (1, 1024, 2, 8, 64)), asked=("version 3", 0.60))
    yield prefill_case(*((8192, 8, 32, 128) if GPU else (128, 2, 4, 64)))


class Timer:
    """Seconds of one call. On a GPU by events, with the L2 cache emptied before."""

    def __init__(self):
        self.flush = torch.empty(256 << 20 if GPU else 0, dtype=torch.uint8, device=DEVICE)

    def __call__(self, function: Callable) -> float:
        if not GPU:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def alternate(timer: Timer, versions: dict[str, Callable]) -> dict[str, float]:
    """Median seconds of each, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in versions}
    for round_number in range(ROUNDS + 2):
        for name, function in versions.items():
            seconds = timer(function)
            if round_number >= 2:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def roofs(timer: Timer) -> dict:
    """What this GPU's memory and tensor cores do, measured: bytes/s of a large copy, FLOP/s of an 8192^3 product."""
    source = random(1 << 29)
    target = torch.empty_like(source)
    a, b = random(8192, 8192), random(8192, 8192)
    seconds = alternate(timer, {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b})
    return {"copy_GB_per_s": 2 * source.nbytes / seconds["copy"] / 1e9,
            "matmul_TFLOP_per_s": 2 * 8192**3 / seconds["matmul"] / 1e12}  # fmt: skip


PROBE = r"""
#include <chrono>

#include "cuda_on_cpu.h"
__global__ void barriers(int n) { for (int i = 0; i < n; i++) __syncthreads(); }
__global__ void shuffles(int n, float* out) {
  float x = threadIdx.x;
  for (int i = 0; i < n; i++) x = __shfl_xor_sync(0xffffffffu, x, 1);
  if (x < 0) out[0] = x;
}
__global__ void nothing() {}
template <typename F> float seconds(F f) {
  auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<float>(std::chrono::steady_clock::now() - start).count();
}
extern "C" void costs(float* ns) {  // of a barrier, a shuffle and a thread, each for one thread of a block of 256
  launch(barriers, 1, 256, 0, nullptr, 1);
  ns[0] = seconds([&] { launch(barriers, 1, 256, 0, nullptr, 2000); }) * 1e9f / 2000 / 256;
  ns[1] = seconds([&] { launch(shuffles, 1, 256, 0, nullptr, 2000, ns); }) * 1e9f / 2000 / 256;
  ns[2] = seconds([&] { launch(nothing, 2000, 256, 0, nullptr); }) * 1e9f / 2000 / 256;
}
"""


def simulator_costs(rounds: int = 9) -> dict[str, float]:
    """Nanoseconds that the simulator takes, medians."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text(PROBE)
        sandbox, ns = Sandbox(probe, optimization="-O2"), []
        for _ in range(rounds):
            out = np.zeros(3, np.float32)
            sandbox.call("costs", out)
            ns.append(out)
    barrier, shuffle, thread = np.median(ns, axis=0).tolist()
    return {"ns_a_barrier": barrier, "ns_a_shuffle": shuffle, "ns_a_thread": thread}


def simulator_build_seconds() -> float:
    """Cold: an empty cache, in a process of its own, the import of torch not counted."""
    code = ("import time; from minillm.kernels.build import load_kernels; start = time.perf_counter(); "
            "load_kernels('cpu'); print(time.perf_counter() - start)")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"MINILLM_HOME": folder}, check=True,
                             capture_output=True, text=True)  # fmt: skip
    return float(run.stdout)


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    build_s = simulator_build_seconds()
    checks = [Check("seconds of a cold build for the simulator", build_s, 30, at_least=False)]
    load_kernels(DEVICE)
    timer, rows = Timer(), []
    roof = roofs(timer) if GPU else {"copy_GB_per_s": None, "matmul_TFLOP_per_s": None}
    for case in tqdm(list(cases()), unit="case", file=sys.stderr, disable=None):
        seconds = alternate(timer, case.versions)
        for version, s in seconds.items():
            row = {"kernel": case.name, "version": version, "simulated_ms": None if GPU else 1e3 * s}
            row |= {"ms": None, "GB_per_s": None, "of_copy": None, "TFLOP_per_s": None, "of_matmul": None}
            if GPU:
                row["ms"] = 1e3 * s
                if case.num_bytes:
                    row["GB_per_s"] = case.num_bytes / s / 1e9
                    row["of_copy"] = row["GB_per_s"] / roof["copy_GB_per_s"]
                if case.flops:
                    row["TFLOP_per_s"] = case.flops / s / 1e12
                    row["of_matmul"] = row["TFLOP_per_s"] / roof["matmul_TFLOP_per_s"]
                if case.asked and case.asked[0] == version:
                    checks.append(Check(f"{case.name}: of copy bandwidth", row["of_copy"], case.asked[1]))
            rows.append(row)
        if GPU and case.flops:
            ratio = seconds["torch"] / seconds["version 2"]
            checks.append(Check(f"{case.name}: version 2 over SDPA", ratio, 0.40))
    report(args, rows, checks, {"roofs": roof, "simulator": simulator_costs() | {"cold_build_s": build_s}})


if __name__ == "__main__":
    main()

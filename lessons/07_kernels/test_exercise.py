"""Graded tests of lesson 07. Run: minillm grade 07, or pytest lessons/07_kernels/test_exercise.py [--solution]"""

from pathlib import Path

import numpy as np
import pytest

import minillm.kernels
from minillm.grading import task

REFERENCE = Path(minillm.kernels.__file__).with_name("first_kernels.cu")
SCHEDULES = ["in_order", "reversed", "random"]
SANITIZERS = ["address", "thread"]
NAN = np.float32("nan")


def numbers(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def unwritten(*shape):
    """What must be written: NaN until then."""
    return np.full(shape, NAN, np.float32)


def close(actual, expected, what: str, tolerance=1e-5):
    wrong = ~np.isclose(actual, expected, rtol=tolerance, atol=tolerance)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        pytest.fail(
            f"{what}: {int(wrong.sum())} of {wrong.size} values are wrong; the first, at {place}, is {actual[place]:g} "
            f"and should be {expected[place]:g}",
            pytrace=False,
        )


# --- 7.1 ---


def add(exercise, n, **options):
    a, b, out = numbers(n, seed=1), numbers(n, seed=2), unwritten(n)
    exercise.call("vector_add", a, b, out, n, **options)
    close(out, a.astype(np.float64) + b, f"vector_add of {n} elements")


@task("7.1", "Vector add with a grid-stride loop", points=1)
@pytest.mark.parametrize("n", [1, 63, 64, 192, 193, 1000])
def test_vector_add(exercise, n):
    for schedule in SCHEDULES:
        add(exercise, n, schedule=schedule)


@task("7.1", "Vector add with a grid-stride loop", points=1)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_vector_add_under_a_sanitizer(exercise, sanitizer):
    add(exercise, 300, sanitizer=sanitizer)
    add(exercise, 0, sanitizer=sanitizer)


# --- 7.2 ---


def add_up(exercise, n, threads, **options):
    x, out = numbers(n, seed=n), unwritten(2)
    exercise.call("block_sum", x, out, n, threads, **options)
    close(out, np.array([x.astype(np.float64).sum(), threads]), f"block_sum of {n} elements by {threads} threads", 1e-4)


@task("7.2", "Block reduction", points=2)
@pytest.mark.parametrize("n, threads", [(1, 32), (1000, 32), (64, 64), (33, 96), (1000, 256), (5000, 1024), (77, 992)])
def test_block_sum(exercise, n, threads):
    for schedule in SCHEDULES:
        add_up(exercise, n, threads, schedule=schedule)


@task("7.2", "Block reduction", points=1)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_block_sum_under_a_sanitizer(exercise, sanitizer):
    add_up(exercise, 200, 128, sanitizer=sanitizer)
    add_up(exercise, 10, 96, sanitizer=sanitizer)


# --- 7.3 ---


def normalise(exercise, rows, size, scale=1.0, eps=1e-5, **options):
    x, weight, out = numbers(rows, size, scale=scale), numbers(size, seed=9), unwritten(rows, size)
    exercise.call("rms_norm", x, weight, out, rows, size, eps, **options)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + eps) * weight
    close(out, expected, f"rms_norm of {rows} x {size}")


@task("7.3", "RMSNorm, a block per row", points=2)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 32), (2, 128), (4, 130), (2, 1000), (5, 7)])
def test_rms_norm(exercise, rows, size):
    for schedule in SCHEDULES:
        normalise(exercise, rows, size, schedule=schedule)
    normalise(exercise, rows, size, scale=1e-3)  # eps counts


@task("7.3", "RMSNorm, a block per row", points=1)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_rms_norm_under_a_sanitizer(exercise, sanitizer):
    normalise(exercise, 2, 150, sanitizer=sanitizer)


# --- 7.4 ---


def soften(exercise, x, **options):
    out = unwritten(*x.shape)
    exercise.call("softmax", x, out, *x.shape, **options)
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    close(out, e / e.sum(axis=1, keepdims=True), f"softmax of {x.shape[0]} x {x.shape[1]}")


@task("7.4", "Softmax, a block per row", points=2)
@pytest.mark.parametrize("rows, size", [(1, 1), (2, 31), (3, 128), (2, 129), (2, 1000)])
def test_softmax(exercise, rows, size):
    for schedule in SCHEDULES:
        soften(exercise, numbers(rows, size), schedule=schedule)
    soften(exercise, numbers(rows, size, scale=1000))
    soften(exercise, numbers(rows, size) - 500)  # all far below zero
    masked = numbers(rows, size)
    masked[:, 1:] = -np.inf
    soften(exercise, masked)


@task("7.4", "Softmax, a block per row", points=1)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_softmax_under_a_sanitizer(exercise, sanitizer):
    soften(exercise, numbers(2, 150), sanitizer=sanitizer)


# --- 7.5 ---


def attend(exercise, lengths, heads=4, kv_heads=2, head_dim=16, block_size=4, spare_blocks=2, **options):
    """Blocks in random order, NaN wherever no token lies; the last entries of short tables point to such a block."""
    rng = np.random.default_rng(sum(lengths) + heads)
    blocks = [-(-n // block_size) for n in lengths]
    width, num_blocks = max(*blocks, 1), sum(blocks) + spare_blocks
    order = [int(i) for i in rng.permutation(num_blocks)]
    tables = np.full((len(lengths), width), order.pop(), np.int32)
    k, v = (np.full((num_blocks, block_size, kv_heads, head_dim), NAN, np.float32) for _ in "kv")
    q, out = numbers(len(lengths), heads, head_dim), unwritten(len(lengths), heads, head_dim)
    expected = np.zeros(out.shape)
    for b, n in enumerate(lengths):
        keys, values = rng.standard_normal((2, n, kv_heads, head_dim)).astype(np.float32)
        for t in range(n):
            if t % block_size == 0:
                tables[b, t // block_size] = order.pop()
            k[tables[b, t // block_size], t % block_size] = keys[t]
            v[tables[b, t // block_size], t % block_size] = values[t]
        for h in range(heads if n else 0):
            scores = keys[:, h // (heads // kv_heads)].astype(np.float64) @ q[b, h] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            expected[b, h] = weights / weights.sum() @ values[:, h // (heads // kv_heads)]
    exercise.call("paged_attention", q, k, v, tables, np.array(lengths, np.int32), out, len(lengths), heads, kv_heads,
                  head_dim, width, block_size, **options)  # fmt: skip
    close(out, expected, f"paged_attention of sequences of {lengths} tokens in blocks of {block_size}", 1e-4)


@task("7.5", "Paged decode attention", points=3)
@pytest.mark.parametrize(
    "lengths, sizes",
    [([4], {}), ([1, 3, 4, 5, 8, 9], {}), ([0, 7], {}), ([90], {"block_size": 16}), ([6, 2], {"block_size": 1}),
     ([5, 11], {"heads": 6, "kv_heads": 2}), ([9], {"heads": 3, "kv_heads": 3}),
     ([7], {"heads": 2, "kv_heads": 1, "head_dim": 80})],
    ids=str,
)  # fmt: skip
def test_paged_attention(exercise, lengths, sizes):
    for schedule in SCHEDULES:
        attend(exercise, lengths, **sizes, schedule=schedule)


@task("7.5", "Paged decode attention", points=2)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_paged_attention_under_a_sanitizer(exercise, sanitizer):
    attend(exercise, [70, 3], spare_blocks=1, sanitizer=sanitizer)

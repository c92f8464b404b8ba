"""Graded tests of exercise 03."""

import pytest
import torch

from minillm.completion import latency
from minillm.grading import task
from minillm.kv_cache import ContiguousCache
from minillm.model.config import ModelConfig
from minillm.model.weights import random_model
from minillm.naive_decode import NoCache
from minillm.prefill_decode import pass_cost, prefill

REFERENCE = {"prefill": prefill, "latency": latency, "pass_cost": pass_cost}
CONFIG = ModelConfig(259, 96, 2, 6, 2, 16, 128, 256)
PROMPT = list(b"a prompt of 23 tokens..")


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@task("3.1", "Chunked prefill", points=3)
@pytest.mark.parametrize("chunk_size", [1, 5, 22, 23, 24, 512])
def test_any_chunk_size_gives_the_full_pass(exercise, model, chunk_size):
    cache = ContiguousCache(CONFIG, 64, torch.float32)
    expected = model(torch.tensor(PROMPT), torch.arange(23), NoCache())
    hidden = exercise.prefill(model, PROMPT, cache, chunk_size)
    assert hidden.shape == (1, 96), f"shape {list(hidden.shape)}, must be [1, hidden_size]: the last token's"
    assert cache.length == 23, f"the cache holds {cache.length} tokens of 23"
    torch.testing.assert_close(hidden, expected[-1:], atol=1e-5, rtol=1e-4, msg="not the last row of the full pass")


@task("3.1", "Chunked prefill", points=1)
def test_passes_and_positions(exercise, model, monkeypatch):
    passes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda t, p, c: passes.append(p.tolist()) or forward(t, p, c))
    exercise.prefill(model, PROMPT[:10], ContiguousCache(CONFIG, 64, torch.float32), chunk_size=4)
    assert passes == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], f"positions of the passes were {passes}"


@task("3.1", "Chunked prefill", points=1)
def test_goes_on_after_what_is_cached(exercise, model):
    cache = ContiguousCache(CONFIG, 64, torch.float32)
    exercise.prefill(model, PROMPT[:7], cache, chunk_size=3)
    hidden = exercise.prefill(model, PROMPT[7:], cache, chunk_size=5)
    expected = model(torch.tensor(PROMPT), torch.arange(23), NoCache())[-1:]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-4, msg="positions go on from the cache's length")


@task("3.2", "TTFT and TPOT from timestamps", points=2)
@pytest.mark.parametrize(
    "arrival, times, expected",
    [
        (10.0, [10.5, 10.75, 11.0], (0.5, 0.25)),
        (0.0, [2.0, 3.0, 3.5, 7.0, 8.0], (2.0, 1.5)),
        (5.0, [9.0, 9.5], (4.0, 0.5)),
    ],
)
def test_latency(exercise, arrival, times, expected):
    assert exercise.latency(arrival, times) == pytest.approx(expected)


@task("3.2", "TTFT and TPOT from timestamps", points=1)
def test_latency_with_too_few_tokens(exercise):
    assert exercise.latency(1.0, [3.0]) == (2.0, None), "one token has no gap after it"
    assert exercise.latency(1.0, []) == (None, None)


@task("3.3", "Arithmetic intensity", points=2)
@pytest.mark.parametrize("num_tokens, context", [(1, 0), (1, 100), (64, 0), (16, 48)])
def test_flops(exercise, num_tokens, context):
    # Written out for CONFIG: qkv 96 x 160, o 96 x 96, three of 96 x 128; a head of 259 x 96, for one row.
    weights = 2 * (96 * 160 + 96 * 96 + 3 * 96 * 128)
    pairs = sum(context + i + 1 for i in range(num_tokens))  # keys seen, over the new tokens
    expected = 2 * weights * num_tokens + 2 * 259 * 96 + 2 * (2 * 2 * 96) * pairs
    assert exercise.pass_cost(CONFIG, num_tokens, context, torch.float32).flops == expected


@task("3.3", "Arithmetic intensity", points=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, context", [(1, 0), (1, 100), (64, 0), (16, 48)])
def test_bytes(exercise, num_tokens, context, dtype):
    weights = 2 * (96 * 160 + 96 * 96 + 3 * 96 * 128) + 259 * 96 + num_tokens * 96  # read once; embedding rows
    kv = 2 * 2 * 2 * 16 * (context + 2 * num_tokens)  # all read, the new ones written too
    assert exercise.pass_cost(CONFIG, num_tokens, context, dtype).bytes == (weights + kv) * dtype.itemsize

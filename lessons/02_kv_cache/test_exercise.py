"""Graded tests of exercise 02, on a tiny random model with 6 query and 2 KV heads."""

from itertools import islice

import pytest
import torch

from minillm.grading import task
from minillm.kv_cache import ContiguousCache, cached_decode_loop, kv_bytes
from minillm.model.config import ModelConfig
from minillm.model.llama import attention
from minillm.model.weights import random_model
from minillm.naive_decode import NoCache, decode_loop

REFERENCE = {"ContiguousCache": ContiguousCache, "cached_decode_loop": cached_decode_loop, "kv_bytes": kv_bytes}
CONFIG = ModelConfig(259, 96, 2, 6, 2, 16, 128, 256)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def argmax(logits):
    return int(logits.argmax())


@task("2.1", "Append and attend with a cache", points=3)
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 1, 3, 1]])
def test_attends_over_all_tokens_so_far(exercise, chunks):
    torch.manual_seed(0)
    cache = exercise.ContiguousCache(CONFIG, capacity=16, dtype=torch.float32)
    q, k, v = torch.randn(2, 9, 6, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)  # [layers, tokens, ...]
    done = 0
    for n in chunks:
        cache.extend(n)
        new = slice(done, done + n)
        for layer in (0, 1):
            out = cache.attend(layer, q[layer, new], k[layer, new], v[layer, new])
            expected = attention(q[layer, new], k[layer, : done + n], v[layer, : done + n])
            torch.testing.assert_close(
                out, expected, msg=f"layer {layer}: attend over each token so far, once, in order"
            )
        done += n
        assert cache.length == done, f"length={cache.length} after {done} tokens"


@task("2.1", "Append and attend with a cache", points=1)
def test_the_unused_tail_is_never_read(exercise):
    cache = exercise.ContiguousCache(CONFIG, capacity=8, dtype=torch.float32)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    cache.extend(2)
    x = torch.ones(2, 2, 16)
    assert cache.attend(0, torch.ones(2, 6, 16), x, x).isfinite().all(), "rows past `length` were attended to"


@task("2.1", "Append and attend with a cache", points=1)
def test_a_full_cache_refuses(exercise):
    cache = exercise.ContiguousCache(CONFIG, capacity=4, dtype=torch.float32)
    cache.extend(3)
    with pytest.raises(ValueError):
        cache.extend(2)
    assert cache.length == 3, "a refused extend must leave the cache as it was"
    cache.extend(1)


@task("2.1", "Append and attend with a cache", points=1)
def test_it_counts_the_bytes_in_use(exercise):
    cache = exercise.ContiguousCache(CONFIG, capacity=64, dtype=torch.bfloat16)
    assert cache.kv_bytes == 0
    cache.extend(10)
    assert cache.kv_bytes == 10 * 2 * 2 * 2 * 16 * 2, "K and V of 10 tokens, 2 layers, 2 KV heads, 16 channels, 2 bytes"


@task("2.2", "The cached loop", points=3)
@pytest.mark.parametrize("prompt", [b"a", b"abc", b"a longer prompt"])
def test_same_tokens_as_the_naive_loop(exercise, model, prompt):
    expected = list(islice(decode_loop(model, list(prompt), NoCache(), argmax), 20))
    cache = ContiguousCache(CONFIG, 64, torch.float32)
    out = list(islice(exercise.cached_decode_loop(model, list(prompt), cache, argmax), 20))
    assert out == expected, "a cache must not change the tokens"


@task("2.2", "The cached loop", points=2)
def test_each_pass_runs_one_token(exercise, model, monkeypatch):
    passes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda t, p, c: passes.append((len(t), p.tolist())) or forward(t, p, c))
    loop = exercise.cached_decode_loop(model, [1, 2, 3], ContiguousCache(CONFIG, 64, torch.float32), argmax)
    list(islice(loop, 4))
    # The fourth token is chosen after six passes: three of the prompt, three of the tokens before it.
    assert passes == [(1, [position]) for position in range(6)], f"(tokens, positions) of the passes were {passes}"


@task("2.3", "KV bytes of a config", points=2)
@pytest.mark.parametrize(
    "config, num_tokens, dtype, expected",
    [
        (CONFIG, 10, torch.float32, 10 * 2 * 2 * 2 * 16 * 4),
        (CONFIG, 0, torch.float32, 0),
        # SmolLM2-135M, and Llama 3 8B with its 128 kB a token
        (ModelConfig(49152, 576, 30, 9, 3, 64, 1536, 8192), 1, torch.bfloat16, 23_040),
        (ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 8192), 1, torch.bfloat16, 131_072),
        # head_dim is not hidden_size / num_heads everywhere (Qwen3 0.6B)
        (ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, 40960), 100, torch.float16, 100 * 114_688),
    ],
)
def test_kv_bytes(exercise, config, num_tokens, dtype, expected):
    assert exercise.kv_bytes(config, num_tokens, dtype) == expected

"""Step 2: the cache keeps what it should, and nothing else changes."""

import dataclasses

import pytest
import torch

from minillm import kv_cache, naive_decode, prefill_decode
from minillm.kv_cache import ContiguousCache, kv_bytes
from minillm.model.sampling import SamplingParams
from minillm.model.weights import random_model

STEPS = [naive_decode, kv_cache, prefill_decode]


def run_all(model, ids, cache):
    """Hidden states of one token after the other."""
    out = []
    with torch.inference_mode():
        for position, token in enumerate(ids):
            cache.extend(1)
            out.append(model(torch.tensor([token]), torch.tensor([position]), cache))
    return torch.cat(out)


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_C05_capacity_and_tail_do_not_matter(tiny_model, poison):
    ids = list(b"some twenty tokens..")
    with torch.inference_mode():
        full = tiny_model(torch.tensor(ids), torch.arange(20), naive_decode.NoCache())
    outputs = []
    for capacity in (20, 32, 64, 1024):
        cache = ContiguousCache(tiny_model.config, capacity, torch.float32)
        cache.k.fill_(poison)
        cache.v.fill_(poison)
        outputs.append(run_all(tiny_model, ids, cache))
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    torch.testing.assert_close(outputs[0], full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("length, new", [(14, 2), (15, 1), (16, 0), (17, None)])
def test_C06_the_contexts_end(tiny_config, step, length, new):
    model = random_model(dataclasses.replace(tiny_config, max_position_embeddings=16))
    prompt = list(range(length))
    if new is None:
        with pytest.raises(ValueError, match="17 tokens, must be at most the context's 16"):
            step.generate(model, [prompt], SamplingParams(max_tokens=100))
    else:
        [c] = step.generate(model, [prompt], SamplingParams(max_tokens=100))
        assert (len(c.token_ids), c.finish_reason) == (new, "length")


def test_C06_rows_past_the_length_are_never_written(tiny_model):
    cache = ContiguousCache(tiny_model.config, 8, torch.float32)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    run_all(tiny_model, [1, 2, 3], cache)
    assert (cache.k[:, 3:] == 7).all() and (cache.v[:, 3:] == 7).all() and not (cache.k[:, :3] == 7).any()
    with pytest.raises(ValueError, match="num_tokens=6: the cache holds 3 of at most 8"):
        cache.extend(6)
    assert cache.length == 3


def test_kv_bytes(tiny_config, tiny_model):
    assert kv_bytes(tiny_config, 10, torch.float32) == 2 * 2 * 2 * 16 * 4 * 10
    cache = ContiguousCache(tiny_config, 64, torch.float32)
    cache.extend(10)
    assert cache.kv_bytes == kv_bytes(tiny_config, 10, torch.float32)
    [c] = kv_cache.generate(tiny_model, ["abc"], SamplingParams(max_tokens=5, ignore_eos=True))
    assert c.metrics.kv_bytes == kv_bytes(tiny_config, 3 + 4, torch.float32)  # the last token is not run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_tokens_as_step_1(tiny_config, dtype):
    prompts = ["a", "hello", "a prompt of some length, odd: 37 bytes"]
    for seed in range(3):
        model = random_model(tiny_config, seed, dtype=dtype)
        outputs = [step.generate(model, prompts, SamplingParams(max_tokens=60)) for step in STEPS]
        tokens = [[c.token_ids for c in out] for out in outputs]
        assert tokens[1] == tokens[0] and tokens[2] == tokens[0]


def test_same_tokens_on_the_real_model(default_model):
    prompts = ["The capital of France is", "1, 2, 3, 4,", "import numpy as"]
    outputs = [step.generate(default_model, prompts, SamplingParams(max_tokens=16)) for step in STEPS]
    tokens = [[c.token_ids for c in out] for out in outputs]
    assert tokens[1] == tokens[0] and tokens[2] == tokens[0]

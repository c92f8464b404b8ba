"""Graded tests of exercise 04, on a tiny random model with 6 query and 2 KV heads."""

from itertools import islice

import pytest
import torch

from minillm.grading import task
from minillm.model.config import ModelConfig
from minillm.model.llama import attention
from minillm.model.weights import random_model
from minillm.naive_decode import NoCache, decode_loop
from minillm.static_batching import PaddedCache, batched_attention, left_pad, padded_decode_loop

REFERENCE = {
    "left_pad": left_pad,
    "batched_attention": batched_attention,
    "PaddedCache": PaddedCache,
    "padded_decode_loop": padded_decode_loop,
}
CONFIG = ModelConfig(259, 96, 2, 6, 2, 16, 128, 256)
PROMPTS = [list(b"abc"), list(b"seven_7"), list(b"twelve chars")]


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def argmax(logits):
    return logits.argmax(-1).tolist()


@task("4.1", "Left padding", points=2)
@pytest.mark.parametrize("lengths", [[3, 1], [1], [4, 4], [2, 9, 5]])
def test_everybody_ends_in_the_last_column(exercise, lengths):
    prompts = [list(range(10 * row + 1, 10 * row + 1 + n)) for row, n in enumerate(lengths)]
    tokens, real = exercise.left_pad(prompts)
    assert tokens.shape == real.shape == (len(prompts), max(lengths)), "one row a prompt, as wide as the longest"
    assert tokens.dtype == torch.int64 and real.dtype == torch.bool
    for row, prompt in enumerate(prompts):
        assert tokens[row, -len(prompt) :].tolist() == prompt, "a prompt ends in the last column"
        places = [False] * (max(lengths) - len(prompt)) + [True] * len(prompt)
        assert real[row].tolist() == places, "True where a token is"


@task("4.1", "Left padding", points=1)
def test_a_token_that_equals_the_pad_is_a_token(exercise):
    tokens, real = exercise.left_pad([[0, 0, 5], [0]])
    assert real.tolist() == [[True, True, True], [False, False, True]], "a pad is known by its place, not by its id"
    assert tokens[0].tolist() == [0, 0, 5]


def ragged_mask(lengths, T, M):
    """Left-padded rows of M keys, of which the last T are queried: causal, pads left out."""
    real = torch.arange(M) >= M - torch.tensor(lengths)[:, None]  # [B, M]
    causal = torch.ones(T, M, dtype=torch.bool).tril(M - T)
    return causal & real[:, None, :] & real[:, M - T :, None]


@task("4.2", "Batched grouped-query attention", points=3)
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 2, 16), (4, 4, 8), (5, 1, 40)])
@pytest.mark.parametrize("T, M", [(7, 7), (1, 7), (3, 7)])
def test_each_row_as_if_alone(exercise, heads, kv_heads, dim, T, M):
    torch.manual_seed(0)
    lengths = [7, 4, 3]
    q, k, v = torch.randn(3, T, heads, dim), torch.randn(3, M, kv_heads, dim), torch.randn(3, M, kv_heads, dim)
    out = exercise.batched_attention(q, k, v, ragged_mask(lengths, T, M))
    assert out.shape == q.shape
    for row, n in enumerate(lengths):
        t = min(T, n)
        expected = attention(q[row, T - t :], k[row, M - n :], v[row, M - n :])
        torch.testing.assert_close(
            out[row, T - t :], expected, atol=1e-5, rtol=1e-5, msg=f"row {row} is not what it is alone"
        )


@task("4.2", "Batched grouped-query attention", points=1)
def test_a_query_that_sees_nothing_gives_zero(exercise):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 6, 16), torch.randn(3, 3, 2, 16), torch.randn(3, 3, 2, 16)
    out = exercise.batched_attention(q, k, v, ragged_mask([3, 1, 0], 3, 3))
    assert (out[1, :2] == 0).all(), "softmax over nothing is NaN; a pad's output must be zero"
    assert (out[2] == 0).all(), "a row of nothing but pads must be zero"
    assert out.isfinite().all()


def run(cache, model, tokens, real):
    """One pass of a rectangle -> logits of the last column [rows, vocab], and the positions."""
    with torch.inference_mode():
        positions = cache.extend(real)
        hidden = model(tokens.flatten(), positions.flatten(), cache)
        return model.logits(hidden.view(*tokens.shape, -1)[:, -1]), positions


def column(tokens):
    return torch.tensor(tokens)[:, None], torch.ones(len(tokens), 1, dtype=torch.bool)


@task("4.3", "Positions, mask and pads", points=2)
def test_positions_start_at_each_first_token(exercise):
    cache = exercise.PaddedCache(CONFIG, 3, 20, torch.float32)
    positions = cache.extend(left_pad(PROMPTS)[1])
    for row, prompt in enumerate(PROMPTS):
        assert positions[row, -len(prompt) :].tolist() == list(range(len(prompt))), "a row's first token is at 0"
    assert (positions >= 0).all(), "a pad needs a position that exists"
    assert cache.extend(torch.ones(3, 1, dtype=torch.bool)).tolist() == [[3], [7], [12]]
    assert cache.extend(torch.tensor([[True], [False], [True]]))[[0, 2]].tolist() == [[4], [13]]
    assert cache.extend(torch.ones(3, 1, dtype=torch.bool)).tolist() == [[5], [8], [14]], "pads are not counted"


@task("4.3", "Positions, mask and pads", points=2)
def test_each_row_is_what_it_is_alone_in_prefill_and_decode(exercise, model):
    cache = exercise.PaddedCache(CONFIG, 3, 32, torch.float32)
    logits, _ = run(cache, model, *left_pad(PROMPTS))
    ids = [list(prompt) for prompt in PROMPTS]
    for step in range(8):
        with torch.inference_mode():
            for row, tokens in enumerate(ids):
                alone = model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())[-1:])[0]
                torch.testing.assert_close(
                    logits[row], alone, atol=1e-4, rtol=0, msg=f"row {row} differs from its solo run, step {step}"
                )
        new = argmax(logits)
        ids = [tokens + [token] for tokens, token in zip(ids, new, strict=True)]
        logits, _ = run(cache, model, *column(new))


@task("4.3", "Positions, mask and pads", points=2)
@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_decode_does_not_look_at_pads(exercise, model, value):
    outs = []
    for spoil in (False, True):
        cache = exercise.PaddedCache(CONFIG, 3, 20, torch.float32)
        cache.k.fill_(value if spoil else 0.0)  # the unused tail, too
        cache.v.fill_(value if spoil else 0.0)
        tokens, real = left_pad(PROMPTS)
        run(cache, model, tokens, real)
        if spoil:
            cache.k[:, :, :12][:, ~real] = value
            cache.v[:, :, :12][:, ~real] = value
        out, _ = run(cache, model, *column([1, 2, 3]))
        out2, _ = run(cache, model, *column([4, 5, 6]))
        outs.append(torch.stack([out, out2]))
    torch.testing.assert_close(outs[1], outs[0], msg="what stood in the pads has changed the result")


@task("4.3", "Positions, mask and pads", points=1)
def test_a_pad_between_decode_steps_is_seen_by_nobody(exercise, model):
    cache = exercise.PaddedCache(CONFIG, 3, 20, torch.float32)
    run(cache, model, *left_pad(PROMPTS))
    run(cache, model, torch.tensor([[1], [200], [2]]), torch.tensor([[True], [False], [True]]))  # row 1: a pad
    logits, _ = run(cache, model, *column([3, 4, 5]))
    for row, new in enumerate([[1, 3], [4], [2, 5]]):
        ids = PROMPTS[row] + new
        with torch.inference_mode():
            alone = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), NoCache())[-1:])[0]
        torch.testing.assert_close(
            logits[row], alone, atol=1e-4, rtol=0, msg=f"row {row}: a place of a decode column can be a pad, too"
        )


@task("4.3", "Positions, mask and pads", points=1)
def test_a_full_rectangle_refuses(exercise):
    cache = exercise.PaddedCache(CONFIG, 2, 4, torch.float32)
    cache.extend(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError):
        cache.extend(torch.ones(2, 2, dtype=torch.bool))
    try:
        positions = cache.extend(torch.ones(2, 1, dtype=torch.bool))
    except ValueError:
        pytest.fail("a refused extend must leave the cache as it was: there is room for one more column")
    assert positions.tolist() == [[3], [3]], "a refused extend must leave the cache as it was"


@task("4.4", "The padded decode loop", points=3)
def test_same_tokens_as_the_naive_loop(exercise, model):
    cache = PaddedCache(CONFIG, 3, 64, torch.float32)
    out = list(islice(exercise.padded_decode_loop(model, PROMPTS, cache, argmax), 15))
    for row, prompt in enumerate(PROMPTS):
        expected = list(islice(decode_loop(model, prompt, NoCache(), lambda x: int(x.argmax())), 15))
        assert [tokens[row] for tokens in out] == expected, f"row {row}: a batch must not change the tokens"


@task("4.4", "The padded decode loop", points=1)
def test_the_prompt_is_one_pass_and_then_a_column_each(exercise, model, monkeypatch):
    passes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda t, p, c: passes.append(len(t)) or forward(t, p, c))
    cache = PaddedCache(CONFIG, 3, 64, torch.float32)
    list(islice(exercise.padded_decode_loop(model, PROMPTS, cache, argmax), 4))
    assert passes == [3 * 12, 3, 3, 3], f"tokens of the passes were {passes}"


@task("4.4", "The padded decode loop", points=2)
def test_a_row_that_has_ended_runs_on_as_a_pad(exercise, model):
    cache, seen = PaddedCache(CONFIG, 3, 64, torch.float32), []

    def choose(logits):
        seen.append(logits)
        tokens = argmax(logits)
        return [tokens[0], None if len(seen) > 2 else tokens[1], tokens[2]]

    out = list(islice(exercise.padded_decode_loop(model, PROMPTS, cache, choose), 8))
    assert [tokens[1] is None for tokens in out] == [False] * 2 + [True] * 6, "yield what was chosen"
    for row in (0, 2):
        expected = list(islice(decode_loop(model, PROMPTS[row], NoCache(), lambda x: int(x.argmax())), 8))
        assert [tokens[row] for tokens in out] == expected, f"row {row} has noticed that its neighbour ended"
    assert cache.real[1, : cache.length].sum() == 7 + 2, "its places after the end hold no token"

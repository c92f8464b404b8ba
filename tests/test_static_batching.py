"""Step 4: a rectangle of requests gives what each would give alone, and its waste is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillm import naive_decode
from minillm.completion import prepare
from minillm.kv_cache import kv_bytes
from minillm.model.llama import attention
from minillm.model.sampling import SamplingParams
from minillm.naive_decode import NoCache
from minillm.static_batching import PaddedCache, StaticBatch, batched_attention, generate, left_pad, padded_decode_loop
from minillm.trace import Waste

PROMPTS = [list(b"abc"), list(b"seven_7"), list(b"twelve chars")]  # 3, 7 and 12 tokens


def solo(model, prompt, steps):
    """Logits of each step of greedy decode alone, without a cache -> [steps, vocab]"""
    ids, out = list(prompt), []
    with torch.inference_mode():
        for _ in range(steps):
            out.append(model.logits(model(torch.tensor(ids), torch.arange(len(ids)), NoCache())[-1:])[0])
            ids.append(int(out[-1].argmax()))
    return torch.stack(out)


def rectangle(prompts, side):
    if side == "left":
        return left_pad(prompts)
    tokens, real = left_pad([prompt[::-1] for prompt in prompts])
    return tokens.flip(1), real.flip(1)


def batch_logits(model, prompts, steps, side="left", spoil=lambda cache: None):
    """Logits of each step of greedy decode in one rectangle -> [steps, rows, vocab], and the prompt's positions."""
    tokens, real = rectangle(prompts, side)
    cache = PaddedCache(model.config, len(prompts), tokens.shape[1] + steps, torch.float32)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    last = [row.nonzero()[-1].item() for row in real]
    out, first_positions = [], None
    with torch.inference_mode():
        for _ in range(steps):
            positions = cache.extend(real)
            first_positions = positions if first_positions is None else first_positions
            hidden = model(tokens.flatten(), positions.flatten(), cache).view(*tokens.shape, -1)
            out.append(model.logits(hidden[torch.arange(len(prompts)), last]))
            spoil(cache)
            tokens, last = out[-1].argmax(-1)[:, None], [0] * len(prompts)
            real = torch.ones_like(tokens, dtype=torch.bool)
    return torch.stack(out), first_positions


@pytest.mark.parametrize("side", ["left", "right"])
def test_C01_each_row_equals_its_solo_run(tiny_model, side):
    batched, positions = batch_logits(tiny_model, PROMPTS, 20, side)
    for row, prompt in enumerate(PROMPTS):
        alone = solo(tiny_model, prompt, 20)
        torch.testing.assert_close(batched[:, row], alone, atol=1e-4, rtol=0)
        assert batched[:, row].argmax(-1).tolist() == alone.argmax(-1).tolist()
    _, real = rectangle(PROMPTS, side)
    for row, prompt in enumerate(PROMPTS):
        assert positions[row][real[row]].tolist() == list(range(len(prompt))), "a row's first token is at 0"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("value", [1e4, float("nan"), float("inf")])
def test_C02_decode_does_not_look_at_pads(tiny_model, value, side):
    expected, _ = batch_logits(tiny_model, PROMPTS, 10, side)

    def spoil(cache):
        cache.k[:, ~cache.real] = value
        cache.v[:, ~cache.real] = value

    spoiled, _ = batch_logits(tiny_model, PROMPTS, 10, side, spoil)
    assert torch.equal(spoiled, expected)


def test_C03_neighbours_change_no_token(tiny_model):
    torch.manual_seed(0)
    expected = solo(tiny_model, PROMPTS[1], 12).argmax(-1).tolist()
    for size in (2, 3, 5, 8, 16):
        neighbours = [torch.randint(0, 256, (int(n),)).tolist() for n in torch.randint(1, 30, (size - 1,))]
        [first, *_] = generate(tiny_model, [PROMPTS[1], *neighbours], SamplingParams(max_tokens=12, ignore_eos=True))
        assert first.token_ids == expected


def test_C03_in_bfloat16_a_flip_needs_a_narrow_margin(tiny_config):
    """Logits of a row in a batch are those of the row alone, within the noise of the dtype; where the tokens differ,
    the two best were closer than that noise."""
    from minillm.model.weights import random_model

    model = random_model(tiny_config, dtype=torch.bfloat16)
    noise = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        prompts = [torch.randint(0, 256, (int(n),)).tolist() for n in torch.randint(1, 30, (6,))]
        loops = {}
        for name, batch in (("alone", [prompts[0]]), ("batch", prompts)):
            seen = []
            cache = PaddedCache(model.config, len(batch), 40, torch.bfloat16)
            loop = padded_decode_loop(
                model, batch, cache, lambda x, seen=seen: seen.append(x[0].float()) or x.argmax(-1).tolist()
            )
            next(loop)
            loops[name] = seen[0]
        alone, batch = loops["alone"], loops["batch"]
        noise = max(noise, (alone - batch).abs().max().item())
        if alone.argmax() != batch.argmax():
            best = alone.topk(2).values
            assert (best[0] - best[1]).item() <= 2 * noise
    assert noise < 0.02 * alone.abs().max().item(), "more than rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_C45_rows_that_see_nothing_are_zero_and_harmless(backend, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, heads, 16).to(dtype) for heads in (6, 2, 2))
    whole = torch.ones(3, 4, 4, dtype=torch.bool).tril()
    mask = whole.clone()
    mask[1] = False  # a row of pads
    mask[2, :2] = False  # pad queries
    with sdpa_kernel(backend):
        expected, out = batched_attention(q, k, v, whole), batched_attention(q, k, v, mask)
    assert (out[1] == 0).all() and (out[2, :2] == 0).all()
    assert torch.equal(out[0], expected[0]) and out.isfinite().all()
    torch.testing.assert_close(out[2, 2:], expected[2, 2:])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([(6, 2, 16), (4, 4, 8), (5, 1, 40)]),
    st.integers(0, 10**6),
)
def test_batched_attention_equals_attention_row_by_row(lengths, sizes, seed):
    torch.manual_seed(seed)
    heads, kv_heads, dim = sizes
    T = max(lengths)
    q, k, v = (torch.randn(len(lengths), T, n, dim) for n in (heads, kv_heads, kv_heads))
    real = torch.arange(T) >= T - torch.tensor(lengths)[:, None]  # [B, T], left-padded
    mask = torch.ones(T, T, dtype=torch.bool).tril() & real[:, None, :] & real[:, :, None]
    out = batched_attention(q, k, v, mask)
    for row, n in enumerate(lengths):
        expected = attention(q[row, T - n :], k[row, T - n :], v[row, T - n :])
        torch.testing.assert_close(out[row, T - n :], expected, atol=1e-5, rtol=1e-5)


def test_same_tokens_as_the_naive_loop(tiny_model):
    prompts = [*PROMPTS, list(b"x"), list(b"a rather long prompt, longer than the others")]
    params = [SamplingParams(max_tokens=n, seed=n, temperature=t) for n, t in zip((9, 1, 30, 14, 5), (0, 0, 0, 1, 0.7))]  # noqa: B905
    expected = naive_decode.generate(tiny_model, prompts, params)
    for max_num_seqs in (1, 2, 32):
        out = generate(tiny_model, prompts, params, max_num_seqs=max_num_seqs)
        assert [(c.token_ids, c.text, c.finish_reason) for c in out] == [
            (c.token_ids, c.text, c.finish_reason) for c in expected
        ]


def test_the_waste_is_what_the_lengths_say(tiny_model):
    lengths, new = [3, 7, 12, 1], [5, 20, 3, 12]
    trace = []
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in new]
    generate(tiny_model, [[65] * n for n in lengths], params, trace=trace)
    waste = Waste.of(trace)
    assert waste.padded_prompt_tokens == sum(12 - n for n in lengths)
    # The first token comes out of prefill; the longest row needs 19 decode passes more, a row of n tokens n - 1.
    assert len(trace) == 20
    assert waste.finished_decode_slots == sum(20 - n for n in new)
    held = sum(sum(p + i for i in range(n)) for p, n in zip(lengths, new, strict=True))
    assert waste.kv_waste == pytest.approx(1 - held / (20 * 4 * (12 + 20)))
    token = kv_bytes(tiny_model.config, 1, torch.float32)
    assert Waste.of(trace, token).unused_kv_bytes == pytest.approx(token * (4 * (12 + 20) - held / 20))
    assert Waste.of([]).unused_kv_bytes == Waste.of([]).kv_waste == 0
    assert sum(step.num_tokens for step in trace) == sum(lengths) + sum(n - 1 for n in new)


def test_a_row_holds_memory_for_the_longest(tiny_model):
    short, long = generate(tiny_model, [[1], [2] * 30], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=9)])
    assert short.metrics.kv_bytes == long.metrics.kv_bytes == 39 * 2 * 2 * 2 * 16 * 4


def test_the_capacity_is_refused_before_anything_is_written(tiny_config):
    cache = PaddedCache(tiny_config, 2, 8, torch.float32)
    cache.extend(torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="3 columns, the cache holds 6 of at most 8"):
        cache.extend(torch.ones(2, 3, dtype=torch.bool))
    assert cache.length == 6 and not cache.real[:, 6:].any()


def test_an_empty_list_and_a_prompt_that_fills_the_context(tiny_model):
    assert generate(tiny_model, []) == []
    full, short = generate(tiny_model, [[1] * 256, [1, 2]], SamplingParams(max_tokens=3))
    assert (full.token_ids, full.finish_reason) == ([], "length") and len(short.token_ids) == 3
    with pytest.raises(ValueError, match="max_num_seqs=0: must be at least 1"):
        generate(tiny_model, [[1]], max_num_seqs=0)


def test_a_row_that_has_ended_does_not_run_past_the_context(tiny_model):
    """It runs on for as long as the longest row, which may be longer than the context has positions for it."""
    prompts, params = [[1] * 250, [1, 2]], [SamplingParams(max_tokens=6), SamplingParams(max_tokens=40)]
    expected = naive_decode.generate(tiny_model, prompts, params)
    assert [c.token_ids for c in generate(tiny_model, prompts, params)] == [c.token_ids for c in expected]


def test_text_comes_as_it_goes(tiny_model):
    shown = {0: "", 1: ""}

    def on_text(index, text):
        shown[index] += text

    out = generate(tiny_model, ["abc", "x"], SamplingParams(max_tokens=12), on_text)
    assert [shown[0], shown[1]] == [c.text for c in out]


def test_a_batch_ends_when_all_its_rows_have(tiny_model):
    partials = prepare(tiny_model, [[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    batch = StaticBatch(tiny_model, partials)
    rows = []
    while not batch.done:
        new = batch.step()
        rows.append([row for row, _ in new])
        for row, token in new:
            partials[row].push(token)
    assert rows == [[0, 1], [1], [1]]

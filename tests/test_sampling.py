"""Sampling: exact where it can be, by distribution where it is random."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minillm.model.sampling import SamplingParams, apply_penalties, draw, probabilities, sample, token_logprobs, uniform

PROBS = torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2])
LOGITS = PROBS.log()


def frequencies(logits, params, draws=2000, row=0):
    """How often each token comes, over draws that differ in their number only."""
    counts = np.zeros(logits.shape[-1])
    for n in range(draws):
        counts[sample(logits, params, None, [[0] * n for _ in params])[row]] += 1
    return counts


def chi_square_holds(counts, probs):
    """Pearson's statistic below its 99.9% quantile (Wilson-Hilferty); nothing drawn where probs is 0."""
    kept = probs > 0
    assert counts[~kept].sum() == 0
    expected, dof = probs[kept] * counts.sum(), kept.sum() - 1
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    return statistic < dof * (1 - 2 / (9 * dof) + 3.09 * math.sqrt(2 / (9 * dof))) ** 3


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_C04_each_row_has_its_own_parameters(order):
    rows = [
        SamplingParams(),
        SamplingParams(temperature=1, top_k=1, seed=1),
        SamplingParams(temperature=1, top_p=0.05, seed=2),
        SamplingParams(temperature=1, seed=3),
        SamplingParams(temperature=1, seed=4, top_k=-1),
    ]
    params = [rows[i] for i in order]
    batch = LOGITS.repeat(5, 1)
    drawn = np.array([sample(batch, params, None, [[0] * n] * 5) for n in range(2000)])
    for place, i in enumerate(order):
        counts = np.bincount(drawn[:, place], minlength=5)
        if i < 3:
            assert counts[1] == 2000
        else:
            assert chi_square_holds(counts, PROBS.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0, 1e-2, 1e-4, 1e-5, 1e-8, 1e-38, 5e-324])
def test_C25_tiny_temperatures_are_argmax(dtype, temperature):
    logits = torch.linspace(-15, 15, 50).flip(0).to(dtype)
    params = SamplingParams(temperature=temperature, seed=0)
    assert sample(logits[None], [params]) == [0]
    if temperature:
        probs = probabilities(logits, params)
        assert probs.isfinite().all() and probs[0] > 0.99


@pytest.mark.parametrize("top_k, kept", [(0, 50), (-1, 50), (1, 1), (49, 49), (50, 50), (51, 50), (10**9, 50)])
def test_C26_top_k_limits(top_k, kept):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    probs = probabilities(logits, SamplingParams(temperature=1, top_k=top_k))
    assert (probs > 0).sum() == kept and probs.argmax() == logits.argmax()
    if kept == 50:
        assert torch.equal(probs, probabilities(logits, SamplingParams(temperature=1)))


def test_C27_a_seeded_row_depends_on_nothing_else():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    seeded, other = SamplingParams(temperature=1, seed=42), SamplingParams(temperature=1, seed=7)
    alone = [sample(logits[:1], [seeded], None, [[0] * n])[0] for n in range(50)]
    for neighbour in (SamplingParams(temperature=1), other, seeded, SamplingParams()):
        rows = [[0] * 3, [0] * 9]
        assert [
            sample(logits[[1, 0]], [neighbour, seeded], None, [rows[n % 2], [0] * n])[1] for n in range(50)
        ] == alone
    assert len(set(alone)) > 5  # not the same draw again and again
    unseeded = SamplingParams(temperature=1)
    runs = {tuple(sample(logits, [unseeded] * 4)) for _ in range(20)}
    assert len(runs) > 1


def test_C28_penalties():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    penalised = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    out = apply_penalties(logits, [SamplingParams(), penalised], [[0, 1], [0, 1]], [[2], [2, 2]])
    assert torch.equal(out[0], logits[0])  # a neighbour is not touched
    # Repetition: prompt and output, positive divided, negative multiplied. The others: the output only.
    assert out[1].tolist() == [1.0, -4.0, 0.5 - 2 * 0.25 - 0.5, 0.5]
    assert torch.equal(logits[1], torch.tensor([2.0, -2.0, 1.0, 0.5]))  # the caller's tensor is left alone
    assert apply_penalties(logits, [SamplingParams(repetition_penalty=1.0)] * 2, [[0]] * 2, [[1]] * 2) is logits


def test_greedy_ties_go_to_the_lowest_id():
    assert sample(torch.tensor([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]]), [SamplingParams()] * 2) == [1, 0]


@settings(max_examples=100, deadline=None)
@given(
    # On a grid: two logits a hair apart have the same probability, and who is first of equals is each one's choice.
    logits=st.lists(st.integers(-1280, 1280).map(lambda n: n / 64), min_size=2, max_size=30, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(1, 30),
    top_p=st.floats(0.05, 1.0),
)
def test_filters_equal_transformers(logits, temperature, top_k, top_p):
    scores = torch.tensor([logits], dtype=torch.float64)
    ours = probabilities(scores[0], SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    theirs = scores / temperature
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        theirs = warper(None, theirs)
    theirs = theirs.softmax(-1)[0]
    different = (ours > 0) != (theirs > 0)
    if different.any():  # only where a sum meets top_p to the last bit may the two differ
        sums = (scores[0] / temperature).softmax(-1).sort(descending=True).values[:top_k]
        assert ((sums / sums.sum()).cumsum(0) - top_p).abs().min() < 1e-6
    else:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_equals_transformers(min_p):
    ours = probabilities(LOGITS, SamplingParams(temperature=1, min_p=min_p))
    torch.testing.assert_close(ours, MinPLogitsWarper(min_p)(None, LOGITS.double()[None]).softmax(-1)[0])


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda p: sum(p) > 1e-3),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_never_gives_an_impossible_token(probs, u):
    probs = torch.tensor(probs, dtype=torch.float64)
    for v in (u, 0.0, math.nextafter(1, 0)):
        assert probs[draw(probs, v)] > 0


def test_uniform_is_uniform():
    draws = np.array([uniform(5, n) for n in range(5000)])
    assert chi_square_holds(np.histogram(draws, bins=20, range=(0, 1))[0], np.full(20, 0.05))
    assert uniform(5, 3) == draws[3] and uniform(-1, 0) != uniform(0, 0)


def test_logprobs_against_log_softmax():
    entry = token_logprobs(LOGITS, 2, top=2)
    assert entry.logprob == pytest.approx(math.log(0.3))
    assert list(entry.top) == [1, 2] and entry.top[1] == pytest.approx(math.log(0.4))


WRONG = {
    "max_tokens": [0, -1, 1.5, "x", None, True],
    "temperature": [-1, math.nan, math.inf, -math.inf, 10**400, "hot", None, True],
    "top_k": [-2, 1.5, "x", None, True],
    "top_p": [0, -1, 7, math.nan, "x", True],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan, 10**400],
    "presence_penalty": [-3, 3, math.nan],
    "frequency_penalty": [-3, 3, math.nan],
    "stop": ["", ["a", ""], [1], 5, 0],
    "stop_token_ids": [[-1], ["a"], [1.5], [True], 7, 0],
    "ignore_eos": [1, "yes"],
    "seed": [1.5, "x", 2**64, -(2**63) - 1, True],
    "logprobs": [-1, 21, 1.5, True],
}


@pytest.mark.parametrize("name, value", [(n, v) for n, vs in WRONG.items() for v in vs])
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*must be") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_to_choose_from(bad):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    with pytest.raises(FloatingPointError, match="row 1"):
        sample(logits, [SamplingParams()] * 3)
    with pytest.raises(FloatingPointError, match="row 0"):
        sample(torch.full((1, 8), float("-inf")), [SamplingParams(temperature=1.0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 64, 49152])
def test_ties_go_to_the_lowest_id(dtype, vocab):
    torch.manual_seed(vocab)
    logits = torch.randint(0, 3, (5, vocab)).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, [SamplingParams()] * 5) == expected

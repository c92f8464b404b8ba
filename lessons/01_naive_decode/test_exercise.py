"""Graded tests of exercise 01, on a tiny random model and on fixed distributions."""

from itertools import islice

import pytest
import torch

from minillm.completion import StopStrings
from minillm.grading import task
from minillm.model.config import ModelConfig
from minillm.model.sampling import softmax_with_temperature, top_p_filter
from minillm.model.weights import random_model
from minillm.naive_decode import NoCache, decode_loop

REFERENCE = {
    "decode_loop": decode_loop,
    "softmax_with_temperature": softmax_with_temperature,
    "top_p_filter": top_p_filter,
    "StopStrings": StopStrings,
}


@pytest.fixture(scope="module")
def model():
    return random_model(ModelConfig(259, 96, 2, 6, 2, 16, 128, 256))


def argmax(logits):
    return int(logits.argmax())


@task("1.1", "The decode loop", points=3)
def test_decode_loop_is_greedy_decoding(exercise, model):
    tokens = list(b"abc")
    for _ in range(12):  # what the definition says, with nothing left out
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())
        tokens.append(argmax(model.logits(hidden)[-1]))
    out = list(islice(exercise.decode_loop(model, list(b"abc"), NoCache(), argmax), 12))
    assert out == tokens[3:], "each token must come from the last row of a pass over all tokens before it"


@task("1.1", "The decode loop", points=1)
def test_decode_loop_asks_for_one_row_and_leaves_the_prompt_alone(exercise, model):
    prompt, shapes = [1, 2, 3], []

    def choose(logits):
        shapes.append(tuple(logits.shape))
        return 7

    assert list(islice(exercise.decode_loop(model, prompt, NoCache(), choose), 3)) == [7, 7, 7]
    assert shapes == [(1, 259)] * 3, f"choose must get logits [1, vocab], got {shapes}"
    assert prompt == [1, 2, 3], "the caller's list of prompt ids was changed"


@task("1.2", "Temperature and top-p", points=1)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature(exercise, temperature):
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 5.0, 5.0]])
    expected = torch.softmax(logits.double() / temperature, dim=-1)
    torch.testing.assert_close(exercise.softmax_with_temperature(logits, temperature).double(), expected)


@task("1.2", "Temperature and top-p", points=1)
@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-38])
def test_tiny_temperature_is_argmax(exercise, temperature):
    probs = exercise.softmax_with_temperature(torch.tensor([15.0, 14.0, -15.0]), temperature)
    assert probs.isfinite().all(), f"logits / {temperature} overflows: subtract the highest first"
    assert probs.argmax() == 0 and probs[0] > 0.99


@task("1.2", "Temperature and top-p", points=2)
@pytest.mark.parametrize(
    "p, kept", [(0.05, [3]), (0.4, [3]), (0.45, [3, 1]), (0.75, [3, 1, 0]), (0.9, [3, 1, 0, 2]), (1.0, [3, 1, 0, 2, 4])]
)
def test_top_p(exercise, p, kept):
    probs = torch.tensor([0.15, 0.25, 0.125, 0.4, 0.075], dtype=torch.float64)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = probs[kept] / probs[kept].sum()
    out = exercise.top_p_filter(probs, p)
    assert (out > 0).nonzero().flatten().tolist() == sorted(kept), f"top_p={p} must keep the tokens {sorted(kept)}"
    torch.testing.assert_close(out.double(), expected, msg="what is kept must sum to 1, in its old proportions")


def run(stops, pieces):
    shown = [stops.push(piece) for piece in pieces]
    return "".join(shown) + stops.flush()


@task("1.3", "Stop strings", points=2)
@pytest.mark.parametrize(
    "pieces, stop, text",
    [
        (["Par", "is is", " nice"], ["is i"], "Par"),
        (["Par", "is is", " nice"], ["ris"], "Pa"),
        (list("ABCDEFGH"), ["DEFG"], "ABC"),
        (list("ABABAC"), ["ABAC"], "AB"),
        (["no stop"], [], "no stop"),
    ],
)
def test_text_ends_before_the_stop_string(exercise, pieces, stop, text):
    stops = exercise.StopStrings(stop)
    assert run(stops, pieces) == text
    assert stops.stopped == bool(stop)


@task("1.3", "Stop strings", points=1)
def test_what_was_held_back_is_not_lost(exercise):
    assert run(exercise.StopStrings(["DEFG"]), "ABCDEFX") == "ABCDEFX", "text was held back and never shown"
    assert run(exercise.StopStrings(["xyz"]), ["a", "x"]) == "ax", "flush must give what is still held"


@task("1.3", "Stop strings", points=1)
def test_nothing_leaks_and_nothing_waits_for_no_reason(exercise):
    stops = exercise.StopStrings(["DEFG"])
    shown = [stops.push(letter) for letter in "ABCDEF"]
    assert shown == ["A", "B", "C", "", "", ""], f"pushes gave {shown}: only what may begin a stop string waits"
    assert [stops.push(letter) for letter in "GHI"] == ["", "", ""], "text after the stop string was shown"


@task("1.3", "Stop strings", points=1)
@pytest.mark.parametrize("pieces", [["abcd"], list("abcd"), ["ab", "cd"], ["abc", "d"]])
def test_the_stop_that_is_complete_first_wins(exercise, pieces):
    assert run(exercise.StopStrings(["bcd", "c"]), pieces) == "ab", "the outcome must not depend on how text is cut"
    assert run(exercise.StopStrings(["bc", "c"]), pieces) == "a", (
        "of stops that end together, the one that starts first"
    )

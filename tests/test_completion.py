"""How completions end, what text is shown, and what is refused before anything runs."""

import dataclasses

import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from minillm import kv_cache, naive_decode, prefill_decode
from minillm.completion import StopStrings, complete, latency
from minillm.model.sampling import SamplingParams
from minillm.model.tokenizer import Tokenizer, byte_tokenizer

STEPS = [naive_decode, kv_cache, prefill_decode]


class Scripted:
    """A fake model whose output is a given list of pieces of text (then <end> for ever)."""

    def __init__(self, config, pieces, ends=("<end>",), context=256):
        vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["p", *pieces, *ends]))}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="p"))
        backend.decoder = decoders.Metaspace()
        backend.add_special_tokens(list(ends))
        self.tokenizer = Tokenizer(backend)
        eos = tuple(vocab[e] for e in ends)
        self.config = dataclasses.replace(
            config, vocab_size=len(vocab), eos_token_ids=eos, max_position_embeddings=context
        )
        self.script = [vocab[p] for p in pieces] + [eos[0]] * context
        self.vocab = vocab

    def run(self, **params):
        def loop(model, prompt_ids, cache, choose):
            for token in self.script:
                yield choose(torch.nn.functional.one_hot(torch.tensor([token]), len(self.vocab)).float())

        cache = naive_decode.NoCache()
        shown = []
        params = SamplingParams(**{"max_tokens": 100, **params})
        [c] = complete(self, [[0]], params, loop, lambda capacity: cache, shown.append)
        assert "".join(shown) == c.text  # streamed equals not streamed, for each way to end
        assert all(shown)
        return c, shown


@pytest.mark.parametrize("stop, text", [("is i", "Par"), ("ris", "Pa"), ("s", "Pari")])
def test_C16_stop_across_tokens(tiny_config, stop, text):
    c, _ = Scripted(tiny_config, ["Par", "is is", " nice"]).run(stop=stop)
    assert (c.text, c.finish_reason) == (text, "stop")
    assert len(c.token_ids) == 2


@pytest.mark.parametrize(
    "letters, stops, text, reason",
    [
        ("ABCDEFGH", ["DEFG"], "ABC", "stop"),
        ("ABCDEFX", ["DEFG"], "ABCDEFX", "stop"),  # ended by <end>
        ("ABCDEFGH", ["DE", "DEFG"], "ABC", "stop"),  # one a prefix of the other
        ("ABCDEFGH", ["CDE", "BCD"], "A", "stop"),  # two that overlap
        ("ABABAC", ["ABAC"], "AB", "stop"),  # begins anew within itself
    ],
)
def test_C17_no_leak_and_no_loss(tiny_config, letters, stops, text, reason):
    c, _ = Scripted(tiny_config, list(letters)).run(stop=stops)
    assert (c.text, c.finish_reason) == (text, reason)


@pytest.mark.parametrize("end", ["eos", "max_tokens", "context"])
@pytest.mark.parametrize("pieces, text", [(["b", "ax"], "bax"), (["b", "?xyz"], "b?"), (["q", "xy"], "qxy")])
def test_C18_the_held_tail_arrives(tiny_config, end, pieces, text):
    context = 1 + len(pieces) if end == "context" else 256
    params = {"max_tokens": len(pieces)} if end == "max_tokens" else {}
    c, _ = Scripted(tiny_config, pieces, context=context).run(stop=["xyz"], **params)
    assert c.text == text
    assert c.finish_reason == ("stop" if end == "eos" or "?xyz" in pieces else "length")


@pytest.mark.parametrize("end", ["<e5>", "<e6>", "<e7>"])
def test_C21_each_end_token_ends(tiny_config, end):
    model = Scripted(tiny_config, ["a", end, "b"], ends=("<e5>", "<e6>", "<e7>"))
    c, _ = model.run()
    assert (c.text, c.finish_reason, c.token_ids) == ("a", "stop", [model.vocab["a"], model.vocab[end]])
    c, _ = model.run(ignore_eos=True, max_tokens=3)
    assert (c.text, c.finish_reason) == ("ab", "length")


def test_a_stop_string_may_end_with_the_very_last_character(tiny_config):
    # 0xC3 begins a character that never comes: U+FFFD at the flush, and that completes the stop string.
    c, _ = Scripted(tiny_config, ["a", "b", "<0xC3>"]).run(stop=["b\ufffd"], max_tokens=3)
    assert (c.text, c.finish_reason) == ("a", "stop")
    c, _ = Scripted(tiny_config, ["a", "b", "<0xC3>"]).run(max_tokens=3)
    assert (c.text, c.finish_reason) == ("ab\ufffd", "length")


def test_stop_token_ids_end_without_being_shown(tiny_config):
    model = Scripted(tiny_config, ["a", "b", "c"])
    c, _ = model.run(stop_token_ids=[model.vocab["b"]])
    assert (c.text, c.finish_reason) == ("a", "stop")


def by_letters(text, stops):
    """The rule itself: the text ends as soon as a stop string is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
@example(pieces=["abcd"], stops=["bcd", "c"])
def test_stop_strings_do_not_depend_on_the_cuts(pieces, stops):
    stop = StopStrings(stops)
    shown = [stop.push(piece) for piece in pieces]
    assert "".join(shown) + stop.flush() == by_letters("".join(pieces), stops)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "prompt, message", [("", "empty"), ([], "empty"), ([-1], "-1"), ([259], "259"), ([1.5], "1.5"), ([True], "True")]
)
def test_C22_C24_bad_prompts(tiny_model, step, prompt, message):
    with pytest.raises(ValueError, match=f"prompt.*{message}"):
        step.generate(tiny_model, ["fine", prompt])


def test_prompts_must_be_a_list(tiny_model):
    with pytest.raises(ValueError, match="must be a list"):
        naive_decode.generate(tiny_model, "hello")
    with pytest.raises(ValueError, match="params: 1"):
        naive_decode.generate(tiny_model, ["a", "b"], [SamplingParams()])


def test_a_padded_vocabulary_is_never_sampled(tiny_config):
    from minillm.model.weights import random_model

    model = random_model(dataclasses.replace(tiny_config, vocab_size=320))
    with torch.no_grad():
        model.head.weight[259:] *= 100  # rows beyond the tokenizer's, the likeliest by far
    params = SamplingParams(max_tokens=20, repetition_penalty=1.1)  # a penalty looks up the prompt's ids
    [c] = naive_decode.generate(model, ["abc"], params)
    assert max(c.token_ids) < 259
    with pytest.raises(ValueError, match="prompt: token id 300, must be from 0 to 258"):
        naive_decode.generate(model, [[300]], params)


def test_logprobs_are_returned_per_token(tiny_model):
    [c] = prefill_decode.generate(tiny_model, ["abc"], SamplingParams(max_tokens=5, logprobs=3))
    assert len(c.logprobs) == 5
    for token, entry in zip(c.token_ids, c.logprobs, strict=True):
        assert next(iter(entry.top)) == token and entry.top[token] == entry.logprob and len(entry.top) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("step", STEPS)
def test_logprobs_against_log_softmax(tiny_model, step, temperature):
    params = SamplingParams(max_tokens=8, temperature=temperature, top_k=5, seed=1, logprobs=0, ignore_eos=True)
    [c] = step.generate(tiny_model, ["abc"], params)
    ids = torch.tensor(c.prompt_ids + c.token_ids)
    with torch.inference_mode():
        hidden = tiny_model(ids[:-1], torch.arange(len(ids) - 1), naive_decode.NoCache())
        expected = tiny_model.logits(hidden[2:]).log_softmax(-1)  # the model's own: no temperature, no filter
    for token, entry, row in zip(c.token_ids, c.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4) and entry.top == {}


@pytest.mark.parametrize("step", STEPS)
def test_a_batch_is_its_prompts_one_by_one(tiny_model, step):
    prompts = ["abc", [1, 2, 3, 4, 5], "é"]
    params = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((1, 0.0), (7, 1.0), (12, 0.7))]
    together = step.generate(tiny_model, prompts, params)
    alone = [step.generate(tiny_model, [prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert [(c.token_ids, c.text, c.finish_reason) for c in together] == [
        (c.token_ids, c.text, c.finish_reason) for c in alone
    ]
    assert together[0].metrics.tpot_s is None and len(together[0].token_ids) == 1
    assert step.generate(tiny_model, [], params=SamplingParams()) == []


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    max_tokens=st.integers(1, 30),
    stop=st.text(st.characters(max_codepoint=0x7F), min_size=1, max_size=1),
)
def test_streamed_text_is_the_text(tiny_model, seed, max_tokens, stop):
    # A hot random model emits random bytes: split characters, bytes that are none, and stops between them.
    params = SamplingParams(max_tokens=max_tokens, temperature=9.0, seed=seed, stop=stop)
    shown = []
    [c] = prefill_decode.generate(tiny_model, ["abc"], params, on_text=shown.append)
    data = bytes(token for token in c.token_ids if token < 256)
    assert "".join(shown) == c.text == data.decode(errors="replace").split(stop)[0]


def test_latency():
    assert latency(1.0, []) == (None, None)
    assert latency(1.0, [3.0]) == (2.0, None)
    assert latency(1.0, [3.0, 4.0, 6.0]) == (2.0, 1.5)


def test_seeds_through_streaming(tiny_model):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    outputs = [s.generate(tiny_model, ["abc", "x"], params, on_text=print) for s in STEPS]
    assert all([c.token_ids for c in out] == [c.token_ids for c in outputs[0]] for out in outputs)


def test_byte_tokenizer_is_the_tiny_models(tiny_model):
    assert tiny_model.tokenizer.vocab_size == byte_tokenizer().vocab_size == tiny_model.config.vocab_size

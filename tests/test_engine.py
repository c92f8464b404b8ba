"""LLM: any two settings give the same tokens; requests come, go, fail and are aborted without touching each other."""

import contextlib
import dataclasses
import itertools
import random

import pytest
import torch

from minillm import LLM, SamplingParams, engine, naive_decode, prefill_decode
from minillm.completion import PartialCompletion
from minillm.continuous_batching import Scheduler
from minillm.cuda_graphs import DecodeGraphs
from minillm.engine import free_memory
from minillm.model.weights import random_model
from minillm.paged_attention import BlockManager, audit

PROMPTS = ["x", "four", "seven_7", "eight__8", "sixteen tokens!!", "and seventeen...."]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 11, 3, 8, 1, 12)]
SETTINGS = [
    {"batching": "static"},
    {"batching": "static", "max_num_seqs": 2},
    {"batching": "static", "num_blocks": 5},
    {"kv": "contiguous"},
    {"kv": "contiguous", "num_blocks": 4},
    {},
    {"prefix_caching": False},
    {"num_blocks": 2},
    {"num_blocks": 8, "block_size": 4, "max_num_batched_tokens": 3},
    {"num_blocks": 29, "block_size": 1, "max_num_batched_tokens": 5},
    {"max_num_seqs": 1},
    {"enable_chunked_prefill": False},
    {"enable_chunked_prefill": False, "max_model_len": 30, "max_num_batched_tokens": 30, "num_blocks": 2},
]


@pytest.fixture(scope="module")
def expected(tiny_model):
    return naive_decode.generate(tiny_model, PROMPTS, PARAMS)


def results(completions):
    return [(c.token_ids, c.text, c.finish_reason) for c in completions]


def drain(llm):
    """Step until nothing is left -> completions by request id, and the text that came in pieces."""
    completions, text = {}, {}
    while llm.has_unfinished:
        for output in llm.step():
            text[output.request_id] = text.get(output.request_id, "") + output.text
            if output.completion:
                assert output.request_id not in completions, "ended twice"
                completions[output.request_id] = output.completion
    return completions, text


def at_rest(llm):
    numbers = llm.metrics()
    assert numbers["running"] == numbers["waiting"] == 0 and not llm.has_unfinished
    if llm.kv == "paged":
        audit(llm._runner.scheduler.memory, [])
        assert numbers["blocks_used"] == 0 and numbers["blocks_free"] + numbers["blocks_cached"] == numbers["blocks"]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_law_3_any_settings(tiny_model, expected, settings):
    llm = LLM(tiny_model, **settings)
    assert results(llm.generate(PROMPTS, PARAMS)) == results(expected)
    assert results(llm.generate(PROMPTS[::-1], PARAMS[::-1])) == results(expected)[::-1], "again, with a warm cache"
    at_rest(llm)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_requests_that_come_at_any_time(tiny_model, expected, settings):
    """Some are there at the start, some come while others run; one by one through add_request and step."""
    llm, rng = LLM(tiny_model, **settings), random.Random(1)
    todo, completions, text = list(range(6)), {}, {}
    rng.shuffle(todo)
    while todo or llm.has_unfinished:
        while todo and rng.random() < 0.4:
            i = todo.pop()
            assert llm.add_request(PROMPTS[i], PARAMS[i], request_id=i) == i
        for output in llm.step():
            text[output.request_id] = text.get(output.request_id, "") + output.text
            if output.completion:
                completions[output.request_id] = output.completion
    assert results([completions[i] for i in range(6)]) == results(expected)
    assert [text[i] for i in range(6)] == [c.text for c in expected], "pieces join to the text"
    at_rest(llm)


def test_the_real_model(default_model):
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3,"]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 12, 9, 3)]
    expected = prefill_decode.generate(default_model, prompts, params)
    for settings in ({"batching": "static"}, {"kv": "contiguous"}, {"num_blocks": 2}, {}):
        out = LLM(default_model, max_model_len=128, **settings).generate(prompts, params)
        assert results(out) == results(expected)


def test_chat_and_one_prompt(tiny_model):
    llm = LLM(tiny_model)
    messages = [{"role": "user", "content": "hi"}]
    answer = llm.chat(messages, SamplingParams(max_tokens=5))
    prompt = tiny_model.tokenizer.encode_chat(messages)
    assert results([answer]) == results(naive_decode.generate(tiny_model, [prompt], SamplingParams(max_tokens=5)))
    assert [c.token_ids for c in llm.chat([messages, messages], SamplingParams(max_tokens=5))] == [answer.token_ids] * 2
    [completion] = llm.generate("four", PARAMS[1])
    assert completion.token_ids and llm.generate([]) == []


# --- streams ---


def test_streams_may_be_read_in_turn_beside_other_requests(tiny_model, expected):
    llm = LLM(tiny_model, max_num_seqs=2)
    llm.add_request(PROMPTS[5], PARAMS[5], "other")
    streams = [llm.stream(PROMPTS[i], PARAMS[i]) for i in (0, 1, 3)]
    pieces = ["", "", ""]
    for texts in itertools.zip_longest(*streams, fillvalue=""):
        pieces = [a + b for a, b in zip(pieces, texts, strict=True)]
    assert pieces == [expected[i].text for i in (0, 1, 3)]
    completions, text = drain(llm)
    assert results([completions["other"]]) == results([expected[5]]) and text["other"] == expected[5].text
    at_rest(llm)


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=12, stop=["6"]),
    SamplingParams(max_tokens=12, stop_token_ids=[54]),
    SamplingParams(max_tokens=300, ignore_eos=True, seed=3, temperature=1.5),
])  # fmt: skip
def test_stream_equals_generate_for_every_end(tiny_model, params):
    llm = LLM(tiny_model)
    [completion] = llm.generate(["abc"], params)
    assert "".join(llm.stream("abc", params)) == completion.text
    assert results([completion]) == results(naive_decode.generate(tiny_model, ["abc"], params))


def test_a_stream_that_is_closed_early_is_aborted(tiny_model):
    llm = LLM(tiny_model)
    stream = llm.stream("abc", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.metrics()["running"] == 1
    stream.close()
    assert llm.metrics()["aborted"] == 1
    at_rest(llm)


def test_a_stream_that_is_never_read_holds_nothing_up(tiny_model, expected):
    llm = LLM(tiny_model, max_num_seqs=1)
    stream = llm.stream("abc", SamplingParams(max_tokens=3, ignore_eos=True))
    assert results(llm.generate(PROMPTS, PARAMS)) == results(expected)
    assert len("".join(stream)) >= 1


# --- ends ---


@pytest.mark.parametrize("settings", [{"batching": "static"}, {"kv": "contiguous"}, {}], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_abort(tiny_model, expected, settings, steps):
    """An aborted request gives what it had; its neighbours do not notice."""
    llm = LLM(tiny_model, **settings)
    for i in (1, 5):
        llm.add_request(PROMPTS[i], PARAMS[i], i)
    llm.add_request("goes away", SamplingParams(max_tokens=50, ignore_eos=True), "victim")
    completions, outputs = {}, []
    for _ in range(steps):
        outputs += llm.step()
    assert llm.abort("victim") and not llm.abort("victim") and not llm.abort("unknown")
    completions, _ = drain(llm)
    completions |= {o.request_id: o.completion for o in outputs if o.completion}
    assert results([completions[i] for i in (1, 5)]) == results([expected[1], expected[5]])
    victim = completions["victim"]
    assert victim.finish_reason == "abort" and len(victim.token_ids) == steps
    [whole] = naive_decode.generate(tiny_model, ["goes away"], SamplingParams(max_tokens=50, ignore_eos=True))
    assert whole.token_ids[:steps] == victim.token_ids
    at_rest(llm)


def test_an_abort_within_a_step_takes_effect_after_it(tiny_model, expected):
    llm = LLM(tiny_model)

    def on_text(index, text):
        llm.abort(on_text.other)

    on_text.other = llm.add_request("goes away", SamplingParams(max_tokens=50, ignore_eos=True))
    assert results(llm.generate([PROMPTS[5]], PARAMS[5], on_text)) == results([expected[5]])
    completions, _ = drain(llm)
    assert completions[on_text.other].finish_reason == "abort"


def test_an_interrupt_leaves_nothing_behind(tiny_model, expected):
    llm = LLM(tiny_model)

    def on_text(index, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, on_text)
    at_rest(llm)
    assert llm.metrics()["aborted"] == 5, "one had ended with the first token"
    assert results(llm.generate(PROMPTS, PARAMS)) == results(expected)


@pytest.mark.parametrize("call", [2, 5, 9])
@pytest.mark.parametrize("where", ["forward", "choose", "push"])
def test_an_interrupt_within_a_step_loses_no_token(tiny_model, expected, where, call, monkeypatch):
    """Ctrl-C in the middle, and the loop goes on later: no token is missing, doubled or drawn otherwise."""
    seeded = SamplingParams(max_tokens=10, temperature=1.0, seed=3, frequency_penalty=0.5, ignore_eos=True)
    [draws] = naive_decode.generate(tiny_model, ["four"], seeded)
    owner, name = {
        "forward": (engine, "forward"), "choose": (engine, "choose_tokens"), "push": (PartialCompletion, "push"),
    }[where]  # fmt: skip
    real, calls = getattr(owner, name), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, interrupted)
    llm = LLM(tiny_model, block_size=4)
    for i in range(6):
        llm.add_request(PROMPTS[i], PARAMS[i], i)
    llm.add_request("four", seeded, "seeded")
    completions = {}
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            while llm.has_unfinished:
                completions |= {o.request_id: o.completion for o in llm.step() if o.completion}
    assert len(calls) > call, "the interrupt came in the middle"
    assert results([completions[i] for i in range(6)]) == results(expected)
    assert completions["seeded"].token_ids == draws.token_ids
    at_rest(llm)


@pytest.mark.parametrize("settings, where", [
    *itertools.product([{"kv": "contiguous"}, {}], ["forward", "sampling", "text"]),
    *itertools.product([{"batching": "static"}], ["sampling", "text"]),  # forward: the test after this one
], ids=str)  # fmt: skip
def test_a_request_fails_alone(tiny_model, expected, settings, where, monkeypatch):
    bad = list(b"bad request")
    if where == "forward":
        real = engine.forward

        def forward(model, cache, scheduled):
            if any(s.token_ids[: len(bad)] == bad and s.num_computed_tokens > 11 for s, _ in scheduled):
                raise RuntimeError("broken")
            return real(model, cache, scheduled)

        monkeypatch.setattr(engine, "forward", forward)
    elif where == "sampling":
        real = engine.choose_tokens

        def choose_tokens(model, logits, partials, *sample):
            if any(p.prompt_ids == bad and len(p.token_ids) == 2 for p in partials):
                raise RuntimeError("broken")
            return real(model, logits, partials, *sample)

        monkeypatch.setattr(engine, "choose_tokens", choose_tokens)
    else:
        real = PartialCompletion.push

        def push(self, token):
            if self.prompt_ids == bad and len(self.token_ids) == 2:
                raise RuntimeError("broken")
            return real(self, token)

        monkeypatch.setattr(PartialCompletion, "push", push)
    llm = LLM(tiny_model, **settings)
    out = llm.generate([*PROMPTS[:3], bad, *PROMPTS[3:]], [*PARAMS[:3], SamplingParams(max_tokens=9), *PARAMS[3:]])
    failed = out.pop(3)
    assert (failed.finish_reason, failed.error, len(failed.token_ids)) == ("error", "RuntimeError: broken", 2)
    assert results(out) == results(expected)
    assert llm.metrics()["failed"] == 1
    at_rest(llm)
    with pytest.raises(RuntimeError, match="broken"):
        list(llm.stream(bad, SamplingParams(max_tokens=9)))
    at_rest(llm)


def test_a_static_batch_fails_as_a_whole_and_the_next_one_runs(tiny_model, expected, monkeypatch):
    llm = LLM(tiny_model, batching="static", max_num_seqs=3)
    calls, real = [], type(tiny_model).forward

    def forward(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return real(self, *args)

    monkeypatch.setattr(type(tiny_model), "forward", forward)
    out = llm.generate(PROMPTS, PARAMS)
    assert [c.finish_reason for c in out[:3]] == ["error"] * 3 and results(out[3:]) == results(expected[3:])
    at_rest(llm)


def test_C13_a_row_whose_logits_went_nan_ends_with_an_error_and_is_forgotten(tiny_model, expected):
    """Its neighbour does not notice, and neither does the next request with the same beginning."""
    llm = LLM(tiny_model, block_size=4, max_num_batched_tokens=8)
    prompt, params = "a request that will be sick", SamplingParams(max_tokens=9, ignore_eos=True)
    llm.add_request(PROMPTS[5], PARAMS[5], "well")
    llm.add_request(prompt, params, "sick")
    for _ in range(4):
        llm.step()
    sick = next(s for s in llm._runner.scheduler.running if s.request_id == "sick")
    assert 8 <= sick.num_computed_tokens < sick.num_prompt_tokens, "some of its blocks are in the prefix cache already"
    llm._runner.cache.k[:, sick.block_table] = float("nan")
    completions, _ = drain(llm)
    assert completions["sick"].finish_reason == "error" and "no finite maximum" in completions["sick"].error
    assert results([completions["well"]]) == results([expected[5]])
    at_rest(llm)
    assert results(llm.generate([prompt], params)) == results(naive_decode.generate(tiny_model, [prompt], params))


# --- arguments ---


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batching": "dynamic"}, "batching='dynamic': must be 'continuous' or 'static'"),
        ({"kv": "virtual"}, "kv='virtual': must be 'auto' or 'paged' or 'contiguous'"),
        ({"batching": "static", "kv": "paged"}, "kv='paged': static batching keeps a rectangle"),
        ({"kv_memory_fraction": 0}, "kv_memory_fraction=0: must be above 0 and at most 1"),
        ({"num_blocks": 0}, "num_blocks=0: must be at least 1"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1: must be at least 1"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
            "max_num_batched_tokens=100: must be at least max_model_len \\(256\\) without chunked prefill",
        ),
    ],
)
def test_settings_that_are_not_allowed(tiny_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_model, **arguments)


def test_bad_requests_are_refused_before_anything_runs(tiny_model, expected):
    llm = LLM(tiny_model, num_blocks=4)
    llm.add_request(PROMPTS[1], PARAMS[1], "healthy")
    llm.step()
    for prompt in ("", [], [259], [-1], [1.5], [1] * 65):
        for call in (llm.add_request, llm.stream, lambda prompt: llm.generate(["fine", prompt])):
            with pytest.raises(ValueError, match="prompt"):
                call(prompt)
    with pytest.raises(ValueError, match="request_id='healthy': in use"):
        llm.add_request("x", request_id="healthy")
    with pytest.raises(ValueError, match="params: 2 of them for 1 prompts"):
        llm.generate(["x"], PARAMS[:2])
    completions, _ = drain(llm)
    assert list(completions) == ["healthy"] and results(completions.values()) == results([expected[1]])


def test_the_memory_ends_a_request_as_the_context_does(tiny_model):
    for settings in ({}, {"kv": "contiguous"}, {"batching": "static"}):
        llm = LLM(tiny_model, num_blocks=2, **settings)
        full, cut = llm.generate([[1] * 32, [2] * 20], SamplingParams(max_tokens=50, ignore_eos=True))
        assert (len(full.token_ids), full.finish_reason) == (0, "length")
        assert (len(cut.token_ids), cut.finish_reason) == (12, "length")


@pytest.mark.parametrize("settings", [{"batching": "static"}, {"kv": "contiguous"}, {}], ids=str)
def test_C06_the_contexts_end(tiny_config, settings):
    model = random_model(dataclasses.replace(tiny_config, max_position_embeddings=16))
    llm = LLM(model, block_size=4, **settings)
    out = llm.generate([list(range(n)) for n in (14, 15, 16)], SamplingParams(max_tokens=100, ignore_eos=True))
    assert [(len(c.token_ids), c.finish_reason) for c in out] == [(2, "length"), (1, "length"), (0, "length")]
    with pytest.raises(ValueError, match="17 tokens, must be at most the context's 16"):
        llm.generate([list(range(17))])
    at_rest(llm)


def test_the_pool_is_sized_from_memory(tiny_model, monkeypatch):
    assert LLM(tiny_model).kv_tokens == 32 * 256, "no more than the longest sequences need"
    block = 2 * 2 * 2 * 16 * 4 * 16  # bytes of 16 tokens
    monkeypatch.setattr(engine, "free_memory", lambda device: 100 * block)
    assert LLM(tiny_model, kv_memory_fraction=0.25).kv_tokens == 25 * 16
    assert LLM(tiny_model, kv_memory_fraction=0.03).max_model_len == 48, "the pool bounds the context"
    with pytest.raises(ValueError, match="kv_memory_fraction=0.001: not even a block"):
        LLM(tiny_model, kv_memory_fraction=0.001)


def test_free_memory_knows_the_containers_limit(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    (tmp_path / "max").write_text("5000\n")
    (tmp_path / "current").write_text("2000\n")
    monkeypatch.setattr(engine, "CGROUP_FILES", [(tmp_path / "max", tmp_path / "current")])
    assert free_memory(cpu) == 3000
    (tmp_path / "max").write_text("max\n")
    assert free_memory(cpu) > 10**6


# --- what can be watched and replaced ---


def test_metrics(tiny_model):
    llm = LLM(tiny_model, num_blocks=20, block_size=4, max_num_seqs=2)
    prefix = "a common beginning.."
    llm.generate([prefix], SamplingParams(max_tokens=2, ignore_eos=True))
    for text in "abc":
        llm.add_request(prefix + text, SamplingParams(max_tokens=4, ignore_eos=True))
    llm.step()
    numbers = llm.metrics()
    assert (numbers["running"], numbers["waiting"], numbers["finished"]) == (2, 1, 1)
    assert numbers["blocks"] == 20 == numbers["blocks_used"] + numbers["blocks_free"] + numbers["blocks_cached"]
    assert numbers["kv_tokens_used"] == 20 + 1 + 1 and numbers["blocks_used"] == 7, "five blocks are shared"
    completions, _ = drain(llm)
    assert [c.metrics.cached_tokens for c in completions.values()] == [20] * 3
    numbers = llm.metrics()
    assert numbers["cached_tokens"] == 60 and numbers["prompt_tokens"] == 20 + 3 * 21
    assert numbers["output_tokens"] == 2 + 12 and numbers["steps"] > 0 and numbers["step_s"] > 0


def test_the_trace_tells_each_step(tiny_model):
    for settings in ({"batching": "static"}, {"kv": "contiguous"}, {"num_blocks": 8, "block_size": 4}):
        llm = LLM(tiny_model, trace=True, **settings)
        llm.generate(PROMPTS, PARAMS)
        assert len(llm.trace) == llm.metrics()["steps"]
        if llm.batching == "continuous":
            last = {row.request_id: row.start + row.num_tokens for step in llm.trace for row in step.rows}
            assert list(last.values()) == [len(p) + s.max_tokens - 1 for p, s in zip(PROMPTS, PARAMS, strict=True)]
        preempted = [i for step in llm.trace for i in step.preempted]
        assert len(preempted) == llm.metrics()["preemptions"]
        assert bool(preempted) == ("block_size" in settings)
    assert LLM(tiny_model).trace is None


def test_a_block_manager_and_a_scheduler_of_ones_own(tiny_model, expected):
    class Mine(BlockManager):
        asked = 0

        def can_allocate(self, sequence):
            Mine.asked += 1
            return super().can_allocate(sequence)

    class Last(Scheduler):
        def add(self, sequence):
            super().add(sequence)
            self.waiting.rotate()  # last come, first served

    llm = LLM(tiny_model, block_manager=Mine, scheduler=Last, max_num_seqs=1)
    ends = []
    for i in range(6):
        llm.add_request(PROMPTS[i], PARAMS[i], i)
    while llm.has_unfinished:
        ends += [output for output in llm.step() if output.completion]
    assert Mine.asked >= 6 and [output.request_id for output in ends] == [5, 4, 3, 2, 1, 0]
    assert results([output.completion for output in ends]) == results(expected)[::-1]


@pytest.mark.parametrize("num_blocks", [9, 100])
def test_decode_in_padded_buckets_gives_the_same_tokens(tiny_model, expected, num_blocks):
    """What CUDA graphs record, run without a graph: fixed shapes, batch and table padded to powers of two."""
    llm = LLM(tiny_model, num_blocks=num_blocks, block_size=4)
    llm._runner.graphs = DecodeGraphs(tiny_model, llm._runner.cache)
    llm._runner.cache.k.fill_(float("nan"))
    llm._runner.cache.v.fill_(float("nan"))
    assert results(llm.generate(PROMPTS, PARAMS)) == results(expected)
    sizes = llm._runner.graphs._passes
    assert len(sizes) > 2 and all(B & (B - 1) == W & (W - 1) == 0 for B, W in sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_give_the_tokens_of_the_same_passes_without(tiny_config):
    model = random_model(tiny_config, dtype=torch.float32).to("cuda")
    with_graphs, without = LLM(model), LLM(model)
    without._runner.graphs = None
    assert results(with_graphs.generate(PROMPTS, PARAMS)) == results(without.generate(PROMPTS, PARAMS))

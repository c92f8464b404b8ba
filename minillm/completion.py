"""What all steps share around their loop: the prompt's checks, the end of a completion, its text and its times.

A step is a generator of tokens that would go on for ever. `complete` draws from it until one of the ends comes:
an end token, a stop string, max_tokens or the context's last position. So the file of a step holds its idea and
nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .model.llama import Llama
from .model.sampling import SamplingParams, TokenLogprobs, sample, token_logprobs

# (model, prompt_ids, cache, choose) -> tokens, without end; choose: logits [1, vocab] -> token id
DecodeLoop = Callable[[Llama, list[int], object, Callable[[Tensor], int]], Iterator[int]]


@dataclass(frozen=True)
class Metrics:
    ttft_s: float | None  # time to first token, seconds; None without a token
    tpot_s: float | None  # time per output token after the first, seconds; None with fewer than two
    tokens_per_s: float  # output tokens over the whole time
    kv_bytes: int  # bytes of keys and values held at the end


@dataclass(frozen=True)
class Completion:
    prompt_ids: list[int]
    token_ids: list[int]  # the output, the token that ended it included
    text: str  # without end tokens and without the stop string
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens or the context's end
    metrics: Metrics
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for


class StopStrings:
    """Lets text through until the first stop string is complete; holds back what may become one.

    With stop "DEFG" and one letter per push, "ABCDEFX" must come out whole and "ABCDEFGH" as "ABC": so D, E and
    F wait until the next letter decides. Where several stop strings overlap, the one that is complete first ends
    the text, of those the one that starts first: the outcome is the same however the text is cut into pushes.

    >>> stops = StopStrings(["is i"])
    >>> [stops.push(piece) for piece in ("Par", "is is", " nice")], stops.stopped
    (['Par', '', ''], True)
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.held = ""  # may be the beginning of a stop string
        self.stopped = False

    def push(self, text: str) -> str:
        """Text in, text that is certain to be shown out; nothing after a stop."""
        if self.stopped:
            return ""
        text = self.held + text
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)[1]]
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        keep = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The output has ended otherwise: what was held back is text after all."""
        text, self.held = self.held, ""
        return text

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self.stops)


def latency(arrival_s: float, token_times_s: Sequence[float]) -> tuple[float | None, float | None]:
    """TTFT and TPOT from timestamps, all in seconds on one clock.

    TTFT: from arrival to the first token. TPOT: mean gap between tokens after the first; the first is left out
    since it pays for the prompt. None for what the tokens do not suffice for.

    >>> latency(10.0, [10.5, 10.75, 11.0])
    (0.5, 0.25)
    """
    if not token_times_s:
        return None, None
    ttft = token_times_s[0] - arrival_s
    gaps = len(token_times_s) - 1
    return ttft, (token_times_s[-1] - token_times_s[0]) / gaps if gaps else None


def encode_prompt(model: Llama, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt given as text or as ids. ValueError where it is empty, longer than the context or
    holds an id that is no token."""
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    # A padded vocabulary has rows that are no token: as an input they mean as little as in `choose`.
    limit, vocab = model.config.max_position_embeddings, model.tokenizer.vocab_size
    if not ids:
        raise ValueError(f"prompt={prompt!r}: empty, must be at least one token")
    if len(ids) > limit:
        raise ValueError(f"prompt: {len(ids)} tokens, must be at most the context's {limit}")
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab:
            raise ValueError(f"prompt: token id {i!r}, must be from 0 to {vocab - 1}")
    return ids


def complete(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    loop: DecodeLoop,
    make_cache: Callable[[int], object],
    on_text: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Run prompts through a step's loop, one after the other.

    make_cache(capacity) gives a cache for `capacity` tokens; `on_text` gets the text as it comes. ValueError
    for a bad prompt, before anything has run.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts: a string, must be a list of prompts")
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"params: {len(params)} of them for {len(prompts)} prompts")
    encoded = [encode_prompt(model, prompt) for prompt in prompts]
    return [_complete_one(model, ids, p, loop, make_cache, on_text) for ids, p in zip(encoded, params, strict=True)]


def _complete_one(model, prompt_ids, params, loop, make_cache, on_text) -> Completion:
    arrival, times = time.perf_counter(), []
    # Prompt and output together fill the context at most: a prompt that fills it gets no token at all.
    max_tokens = min(params.max_tokens, model.config.max_position_embeddings - len(prompt_ids))
    cache = make_cache(len(prompt_ids) + max_tokens)
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []

    def choose(logits: Tensor) -> int:
        logits = logits[:, : model.tokenizer.vocab_size]  # a padded vocabulary has rows that mean nothing
        [token] = sample(logits, [params], [prompt_ids], [output])
        if params.logprobs is not None:
            logprobs.append(token_logprobs(logits[0], token, params.logprobs))
        return token

    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.config.eos_token_ids))
    detokenizer, stops = model.tokenizer.detokenizer(prompt_ids), StopStrings(params.stop)
    text, finish_reason = [], "length"

    def show(delta: str) -> None:
        text.append(delta)
        if on_text and delta:
            on_text(delta)

    for token in loop(model, prompt_ids, cache, choose) if max_tokens else ():
        times.append(time.perf_counter())
        output.append(token)
        if token not in ends:
            show(stops.push(detokenizer.push(token)))
        if token in ends:
            finish_reason = "stop"
        if token in ends or stops.stopped or len(output) == max_tokens:
            break
    show(stops.push(detokenizer.flush()))
    show(stops.flush())
    if stops.stopped:  # by the very last character, perhaps
        finish_reason = "stop"
    ttft, tpot = latency(arrival, times)
    elapsed = times[-1] - arrival if times else 0.0
    metrics = Metrics(ttft, tpot, len(output) / elapsed if elapsed else 0.0, cache.kv_bytes)
    return Completion(prompt_ids, output, "".join(text), finish_reason, metrics, logprobs)

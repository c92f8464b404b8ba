"""What all steps share around their loop: the prompt's checks, the end of a completion, its text and its times.

A step chooses tokens and would go on for ever. `PartialCompletion` takes them until one of the ends comes: an end
token, a stop string, max_tokens or the context's last position. So the file of a step holds its idea and nothing
else. `complete` is the loop around the steps that run one prompt at a time.
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
    cached_tokens: int = 0  # prompt tokens that a prefix cache had (step 6)
    preemptions: int = 0  # times that it had to give its memory back and begin again (step 6)


@dataclass(frozen=True)
class Completion:
    prompt_ids: list[int]
    token_ids: list[int]  # the output, the token that ended it included
    text: str  # without end tokens and without the stop string
    # "stop": an end token or a stop string; "length": max_tokens or the context's end; in the engine also "abort",
    # and "error": what went wrong with this request is in `error`
    finish_reason: str
    metrics: Metrics
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    error: str | None = None


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


def encode_prompt(model: Llama, prompt: str | Sequence[int], context: int | None = None) -> list[int]:
    """Token ids of a prompt given as text or as ids. ValueError where it is empty, longer than the context or
    holds an id that is no token."""
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    # A padded vocabulary has rows that are no token: as an input they mean as little as in `choose`.
    limit = model.config.max_position_embeddings if context is None else context
    vocab = model.tokenizer.vocab_size
    if not ids:
        raise ValueError(f"prompt={prompt!r}: empty, must be at least one token")
    if len(ids) > limit:
        raise ValueError(f"prompt: {len(ids)} tokens, must be at most the context's {limit}")
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab:
            raise ValueError(f"prompt: token id {i!r}, must be from 0 to {vocab - 1}")
    return ids


class PartialCompletion:
    """A completion in the making: takes token after token, gives text, knows when it has ended.

    context: prompt and output together are at most this many tokens (by default what the model was trained for), so
    a prompt that fills it gets no token at all.
    """

    def __init__(self, model: Llama, prompt_ids: list[int], params: SamplingParams, context: int | None = None):
        self.arrival_s = time.perf_counter()
        self.prompt_ids, self.params = prompt_ids, params
        context = model.config.max_position_embeddings if context is None else context
        self.max_tokens = max(0, min(params.max_tokens, context - len(prompt_ids)))
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish_reason = None if self.max_tokens else "length"  # None: goes on
        self.error: str | None = None
        self._times: list[float] = []
        self._ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.config.eos_token_ids))
        self._detokenizer, self._stops = model.tokenizer.detokenizer(prompt_ids), StopStrings(params.stop)

    def push(self, token: int) -> str:
        """Take the next token -> the text that has become certain."""
        self._times.append(time.perf_counter())
        self.token_ids.append(token)
        text = "" if token in self._ends else self._stops.push(self._detokenizer.push(token))
        self.text += text
        if token in self._ends or self._stops.stopped:
            return text + self.end("stop")
        if len(self.token_ids) == self.max_tokens:
            return text + self.end("length")
        return text

    def end(self, reason: str, error: str | None = None) -> str:
        """No token comes any more -> the text that was held back."""
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self.text += text
        self.finish_reason = "stop" if self._stops.stopped else reason  # by the very last character, perhaps
        self.error = error
        return text

    def completion(self, kv_bytes: int, **counts: int) -> Completion:
        """What came out. `counts` are Metrics' further fields."""
        ttft, tpot = latency(self.arrival_s, self._times)
        elapsed = self._times[-1] - self.arrival_s if self._times else 0.0
        tokens_per_s = len(self.token_ids) / elapsed if elapsed else 0.0
        metrics = Metrics(ttft, tpot, tokens_per_s, kv_bytes, **counts)
        return Completion(
            self.prompt_ids, self.token_ids, self.text, self.finish_reason, metrics, self.logprobs, self.error
        )


def choose_tokens(
    model: Llama,
    logits: Tensor,
    partials: Sequence[PartialCompletion],
    sample: Callable[..., list[int]] = sample,
) -> list[int]:
    """The next token of each completion, by its own parameters. logits [M, vocab] -> M token ids. `sample`: that of
    model/sampling.py, or one with its arguments."""
    logits = logits[:, : model.tokenizer.vocab_size]  # a padded vocabulary has rows that mean nothing
    params = [p.params for p in partials]
    tokens = sample(logits, params, [p.prompt_ids for p in partials], [p.token_ids for p in partials])
    asked = [row for row, p in enumerate(params) if p.logprobs is not None]
    logprobs = [token_logprobs(logits[row], tokens[row], params[row].logprobs) for row in asked]
    for row, entry in zip(asked, logprobs, strict=True):  # last: a call that fails has noted nothing
        partials[row].logprobs.append(entry)
    return tokens


def prepare(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    context: int | None = None,
) -> list[PartialCompletion]:
    """Prompts, each with its parameters -> completions that can begin. ValueError for a bad one, before anything
    has run."""
    if isinstance(prompts, str):
        raise ValueError("prompts: a string, must be a list of prompts")
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"params: {len(params)} of them for {len(prompts)} prompts")
    encoded = [encode_prompt(model, prompt, context) for prompt in prompts]
    return [PartialCompletion(model, ids, p, context) for ids, p in zip(encoded, params, strict=True)]


def complete(
    model: Llama,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    loop: DecodeLoop,
    make_cache: Callable[[int], object],
    on_text: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Run prompts through the loop of a step that takes one at a time.

    make_cache(capacity) gives a cache for `capacity` tokens; `on_text` gets the text as it comes. ValueError
    for a bad prompt, before anything has run.
    """
    completions = []
    for partial in prepare(model, prompts, params):
        partial.arrival_s = time.perf_counter()  # its turn has come: the wait for those before it is not counted
        cache = make_cache(len(partial.prompt_ids) + partial.max_tokens)

        def choose(logits: Tensor, partial=partial) -> int:
            return choose_tokens(model, logits, [partial])[0]

        for token in loop(model, partial.prompt_ids, cache, choose) if partial.max_tokens else ():
            text = partial.push(token)
            if on_text and text:
                on_text(text)
            if partial.finish_reason:
                break
        completions.append(partial.completion(cache.kv_bytes))
    return completions

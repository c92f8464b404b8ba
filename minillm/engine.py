"""`LLM`: the steps put together, each one switchable, so that any two settings can be compared on the same requests.

Nothing is computed here that a step does not compute already. What an engine adds: requests that come at any time and
are answered as they go, memory sized from the machine, a request that fails alone, numbers to watch, and on a GPU
decode passes recorded as CUDA graphs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from .completion import Completion, PartialCompletion, choose_tokens, encode_prompt, prepare
from .continuous_batching import Scheduler, Sequence, SlotCache, SlotManager, forward, run_step, trace_step
from .cuda_graphs import DecodeGraphs
from .kernels.llama import KernelCache, KernelLlama, resolve_kernels
from .kernels.llama import sample as kernel_sample
from .kv_cache import kv_bytes
from .model.llama import Llama
from .model.sampling import SamplingParams, sample
from .model.weights import DEFAULT_MODEL, load_model
from .paged_attention import DEFAULT_BLOCK_SIZE, BlockManager, PagedCache, num_blocks_for
from .quantization import MODES, Int8PagedCache, int8_kv_bytes, quantize_model
from .static_batching import PAD, StaticBatch
from .trace import StepTrace


@dataclass(frozen=True)
class RequestOutput:
    """What a step brought to one request."""

    request_id: Hashable
    text: str  # text that has become certain, perhaps none
    token_ids: list[int]  # the step's new token, if it got one
    completion: Completion | None  # when the request has ended


@dataclass(eq=False)
class Request:
    sequence: Sequence
    partial: PartialCompletion
    outputs: deque[RequestOutput] | None = None  # of a request that somebody waits for; None: `step` returns them


class LLM:
    """A model that answers many requests at once.

    model: what `load_model` takes, or a model that it gave. device: "auto" (CUDA, else Apple's MPS, else CPU) or a
    device's name. dtype: "auto" (bfloat16 where the hardware is fast at it, else float32) or its name.

    batching: "continuous" (step 5), or "static" (step 4: a batch starts and ends together). kv: "paged" (step 6) or
    "contiguous"; "auto" is paged, but contiguous for static batching, whose rectangle it is.
    prefix_caching: share the blocks of prompts that begin alike (paged only). enable_chunked_prefill: cut long prompts.

    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens of a pass (default 512; without chunked
    prefill what the longest sequence needs). max_model_len: prompt and output together, at most (default: the model's
    context). Memory for keys and values is `kv_memory_fraction` of what is free once the model is loaded, at most
    what max_num_seqs of the longest sequences need; num_blocks, of block_size tokens each, overrides it. Contiguous
    and static get the same memory.

    quantize: "int8" (int8 weights, W8A16) or "w8a8" (activations too), step 8; a model that is given stays as it is.
    kv_dtype: "int8" keeps keys and values in int8 (paged only), so that the same memory holds about twice the tokens.

    kernels: "torch", or "cuda": passes run on the handwritten kernels of step 7, on a CPU in their simulator (slow).
    "auto" is "cuda" on a GPU, and torch with a warning where the kernels cannot be built.

    block_manager, scheduler: classes to use instead of this package's (a student's, say). trace: keep a record of each
    step in `.trace`. ValueError for a setting that is not allowed, by its name.
    """

    def __init__(
        self,
        model: str | Path | Llama = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        batching: str = "continuous",
        kv: str = "auto",
        prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        kv_memory_fraction: float = 0.5,
        num_blocks: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        quantize: str | None = None,
        kv_dtype: str | None = None,
        kernels: str = "auto",
        block_manager: type = BlockManager,
        scheduler: type = Scheduler,
        trace: bool = False,
    ):
        _check_choice("batching", batching, ("continuous", "static"))
        _check_choice("kv", kv, ("auto", "paged", "contiguous"))
        if batching == "static" and kv == "paged":
            raise ValueError("kv='paged': static batching keeps a rectangle, must be 'contiguous' or 'auto'")
        if not 0 < kv_memory_fraction <= 1:
            raise ValueError(f"kv_memory_fraction={kv_memory_fraction!r}: must be above 0 and at most 1")
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
                 "max_model_len": max_model_len, "num_blocks": num_blocks, "block_size": block_size}  # fmt: skip
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")

        _check_choice("kernels", kernels, ("auto", "torch", "cuda"))
        if batching == "static" and kernels == "cuda":
            raise ValueError("kernels='cuda': no kernel reads static batching's rectangle, must be 'torch' or 'auto'")

        if quantize is not None:
            _check_choice("quantize", quantize, MODES)
        self.kv = ("paged" if batching == "continuous" else "contiguous") if kv == "auto" else kv
        if kv_dtype is not None:
            _check_choice("kv_dtype", kv_dtype, ("auto", "int8"))
        self.kv_dtype = None if kv_dtype == "auto" else kv_dtype
        if self.kv_dtype == "int8" and self.kv != "paged":
            raise ValueError("kv_dtype='int8': only with kv='paged', must be 'auto' here")

        self.model = model if isinstance(model, Llama) else load_model(model, dtype, device)
        if quantize:
            self.model = quantize_model(self.model, quantize)
        self.batching = batching
        self.kernels = "torch" if batching == "static" else resolve_kernels(kernels, self.model)
        self._sample = kernel_sample if self.kernels == "cuda" else sample
        self.max_num_seqs = max_num_seqs
        context = self.model.config.max_position_embeddings
        self.max_model_len = context if max_model_len is None else min(max_model_len, context)
        if num_blocks is None:
            num_blocks = self._blocks_from_memory(kv_memory_fraction, block_size)
        self.kv_tokens = num_blocks * block_size  # that the memory for keys and values can hold
        self.max_model_len = min(self.max_model_len, self.kv_tokens)

        self._requests: dict[Hashable, Request] = {}  # that have not ended
        self._outputs: list[RequestOutput] = []  # of requests that nobody waits for
        self._aborts: list[Hashable] = []  # to be applied when the step under way is through
        self._stepping = False
        self._ids = count()
        self._counts: Counter[str] = Counter()
        self.trace: list[StepTrace] | None = [] if trace else None
        if batching == "static":
            self._runner = StaticRunner(self)
            return
        if self.kv == "paged":
            size, cache_type = (num_blocks, block_size), Int8PagedCache if self.kv_dtype == "int8" else PagedCache
            memory = block_manager(*size, prefix_caching)
        else:
            size, cache_type = (min(self.kv_tokens // self.max_model_len, max_num_seqs), self.max_model_len), SlotCache
            memory = SlotManager(*size)
        needed = 1 if enable_chunked_prefill else self.max_model_len
        budget = max(512, needed) if max_num_batched_tokens is None else max_num_batched_tokens
        if budget < needed:
            raise ValueError(
                f"max_num_batched_tokens={budget}: must be at least max_model_len ({needed}) without chunked prefill"
            )
        cache = cache_type(self.model.config, *size, self.model.dtype, self.model.device)
        self._runner = ContinuousRunner(self, scheduler(memory, max_num_seqs, budget, enable_chunked_prefill), cache)

    def _blocks_from_memory(self, fraction: float, block_size: int) -> int:
        block_bytes = self.kv_bytes(block_size)
        enough = self.max_num_seqs * num_blocks_for(self.max_model_len, block_size)
        blocks = min(int(fraction * free_memory(self.model.device)) // block_bytes, enough)
        if blocks < 1:
            raise ValueError(f"kv_memory_fraction={fraction}: not even a block of {block_bytes} bytes fits")
        return blocks

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of keys and values of `num_tokens` tokens."""
        if self.kv_dtype == "int8":
            return int8_kv_bytes(self.model.config, num_tokens)
        return kv_bytes(self.model.config, num_tokens, self.model.dtype)

    # --- one call, all answers ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | list[str | list[int]],
        params: SamplingParams | list[SamplingParams] = SamplingParams(),
        on_text: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete the prompts (one string counts as a list of one) -> a Completion each, in their order.

        `on_text(index of the prompt, text)` gets the text as it comes. A progress bar is shown on a terminal.
        ValueError for a bad prompt, before anything has run. What goes wrong later ends that request alone, with
        finish_reason "error". If the call is interrupted, its requests are aborted.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        partials = prepare(self.model, prompts, params, self.max_model_len)
        requests: list[Request] = []
        completions: dict[int, Completion] = {}
        try:
            for partial in partials:
                requests.append(self._add(partial, self._new_id(), wait=True))
            with tqdm(total=len(requests), unit="prompt", disable=None if use_tqdm else True) as bar:
                while len(completions) < len(requests):
                    for index, request in enumerate(requests):
                        for output in self._take(request):
                            if on_text and output.text:
                                on_text(index, output.text)
                            if output.completion:
                                completions[index] = output.completion
                                bar.update()
                    if len(completions) < len(requests):
                        self._step()
        finally:
            for request in requests:
                self.abort(request.sequence.request_id)
        return [completions[index] for index in range(len(requests))]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        params: SamplingParams | list[SamplingParams] = SamplingParams(max_tokens=256),
        on_text: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> Completion | list[Completion]:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...] -> Completion; or a list of them -> list."""
        one = not messages or isinstance(messages[0], dict)
        prompts = [self.model.tokenizer.encode_chat(m) for m in ([messages] if one else messages)]
        completions = self.generate(prompts, params, on_text, use_tqdm)
        return completions[0] if one else completions

    def stream(
        self, prompt: str | list[int] | list[dict], params: SamplingParams = SamplingParams(max_tokens=256)
    ) -> Iterator[str]:
        """Complete a prompt (text, token ids, or a conversation) -> pieces of text as they come, whole characters only.

        Several streams may be read in turn. One that is closed early is aborted. RuntimeError if the request fails.
        """
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            prompt = self.model.tokenizer.encode_chat(prompt)
        [partial] = prepare(self.model, [prompt], params, self.max_model_len)  # a bad one is said now, not when read
        return self._stream(self._add(partial, self._new_id(), wait=True))

    def _stream(self, request: Request) -> Iterator[str]:
        try:
            while True:
                for output in self._take(request):
                    if output.text:
                        yield output.text
                    if output.completion:
                        if output.completion.error:
                            raise RuntimeError(output.completion.error)
                        return
                self._step()
        finally:
            self.abort(request.sequence.request_id)

    # --- step by step ---------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams = SamplingParams(),
        request_id: Hashable | None = None,
    ) -> Hashable:
        """Queue a prompt -> its id. What comes of it is returned by `step`. ValueError for a bad prompt or an id that
        is in use."""
        request_id = self._new_id() if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: in use, must be another one")
        ids = encode_prompt(self.model, prompt, self.max_model_len)
        self._add(PartialCompletion(self.model, ids, params, self.max_model_len), request_id)
        return request_id

    @property
    def has_unfinished(self) -> bool:
        """Is there anything for `step` to do or to tell?"""
        return bool(self._requests or self._outputs)

    def step(self) -> list[RequestOutput]:
        """Run one pass -> what it brought to the requests of `add_request`, and what came to them since the last."""
        if self._requests:
            self._step()
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, request_id: Hashable) -> bool:
        """Stop a request: what it has so far comes out with finish_reason "abort". Takes effect between two steps, at
        once if none is under way. False if there is no such request, or it has ended."""
        if request_id not in self._requests:
            return False
        self._aborts.append(request_id)
        if not self._stepping:
            self._apply_aborts()
        return True

    def metrics(self) -> dict[str, float | int]:
        """Numbers to watch: requests by state, tokens so far, memory now."""
        counts = ("finished", "aborted", "failed", "steps", "preemptions", "prompt_tokens", "cached_tokens",
                  "output_tokens")  # fmt: skip
        numbers = {name: self._counts[name] for name in counts}
        numbers["step_s"] = self._counts["step_s"]  # seconds spent in steps
        return numbers | {"kv_tokens": self.kv_tokens} | self._runner.usage()

    # --- inside ---------------------------------------------------------------------------------------------

    def _add(self, partial: PartialCompletion, request_id: Hashable, wait: bool = False) -> Request:
        sequence = Sequence(request_id, list(partial.prompt_ids), partial.max_tokens)
        request = Request(sequence, partial, deque() if wait else None)
        self._requests[request_id] = request
        if partial.finish_reason:  # the prompt fills the context
            self._emit(request, "")
        else:
            try:
                self._runner.add(request)
            except ValueError:
                del self._requests[request_id]
                raise
        self._counts["prompt_tokens"] += len(partial.prompt_ids)
        return request

    def _new_id(self) -> int:
        return next(i for i in self._ids if i not in self._requests)

    def _take(self, request: Request) -> Iterator[RequestOutput]:
        while request.outputs:
            yield request.outputs.popleft()

    def _emit(self, request: Request, text: str, token: int | None = None) -> None:
        """Hand out what a request got; if it has ended, for the last time."""
        partial, sequence, completion = request.partial, request.sequence, None
        if partial.finish_reason:
            completion = partial.completion(
                self._runner.kv_bytes(request),
                cached_tokens=sequence.num_cached_tokens,
                preemptions=sequence.num_preemptions,
            )
            outcome = {"abort": "aborted", "error": "failed"}.get(partial.finish_reason, "finished")
            self._counts[outcome] += 1
            del self._requests[sequence.request_id]
        output = RequestOutput(sequence.request_id, text, [] if token is None else [token], completion)
        (self._outputs if request.outputs is None else request.outputs).append(output)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request from outside: aborted, or failed."""
        text = request.partial.end(reason, error)
        self._runner.remove(request, reason)
        self._emit(request, text)

    def _fail(self, request: Request, error: Exception) -> None:
        self._end(request, "error", f"{type(error).__name__}: {error}")

    def _apply_aborts(self) -> None:
        while self._aborts:
            request = self._requests.get(self._aborts.pop())
            if request:
                self._end(request, "abort")

    def _step(self) -> None:
        began = time.perf_counter()
        self._stepping = True
        try:
            for request, token in self._runner.step():
                self._push(request, token)
        finally:
            self._stepping = False
            self._apply_aborts()
            self._counts["steps"] += 1
            self._counts["step_s"] += time.perf_counter() - began

    def _push(self, request: Request, token: int) -> None:
        """A new token for a request."""
        try:
            text = request.partial.push(token)
        except Exception as error:
            return self._fail(request, error)
        self._counts["output_tokens"] += 1
        if request.partial.finish_reason:
            self._runner.remove(request, request.partial.finish_reason)
        self._emit(request, text, token)

    def _choose(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """The next token of each; a request whose choice fails ends with an error, and PAD stands in its place."""
        try:
            return choose_tokens(self.model, logits, [request.partial for request in requests], self._sample)
        except Exception:
            pass
        tokens = []
        for row, request in enumerate(requests):
            try:
                tokens += choose_tokens(self.model, logits[row : row + 1], [request.partial], self._sample)
            except Exception as error:
                tokens.append(PAD)
                self._fail(request, error)
        return tokens


class ContinuousRunner:
    """Steps 5 and 6: a scheduler over a memory, and the cache that goes with it."""

    def __init__(self, llm: LLM, scheduler: Scheduler, cache: SlotCache | PagedCache):
        self.llm, self.scheduler, self.cache, self.model = llm, scheduler, cache, llm.model
        if llm.kernels == "cuda":
            self.cache, self.model = KernelCache(cache), KernelLlama(llm.model)
        on_gpu = llm.model.device.type == "cuda" and llm.kv == "paged"
        self.graphs = DecodeGraphs(self.model, self.cache) if on_gpu else None

    def add(self, request: Request) -> None:
        self.scheduler.add(request.sequence)

    def remove(self, request: Request, reason: str) -> None:
        if reason == "abort":
            self.scheduler.abort(request.sequence)
        else:
            self.scheduler.finish(request.sequence, reason)

    def step(self) -> list[tuple[Request, int]]:
        """One pass -> new tokens."""
        if late := self._not_pushed():
            return late
        if not self.scheduler.has_unfinished:
            return []
        llm, began = self.llm, time.perf_counter()
        try:
            step, new = run_step(
                self.scheduler,
                self._forward,
                lambda logits, ready: llm._choose(logits, [llm._requests[s.request_id] for s in ready]),
            )
        except BaseException:  # Ctrl-C after a pass and before its tokens were chosen: last tokens are run again
            for sequence in self.scheduler.running:
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
            raise
        llm._counts["preemptions"] += len(step.preempted)
        if llm.trace is not None:
            llm.trace.append(trace_step(step, self.scheduler, time.perf_counter() - began))
        for sequence, _ in new:
            if sequence.num_tokens == sequence.num_prompt_tokens + 1:
                llm._counts["cached_tokens"] += sequence.num_cached_tokens
        return [(llm._requests[s.request_id], token) for s, token in new if s.request_id in llm._requests]

    def _not_pushed(self) -> list[tuple[Request, int]]:
        """Tokens that were chosen when Ctrl-C came, and have not reached their requests."""
        requests = [self.llm._requests[s.request_id] for s in self.scheduler.running]
        had = [(r, r.sequence.num_prompt_tokens + len(r.partial.token_ids)) for r in requests]
        return [(r, r.sequence.token_ids[n]) for r, n in had if n < r.sequence.num_tokens]

    def _forward(self, scheduled: list[tuple[Sequence, int]]) -> Tensor:
        """One pass -> logits. If it fails, each sequence is run alone, and those that fail again end with an error."""
        try:
            return self._pass(scheduled)
        except Exception:
            logits = [torch.empty(0, self.llm.model.config.vocab_size, device=self.llm.model.device)]
        for sequence, num_tokens in list(scheduled):
            try:
                logits.append(self._pass([(sequence, num_tokens)]))
            except Exception as error:
                scheduled.remove((sequence, num_tokens))  # the step goes on without it
                self.llm._fail(self.llm._requests[sequence.request_id], error)
        return torch.cat(logits)

    def _pass(self, scheduled: list[tuple[Sequence, int]]) -> Tensor:
        if self.graphs and self.graphs.can_run(scheduled):
            return self.graphs.run(scheduled)
        return forward(self.model, self.cache, scheduled)

    def kv_bytes(self, request: Request) -> int:
        return self.llm.kv_bytes(request.sequence.num_computed_tokens)

    def usage(self) -> dict[str, int]:
        usage = self.scheduler.memory.usage(self.scheduler.running)
        cached = len(usage.get("cached", ()))
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_tokens_allocated": usage["kv_allocated"],
            "kv_tokens_used": usage["kv_used"],
            "blocks": usage["num_blocks"],
            "blocks_used": len(usage["owners"]),
            "blocks_cached": cached,
            "blocks_free": usage["num_blocks"] - len(usage["owners"]) - cached,
        }


class StaticRunner:
    """Step 4: a queue, and one rectangle at a time from it."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.queue: deque[Request] = deque()
        self.rows: list[Request] = []
        self.batch: StaticBatch | None = None

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def remove(self, request: Request, reason: str) -> None:
        if request in self.queue:  # a row of the rectangle stays in it to the end
            self.queue.remove(request)

    def step(self) -> list[tuple[Request, int]]:
        """One pass -> new tokens."""
        if self.batch is None or self.batch.done:
            self._start_batch()
        llm, began = self.llm, time.perf_counter()
        try:
            new = self.batch.step()
        except Exception as error:  # one rectangle: it fails as a whole
            for request in self.rows:
                if not request.partial.finish_reason:
                    llm._fail(request, error)
            return []
        if llm.trace is not None:
            ids = [request.sequence.request_id for request in self.rows]
            llm.trace.append(self.batch.trace(ids, time.perf_counter() - began))
        return [(self.rows[row], token) for row, token in new if not self.rows[row].partial.finish_reason]

    def _start_batch(self) -> None:
        """Take from the queue what fits a rectangle in the memory, at least one."""
        rows, width, new = [], 0, 0
        while self.queue and len(rows) < self.llm.max_num_seqs:
            partial = self.queue[0].partial
            width, new = max(width, len(partial.prompt_ids)), max(new, partial.max_tokens)
            if rows and (len(rows) + 1) * (width + new) > self.llm.kv_tokens:
                break
            rows.append(self.queue.popleft())

        def choose(model: Llama, logits: Tensor, partials: list[PartialCompletion]) -> list[int]:
            return self.llm._choose(logits, [request for request in rows if request.partial in partials])

        self.rows, self.batch = rows, StaticBatch(self.llm.model, [request.partial for request in rows], choose)

    def kv_bytes(self, request: Request) -> int:
        return self.batch.kv_bytes_per_row if request in self.rows else 0

    def usage(self) -> dict[str, int]:
        return {"running": len(self.llm._requests) - len(self.queue), "waiting": len(self.queue)}


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: of the GPU, or of the machine, or of the container that this runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    for limit, usage in CGROUP_FILES:
        try:
            available = min(available, int(limit.read_text()) - int(usage.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, available)


CGROUP_FILES = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be {' or '.join(map(repr, allowed))}")

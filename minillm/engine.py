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
from .kv_cache import kv_bytes
from .model.llama import Llama
from .model.sampling import SamplingParams
from .model.weights import DEFAULT_MODEL, load_model
from .paged_attention import DEFAULT_BLOCK_SIZE, BlockManager, PagedCache, num_blocks_for, slot_mapping
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
    kv_bytes: int = 0


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

        self.model = model if isinstance(model, Llama) else load_model(model, dtype, device)
        self.batching = batching
        self.kv = ("paged" if batching == "continuous" else "contiguous") if kv == "auto" else kv
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
            self._queue: deque[Request] = deque()
            self._batch: StaticBatch | None = None
            self._rows: list[Request] = []  # of the batch
            return
        if self.kv == "paged":
            memory = block_manager(num_blocks, block_size, prefix_caching)
            self.cache = PagedCache(self.model.config, num_blocks, block_size, self.model.dtype, self.model.device)
        else:
            num_slots = min(self.kv_tokens // self.max_model_len, max_num_seqs)
            memory = SlotManager(num_slots, self.max_model_len)
            self.cache = SlotCache(
                self.model.config, num_slots, self.max_model_len, self.model.dtype, self.model.device
            )
        needed = 1 if enable_chunked_prefill else self.max_model_len
        budget = max(512, needed) if max_num_batched_tokens is None else max_num_batched_tokens
        if budget < needed:
            raise ValueError(
                f"max_num_batched_tokens={budget}: must be at least max_model_len ({needed}) without chunked prefill"
            )
        self.scheduler = scheduler(memory, max_num_seqs, budget, enable_chunked_prefill)
        on_gpu = self.model.device.type == "cuda" and self.kv == "paged"
        self._graphs = DecodeGraphs(self.model, self.cache) if on_gpu else None

    def _blocks_from_memory(self, fraction: float, block_size: int) -> int:
        block_bytes = kv_bytes(self.model.config, block_size, self.model.dtype)
        enough = self.max_num_seqs * num_blocks_for(self.max_model_len, block_size)
        blocks = min(int(fraction * free_memory(self.model.device)) // block_bytes, enough)
        if blocks < 1:
            raise ValueError(f"kv_memory_fraction={fraction}: not even a block of {block_bytes} bytes fits")
        return blocks

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
        numbers["kv_tokens"] = self.kv_tokens
        if self.batching == "static":
            return numbers | {"running": len(self._requests) - len(self._queue), "waiting": len(self._queue)}
        usage = self.scheduler.memory.usage(self.scheduler.running)
        return numbers | {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_tokens_allocated": usage["kv_allocated"],
            "kv_tokens_used": usage["kv_used"],
            "blocks": usage["num_blocks"],
            "blocks_used": len(usage["owners"]),
            "blocks_cached": len(usage.get("cached", ())),
            "blocks_free": usage["num_blocks"] - len(usage["owners"]) - len(usage.get("cached", ())),
        }

    # --- inside ---------------------------------------------------------------------------------------------

    def _add(self, partial: PartialCompletion, request_id: Hashable, wait: bool = False) -> Request:
        sequence = Sequence(request_id, list(partial.prompt_ids), partial.max_tokens)
        request = Request(sequence, partial, deque() if wait else None)
        self._requests[request_id] = request
        if partial.finish_reason:  # the prompt fills the context
            self._emit(request, "")
        elif self.batching == "static":
            self._queue.append(request)
        else:
            try:
                self.scheduler.add(sequence)
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
                request.kv_bytes, cached_tokens=sequence.num_cached_tokens, preemptions=sequence.num_preemptions
            )
            outcome = {"abort": "aborted", "error": "failed"}.get(partial.finish_reason, "finished")
            self._counts[outcome] += 1
            del self._requests[sequence.request_id]
        output = RequestOutput(sequence.request_id, text, [] if token is None else [token], completion)
        (self._outputs if request.outputs is None else request.outputs).append(output)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request from outside: aborted, or failed."""
        text = request.partial.end(reason, error)
        if self.batching == "static":
            if request in self._queue:
                self._queue.remove(request)
        elif reason == "abort":
            self.scheduler.abort(request.sequence)
        else:
            self.scheduler.finish(request.sequence, reason)
        self._emit(request, text)

    def _apply_aborts(self) -> None:
        while self._aborts:
            request = self._requests.get(self._aborts.pop())
            if request:
                self._end(request, "abort")

    def _step(self) -> None:
        began = time.perf_counter()
        self._stepping = True
        try:
            self._static_step() if self.batching == "static" else self._continuous_step()
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
            return self._end(request, "error", _describe(error))
        self._counts["output_tokens"] += 1
        if request.partial.finish_reason and self.batching == "continuous":
            self.scheduler.finish(request.sequence, request.partial.finish_reason)
        self._emit(request, text, token)

    # --- continuous batching

    def _continuous_step(self) -> None:
        if not self.scheduler.has_unfinished:
            return
        began = time.perf_counter()
        step, new = run_step(self.scheduler, self._forward, self._choose)
        self._counts["preemptions"] += len(step.preempted)
        if self.trace is not None:
            self.trace.append(trace_step(step, self.scheduler, time.perf_counter() - began))
        for sequence, token in new:
            request = self._requests.get(sequence.request_id)
            if request is None:  # it failed in this step
                continue
            if sequence.num_tokens == sequence.num_prompt_tokens + 1:
                self._counts["cached_tokens"] += sequence.num_cached_tokens
            request.kv_bytes = kv_bytes(self.model.config, sequence.num_computed_tokens, self.model.dtype)
            self._push(request, token)

    def _forward(self, scheduled: list[tuple[Sequence, int]]) -> Tensor:
        """One pass -> logits. If it fails, each sequence is run alone, and those that fail again end with an error."""
        try:
            return self._pass(scheduled)
        except Exception:
            if not scheduled:
                raise
        logits = []
        for sequence, num_tokens in list(scheduled):
            try:
                logits.append(self._pass([(sequence, num_tokens)]))
            except Exception as error:
                scheduled.remove((sequence, num_tokens))  # the step goes on without it
                self._end(self._requests[sequence.request_id], "error", _describe(error))
        vocab = self.model.config.vocab_size
        return torch.cat(logits) if logits else torch.empty(0, vocab)

    def _pass(self, scheduled: list[tuple[Sequence, int]]) -> Tensor:
        if self._graphs and self._graphs.can_run(scheduled):
            return self._graphs.run(scheduled)
        return forward(self.model, self.cache, scheduled)

    def _choose(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        return self._choose_or_fail(logits, [self._requests[s.request_id] for s in sequences])

    def _choose_or_fail(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """The next token of each; a request whose choice fails ends with an error, and PAD stands in its place."""
        try:
            return choose_tokens(self.model, logits, [request.partial for request in requests])
        except Exception:
            pass
        tokens = []
        for row, request in enumerate(requests):
            try:
                tokens += choose_tokens(self.model, logits[row : row + 1], [request.partial])
            except Exception as error:
                tokens.append(PAD)
                self._end(request, "error", _describe(error))
        return tokens

    # --- static batching

    def _static_step(self) -> None:
        if self._batch is None or self._batch.done:
            self._start_batch()
        began, rows = time.perf_counter(), self._rows
        try:
            new = self._batch.step()
        except Exception as error:  # one rectangle: it fails as a whole
            for request in rows:
                if not request.partial.finish_reason:
                    self._end(request, "error", _describe(error))
            return
        if self.trace is not None:
            ids = [request.sequence.request_id for request in rows]
            self.trace.append(self._batch.trace(ids, time.perf_counter() - began))
        for row, token in new:
            if not rows[row].partial.finish_reason:
                self._push(rows[row], token)

    def _start_batch(self) -> None:
        """Take from the queue what fits a rectangle in the memory, at least one."""
        self._rows, width, new = [], 0, 0
        while self._queue and len(self._rows) < self.max_num_seqs:
            partial = self._queue[0].partial
            width, new = max(width, len(partial.prompt_ids)), max(new, partial.max_tokens)
            if self._rows and (len(self._rows) + 1) * (width + new) > self.kv_tokens:
                break
            self._rows.append(self._queue.popleft())
        rows = self._rows
        self._batch = StaticBatch(
            self.model,
            [request.partial for request in rows],
            choose=lambda model, logits, partials: self._choose_or_fail(
                logits, [request for request in rows if not request.partial.finish_reason]
            ),
        )
        for request in rows:
            request.kv_bytes = self._batch.kv_bytes_per_row


class DecodeGraphs:
    """Decode passes, recorded once as CUDA graphs and replayed: the CPU then launches one graph instead of a thousand
    small kernels.

    A graph has fixed shapes and addresses. So there is one for each bucket of batch size and table width (powers of
    two), with tensors that are filled before it is replayed; rows that only fill up the batch write to the pad block,
    and read it. On the CPU the same passes run without a graph, for tests.
    """

    def __init__(self, model: Llama, cache: PagedCache):
        self.model, self.cache = model, cache
        self._pool = None  # the graphs share their memory: only one runs at a time
        self._passes: dict[tuple[int, int], tuple[dict[str, Tensor], Callable[[], Tensor]]] = {}

    @staticmethod
    def can_run(scheduled: list[tuple[Sequence, int]]) -> bool:
        """Does each sequence run one token, its last?"""
        return all(n == 1 and s.num_computed_tokens + 1 == s.num_tokens for s, n in scheduled)

    @torch.inference_mode()
    def run(self, scheduled: list[tuple[Sequence, int]]) -> Tensor:
        """-> logits [len(scheduled), vocab]"""
        self.cache.copy_blocks(scheduled)
        sequences = [sequence for sequence, _ in scheduled]
        pad, size = self.cache.pad_block, self.cache.block_size
        B = _power_of_two(len(sequences))
        W = _power_of_two(max(num_blocks_for(s.num_tokens, size) for s in sequences))
        padding = B - len(sequences)
        values = {
            "tokens": [s.token_ids[-1] for s in sequences] + [PAD] * padding,
            "positions": [s.num_computed_tokens for s in sequences] + [0] * padding,
            "slot_mapping": [slot_mapping(s.block_table, s.num_computed_tokens, 1, size)[0] for s in sequences]
            + [pad * size] * padding,
            "block_tables": [s.block_table + [pad] * (W - len(s.block_table)) for s in sequences]
            + [[pad] * W] * padding,
            "seq_lens": [s.num_tokens for s in sequences] + [1] * padding,
        }  # fmt: skip
        inputs, replay = self._passes.get((B, W)) or self._record(B, W)
        for name, tensor in inputs.items():
            tensor.copy_(torch.tensor(values[name]))
        return replay()[: len(sequences)]

    def _record(self, B: int, W: int) -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
        device, pad = self.model.device, self.cache.pad_block
        zeros = torch.zeros(B, dtype=torch.int64, device=device)
        inputs = {
            "tokens": zeros.clone(),
            "positions": zeros.clone(),
            "slot_mapping": torch.full_like(zeros, pad * self.cache.block_size),
            "block_tables": torch.full((B, W), pad, device=device),
            "seq_lens": torch.ones_like(zeros),
        }

        def decode() -> Tensor:
            self.cache.prepare_decode(inputs["slot_mapping"], inputs["block_tables"], inputs["seq_lens"])
            return self.model.logits(self.model(inputs["tokens"], inputs["positions"], self.cache))

        replay = self._capture(decode) if device.type == "cuda" else decode
        self._passes[B, W] = inputs, replay
        return inputs, replay

    def _capture(self, decode: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up in the first passes, which a graph must not hold
            for _ in range(2):
                decode()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = decode()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


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


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""Decode without launches: a pass recorded as a CUDA graph, for the engine on a GPU.

A decode pass is about a thousand small kernels, and a GPU runs each of them faster than Python can launch the next. A
graph is recorded once and launched as one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .continuous_batching import Sequence
from .model.llama import Llama
from .paged_attention import PagedCache, num_blocks_for, slot_mapping
from .static_batching import PAD


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

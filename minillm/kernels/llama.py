"""Step 7: the forward pass on handwritten kernels.

What changes: how a pass is computed, and nothing else. Weights, cache and scheduler are those of the steps before, and
so are the tokens. The seams are others than in model/llama.py, since at one token a step a GPU waits for launches and
memory, not for arithmetic. What one op writes and the next one reads is fused: the residual is added where it is
normalised, and keys are turned where they are stored. That leaves nine launches a layer.

On CUDA tensors the kernels run on the GPU. On CPU tensors the same source runs in the simulator: hundreds of times
slower, and with the same result.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as SequenceOf

import torch
import torch.nn.functional as F
from torch import Tensor

from ..continuous_batching import Sequence, SlotCache
from ..model.llama import Attention, Linear, Llama
from ..model.sampling import SamplingParams, apply_penalties, uniform
from ..paged_attention import PagedCache, slot_mapping
from ..quantization import Int8PagedCache, QuantizedLinear
from .build import KernelsUnavailable, load_kernels

ops = torch.ops.minillm
GEMV_ROWS = 8  # up to here a linear layer is bound by the bytes of its weight; with more rows it is a matrix product


def resolve_kernels(kernels: str, model: Llama) -> str:
    """What `LLM(kernels=...)` means for this model: "auto", "torch" or "cuda" -> "torch" or "cuda".

    "auto" is "cuda" on a GPU, if the kernels can be had there, else torch, with a warning that says why. ValueError for
    a model that the kernels cannot run, and KernelsUnavailable if there is no toolchain, when "cuda" is asked for.
    """
    if kernels not in ("auto", "torch", "cuda"):
        raise ValueError(f"kernels={kernels!r}: must be 'auto' or 'torch' or 'cuda'")
    if kernels == "torch" or (kernels == "auto" and model.device.type != "cuda"):
        return "torch"
    try:
        _check_model(model)
        load_kernels(model.device.type)
    except (ValueError, KernelsUnavailable) as error:
        if kernels == "cuda":
            raise
        warnings.warn(f"kernels='auto': plain torch is used, since {error}", RuntimeWarning, stacklevel=3)
        return "torch"
    return "cuda"


def _check_model(model: Llama) -> None:
    head_dim = model.config.head_dim
    if model.device.type not in ("cpu", "cuda"):
        raise ValueError(f"kernels='cuda': not on device {model.device.type!r}, must be 'cuda' or 'cpu'")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"kernels='cuda': not in {model.dtype}, must be float32, float16 or bfloat16")
    if head_dim % 8 or head_dim > 256:
        raise ValueError(f"kernels='cuda': head_dim={head_dim}, must be a multiple of 8, at most 256")


class KernelCache:
    """Lets the kernels read and write the keys and values of a PagedCache or a SlotCache: to them a contiguous slot is
    a block that holds a whole sequence."""

    def __init__(self, memory: PagedCache | SlotCache):
        self.memory, self.block_size = memory, memory.k.shape[2]
        self.pad_block = getattr(memory, "pad_block", 0)

    def prepare(self, scheduled: list[tuple[Sequence, int]]) -> None:
        """Say whose tokens the next pass runs, in the order of its rows."""
        self.copy_blocks(scheduled)
        slots, lengths, starts = [], [], [0]
        for sequence, num_tokens in scheduled:
            slots += slot_mapping(sequence.block_table, sequence.num_computed_tokens, num_tokens, self.block_size)
            lengths.append(sequence.num_computed_tokens + num_tokens)
            starts.append(starts[-1] + num_tokens)
        width = max(len(sequence.block_table) for sequence, _ in scheduled)
        tables = [s.block_table + [self.pad_block] * (width - len(s.block_table)) for s, _ in scheduled]
        self.prepare_decode(*(self._tensor(values) for values in (slots, tables, lengths)))
        self.query_starts = self._tensor(starts)
        self.max_query_len = max(num_tokens for _, num_tokens in scheduled)

    def prepare_decode(self, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
        """The same for rows that run one token each, from tensors.

        slot_mapping [B], block_tables [B, W], seq_lens [B]
        """
        self.slot_mapping, self.block_tables, self.seq_lens = slot_mapping, block_tables, seq_lens
        self.max_query_len = 1

    def copy_blocks(self, scheduled: list[tuple[Sequence, int]]) -> None:
        if isinstance(self.memory, PagedCache):
            self.memory.copy_blocks(scheduled)

    def store_and_attend(self, layer: int, qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int) -> Tensor:
        """qkv [N, heads + 2 kv_heads, head_dim], before RoPE -> [N, heads, head_dim]"""
        memory, scales = self.memory, {}
        if isinstance(memory, Int8PagedCache):
            scales = {"k_scale": memory.k_scale[layer], "v_scale": memory.v_scale[layer]}
        k, v = memory.k[layer], memory.v[layer]
        q = ops.rope_and_store(qkv, positions, cos_sin, k, v, self.slot_mapping, num_heads, **scales)
        pages = k, v, self.block_tables, self.seq_lens
        if self.max_query_len == 1:
            return ops.paged_attention(q, *pages, **scales)
        return ops.paged_prefill_attention(q, *pages, self.query_starts, self.max_query_len, **scales)

    def _tensor(self, values) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.memory.k.device)


class KernelLlama:
    """A Llama whose passes run on the kernels: `model(tokens, positions, cache)` with a KernelCache, and
    `model.logits(hidden)`. All else (config, tokenizer, ...) is the Llama's own."""

    def __init__(self, model: Llama):
        self.model = model

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KernelCache) -> Tensor:
        """tokens [N] int64, positions [N] int64 -> hidden [N, hidden_size], after the last norm."""
        model, cos_sin = self.model, self.model.rope_table()
        residual = model.embedding(tokens)  # [N, hidden_size]
        norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)] + [model.norm]
        x = ops.rms_norm(residual, norms[0].weight, norms[0].eps)
        for i, layer in enumerate(model.layers):
            qkv = self._qkv(layer.attention, x)
            out = cache.store_and_attend(i, qkv, positions, cos_sin, model.config.num_heads)
            x = linear(layer.attention.o_proj, out.flatten(1))
            x, residual = ops.add_rms_norm(x, residual, norms[2 * i + 1].weight, norms[2 * i + 1].eps)
            x = linear(layer.mlp.down_proj, ops.silu_and_mul(linear(layer.mlp.gate_up_proj, x)))
            x, residual = ops.add_rms_norm(x, residual, norms[2 * i + 2].weight, norms[2 * i + 2].eps)
        return x

    def _qkv(self, attention: Attention, x: Tensor) -> Tensor:
        """x [N, hidden_size] -> [N, heads + 2 kv_heads, head_dim]"""
        qkv = linear(attention.qkv_proj, x).view(len(x), -1, attention.head_dim)
        if attention.qk_norm:
            q, k, v = qkv.split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], dim=1)
            q, k = (
                ops.rms_norm(heads.reshape(-1, attention.head_dim), norm.weight, norm.eps).view(heads.shape)
                for heads, norm in ((q, attention.q_norm), (k, attention.k_norm))
            )
            qkv = torch.cat([q, k, v], dim=1)
        return qkv

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden_size] -> [M, vocab_size]"""
        return linear(self.model.head, hidden)


def linear(layer: Linear | QuantizedLinear, x: Tensor) -> Tensor:
    """x [N, in] -> [N, out]: by the GEMV kernel for a few rows, by torch's matrix product for many; int8 weights by
    their own kernels."""
    if isinstance(layer, QuantizedLinear):
        product = ops.linear_w8a8 if layer.mode == "w8a8" else ops.linear_w8a16
        return product(x, layer.codes, layer.scale, layer.bias)
    if len(x) <= GEMV_ROWS:
        return ops.gemv(x, layer.weight, layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def sample(
    logits: Tensor,
    params: SequenceOf[SamplingParams],
    prompt_ids: SequenceOf[SequenceOf[int]],
    output_ids: SequenceOf[SequenceOf[int]],
) -> list[int]:
    """What model/sampling.py's `sample` does, with its arguments: penalties in torch, the choice by the kernels.

    Draws are the same but for the rounding of probabilities to float32.
    """
    logits = apply_penalties(logits, params, prompt_ids, output_ids)
    best = ops.argmax(logits)
    finite = logits.gather(1, best[:, None]).isfinite()[:, 0]
    if not finite.all():
        raise FloatingPointError(f"logits: row {int((~finite).nonzero()[0])} has no finite maximum")
    tokens = best.tolist()
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:

        def column(values, dtype: torch.dtype) -> Tensor:
            return torch.tensor([values(row, params[row]) for row in drawn], dtype=dtype, device=logits.device)

        sampled = ops.sample(
            logits[drawn],
            column(lambda row, p: max(p.temperature, 1e-30), torch.float32),  # float32 ends at 1e-45
            column(lambda row, p: p.top_k, torch.int64),
            column(lambda row, p: p.top_p, torch.float32),
            column(lambda row, p: p.min_p, torch.float32),
            column(lambda row, p: uniform(p.seed, len(output_ids[row])), torch.float64),
        )
        for row, token in zip(drawn, sampled.tolist(), strict=True):
            tokens[row] = token
    return tokens

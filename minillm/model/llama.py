"""Step 0: the transformer itself, for the whole Llama family.

Written once and never changed: each later step changes what the cache does and what the loop does. Two rules
make that possible.

Tokens are flat. The model sees N tokens of any number of sequences side by side, each with its position; it
knows nothing of batches or padding.

The cache owns attention. A layer hands its q, k and v to `cache.attend` and gets back what they attended to.
Whether the keys of earlier tokens were recomputed, kept in one tensor or spread over pages is not seen here.

Sources: Touvron et al. 2023 (LLaMA, section 2.2), Su et al. 2021 (RoPE), Zhang & Sennrich 2019 (RMSNorm),
Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped-query attention).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class Cache(Protocol):
    """What the model asks of a cache: one method."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, head_dim]; k, v [N, kv_heads, head_dim], after RoPE -> [N, heads, head_dim]"""
        ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to a root mean square of 1, then each channel by its weight.

    x [..., D], weight [D] -> [..., D] in x's dtype. The sum of squares is taken in float32 whatever the dtype:
    bfloat16 has 8 bits of mantissa and would lose most of the addends.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)  # divided by sqrt((9 + 16) / 2)
    tensor([0.8485, 1.1314])
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


def rope_table(config: ModelConfig) -> Tensor:
    """Cosines and sines of every position -> [max_position_embeddings, head_dim] float32, cosines first.

    Pair i of a head turns by position * theta^(-2i / head_dim). Computed in float64 and kept in float32:
    bfloat16 angles are off by 0.08 radian at position 64 already.
    """
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-2 * pairs / config.head_dim)
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, dtype=torch.float64)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each head by its token's position.

    x [N, heads, head_dim], cos_sin [N, head_dim] float32 (the rows of `rope_table` at the tokens' positions)
    -> like x. Channel i is paired with channel i + head_dim/2 (Hugging Face's order of the weights).

    >>> quarter_turn = torch.tensor([[0.0, 1.0]])  # cos 0, sin 1
    >>> apply_rope(torch.tensor([[[1.0, 0.0]]]), quarter_turn)
    tensor([[[0., 1.]]])
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [N, 1, head_dim/2] each
    first, second = x.float().chunk(2, dim=-1)  # [N, heads, head_dim/2] each
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention of the last N tokens of one sequence over all M of its tokens.

    q [N, heads, head_dim]; k, v [M, kv_heads, head_dim], M >= N -> [N, heads, head_dim].
    Query i is token M - N + i, and sees the keys up to its own. With N = M this is the full pass, with N = 1
    one step of decode, between them a chunk of prefill.
    """
    N, heads, head_dim = q.shape
    M, kv_heads, _ = k.shape
    group = heads // kv_heads
    # The query heads of a group share one KV head: laid side by side as rows, they read it once.
    rows = q.view(N, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * N, head_dim)
    mask = None
    if N > 1:
        mask = torch.ones(N, M, dtype=torch.bool, device=q.device).tril(M - N).repeat(group, 1)  # [group*N, M]
    # As a batch of one: torch's fused CPU kernel takes four dimensions only.
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, kv_heads, M, head_dim]
    out = F.scaled_dot_product_attention(rows[None], k, v, attn_mask=mask)
    return out.view(kv_heads, group, N, head_dim).permute(2, 0, 1, 3).reshape(N, heads, head_dim)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What `attention` computes, each step spelt out: softmax(q k^T / sqrt(head_dim)) v. Same shapes."""
    N, heads, head_dim = q.shape
    M, kv_heads, _ = k.shape
    k = k.repeat_interleave(heads // kv_heads, dim=1)  # [M, heads, head_dim]
    v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * head_dim**-0.5  # [heads, N, M]
    future = torch.ones(N, M, dtype=torch.bool, device=q.device).triu(M - N + 1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.float()).to(q.dtype)


class Linear(nn.Linear):
    """y = x W^T + b; x [N, in], weight [out, in] -> [N, out].

    `pack` makes a second copy of the weight, in the blocks that oneDNN's kernels read one after the other. On a CPU
    a product of one token is bound by that reading, and packed it is about twice as fast. Pack again after a change
    of the weight.
    """

    packed: Tensor | None = None

    def pack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _apply(self, fn, recurse=True):  # what .to() calls: a packed copy would keep its old dtype and device
        self.packed = None
        return super()._apply(fn, recurse)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # One matrix product instead of three: at one token a step, each launch and each pass counts.
        self.qkv_proj = Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos_sin: Tensor, cache: Cache) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [N, heads + 2*kv_heads, head_dim]
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        rotated = apply_rope(torch.cat([q, k], dim=1), cos_sin)  # [N, heads + kv_heads, head_dim], both at once
        q, k = rotated.split([self.num_heads, self.num_kv_heads], dim=1)
        out = cache.attend(self.layer, q, k, v)  # [N, heads, head_dim]
        return self.o_proj(out.reshape(len(x), -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [N, intermediate_size] each
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: Cache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos_sin, cache)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """`model(tokens, positions, cache)` -> hidden states; `model.logits(hidden)` -> scores of the next token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # Uninitialised (_weight=): torch's random start would be overwritten, and costs a second on "meta".
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        self.tokenizer = None  # set by weights.load_model
        self._rope_table: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """tokens [N] int64, positions [N] int64 -> hidden [N, hidden_size], after the last norm."""
        x = self.embedding(tokens)  # [N, hidden_size]
        cos_sin = self.rope_table()[positions]  # [N, head_dim], once for all layers
        for layer in self.layers:
            x = layer(x, cos_sin, cache)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden_size] -> [M, vocab_size]. Only for rows that will be sampled: the head is a fifth
        of SmolLM2's parameters, and a prompt needs it for its last token alone."""
        return self.head(hidden)

    def pack(self) -> None:
        """Pack the weights for a CPU's kernels (see `Linear`), where torch has them for this dtype."""
        supported = torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])
        if self.device.type == "cpu" and torch.backends.mkldnn.is_available() and self.dtype in supported:
            for module in self.modules():
                if isinstance(module, Linear):
                    module.pack()

    def rope_table(self) -> Tensor:
        # Not a buffer: `.to(torch.bfloat16)` would cast a buffer, and the angles with it.
        if self._rope_table is None or self._rope_table.device != self.device:
            self._rope_table = rope_table(self.config).to(self.device)
        return self._rope_table

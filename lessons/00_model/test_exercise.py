"""Graded tests of exercise 00. The oracles are torch's own rms_norm and attention, and complex rotation."""

import pytest
import torch
import torch.nn.functional as F

from minillm.grading import task
from minillm.model.llama import apply_rope, attention, rms_norm

REFERENCE = {"rms_norm": rms_norm, "apply_rope": apply_rope, "attention": attention}


@task("0.1", "RMSNorm", points=2)
@pytest.mark.parametrize("shape", [(1, 8), (7, 96), (2, 3, 40)])
def test_rms_norm_equals_torch(exercise, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 3 + 1, torch.randn(shape[-1])
    expected = F.rms_norm(x, shape[-1:], weight, eps=1e-2)  # an eps large enough to see where it is added
    torch.testing.assert_close(
        exercise.rms_norm(x, weight, 1e-2), expected, msg="not x / sqrt(mean(x^2) + eps) * weight"
    )


@task("0.1", "RMSNorm", points=1)
def test_rms_norm_sums_in_float32(exercise):
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # x^2 is 90,000: float16 ends at 65,504
    out = exercise.rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-5)
    assert out.dtype == torch.float16, "the result must have x's dtype"
    assert torch.allclose(out, torch.ones_like(out)), "the sum of squares must be taken in float32"


def rotate(x, positions, theta=100.0):
    """RoPE as a complex product, and the table that apply_rope takes."""
    half = x.shape[-1] // 2
    angles = torch.outer(positions.double(), theta ** (-torch.arange(half, dtype=torch.float64) / half))
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    return torch.cat([turned.real, turned.imag], dim=-1).float(), table


@task("0.2", "RoPE", points=3)
@pytest.mark.parametrize("heads, head_dim", [(1, 2), (3, 16), (6, 40)])
def test_rope_is_a_complex_rotation(exercise, heads, head_dim):
    torch.manual_seed(0)
    x, positions = torch.randn(5, heads, head_dim), torch.tensor([0, 1, 2, 77, 1000])
    expected, table = rotate(x, positions)
    torch.testing.assert_close(
        exercise.apply_rope(x, table), expected, msg="each pair (i, i + head_dim/2) must turn by its own angle"
    )


@task("0.2", "RoPE", points=1)
def test_rope_rotates_in_float32(exercise):
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, table = rotate(x.float(), torch.arange(100, 104))
    out = exercise.apply_rope(x, table)
    assert out.dtype == torch.bfloat16, "the result must have x's dtype"
    assert torch.equal(out, expected.bfloat16()), "round once, at the end: rotate in float32"


def expected_attention(q, k, v):
    N, M = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    mask = torch.ones(N, M, dtype=torch.bool).tril(M - N)
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)


@task("0.3", "Grouped-query attention", points=3)
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("N, M", [(1, 1), (1, 9), (9, 9)])
def test_attention_full_pass_and_decode(exercise, heads, kv_heads, N, M):
    torch.manual_seed(0)
    q, k, v = torch.randn(N, heads, 40), torch.randn(M, kv_heads, 40), torch.randn(M, kv_heads, 40)
    out = exercise.attention(q, k, v)
    assert out.shape == q.shape, f"shape {list(out.shape)}, must be that of q, {list(q.shape)}"
    torch.testing.assert_close(out, expected_attention(q, k, v), atol=1e-5, rtol=1e-4)


@task("0.3", "Grouped-query attention", points=2)
@pytest.mark.parametrize("N, M", [(2, 3), (4, 20), (7, 8)])
def test_attention_of_a_chunk_sees_all_before_it(exercise, N, M):
    torch.manual_seed(0)
    q, k, v = torch.randn(N, 6, 16), torch.randn(M, 2, 16), torch.randn(M, 2, 16)
    torch.testing.assert_close(
        exercise.attention(q, k, v), expected_attention(q, k, v), atol=1e-5, rtol=1e-4,
        msg="query i is token M - N + i: it sees the keys up to its own, and none after",
    )  # fmt: skip

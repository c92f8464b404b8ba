"""Every kernel against its float64 reference: in the simulator under three schedules, and on a GPU if there is one."""

import os

import pytest
import torch
from torch import Tensor

from minillm.kernels import ops, reference
from minillm.kernels.build import load_kernels
from minillm.model.config import ModelConfig
from minillm.model.llama import apply_rope, rope_table

RUNS = [("cpu", "in_order"), ("cpu", "reversed"), ("cpu", "random")]
RUNS += [("cuda", "in_order")] if torch.cuda.is_available() else []
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HEAD_DIMS = [8, 40, 64, 80, 96, 128, 256]


@pytest.fixture(params=RUNS, ids="-".join)
def device(request, monkeypatch):
    """The device that the tensors lie on; on the CPU the simulator runs threads and blocks in the given order."""
    device, schedule = request.param
    monkeypatch.setenv("CUDA_ON_CPU_SCHEDULE", schedule)
    load_kernels(device)
    return device


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def run(op: str, *args, **kwargs):
    return getattr(torch.ops.minillm, op)(*args, **kwargs)


def in_double(op: str, *args):
    """The reference, in float64 on the CPU."""

    def widen(x):
        return (x.cpu().double() if x.is_floating_point() else x.cpu()) if isinstance(x, Tensor) else x

    return getattr(reference, op)(*map(widen, args))


def assert_close(actual: Tensor, expected: Tensor, scale: float = 1.0):
    tolerance = TOLERANCE[actual.dtype] * scale
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


# --- what all ops have in common ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.SCHEMAS)
def test_reference_takes_the_ops_arguments(op):
    schema = getattr(torch.ops.minillm, op).default._schema
    names = [argument.name for argument in schema.arguments if argument.name not in ("version", "num_splits")]
    code = getattr(reference, op).__code__
    assert list(code.co_varnames[: code.co_argcount]) == names


def test_dtypes_do_not_mix_silently():
    load_kernels("cpu")
    with pytest.raises(RuntimeError, match="weight .* must be .*dtype"):
        run("rms_norm", torch.ones(2, 8), torch.ones(8, dtype=torch.float16), 1e-5)


def test_float64_and_integers_are_refused_by_name():
    load_kernels("cpu")
    with pytest.raises(RuntimeError, match=r"x of shape \[2, 8\]: must be float32, float16 or bfloat16"):
        run("rms_norm", torch.ones(2, 8).double(), torch.ones(8).double(), 1e-5)


# --- RMSNorm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "rows, size", [(1, 1), (3, 7), (5, 96), (2, 576), (257, 8), (2, 2048), (1, 4100), (2, 8192), (0, 64)]
)
def test_rms_norm(device, generator, version, dtype, rows, size):
    x = (3 * torch.randn(rows, size, generator=generator)).to(device, dtype)
    residual = torch.randn(rows, size, generator=generator).to(device, dtype)
    weight = torch.randn(size, generator=generator).to(device, dtype)
    assert_close(run("rms_norm", x, weight, 1e-5, version), in_double("rms_norm", x, weight, 1e-5), 2)

    normed, total = run("add_rms_norm", x, residual, weight, 1e-5, version)
    assert torch.equal(total, x + residual)
    assert_close(normed, in_double("rms_norm", x + residual, weight, 1e-5), 2)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_rms_norm_reads_views_as_they_are(device, generator, version):
    wide = torch.randn(6, 200, generator=generator).to(device)
    weight = torch.ones(64, device=device)
    for x in (wide[:, 8:72], wide[::2, 8:72], wide[:, 3:67]):  # strided; the last one not aligned to 16 bytes
        assert_close(run("rms_norm", x, weight, 1e-5, version), in_double("rms_norm", x, weight, 1e-5))
    with pytest.raises(RuntimeError, match="side by side"):
        run("rms_norm", wide[:, :128:2], weight, 1e-5, version)


def test_rms_norm_of_zeros_and_large_values(device):
    weight = torch.ones(64, device=device)
    assert run("rms_norm", torch.zeros(2, 64, device=device), weight, 1e-5).eq(0).all()
    x = torch.full((1, 64), 3e4, dtype=torch.float16, device=device)  # its square is no float16
    assert_close(run("rms_norm", x, weight.half(), 1e-5), torch.ones(1, 64, dtype=torch.float64))


# --- RoPE and KV store --------------------------------------------------------------------------------------------


def rope_inputs(generator, tokens, heads, kv_heads, head_dim, dtype, block_size=4):
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    config = ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=heads, num_kv_heads=kv_heads,
                         head_dim=head_dim, intermediate_size=8, max_position_embeddings=512)  # fmt: skip
    num_blocks = tokens // block_size + 3
    pool = torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    positions = torch.randint(512, (tokens,), generator=generator)
    return qkv, positions, rope_table(config), pool, slots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 100, 2])
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (6, 2)])
def test_rope_and_store(device, generator, heads, kv_heads, head_dim, dtype):
    qkv, positions, cos_sin, pool, slots = rope_inputs(generator, 9, heads, kv_heads, head_dim, dtype)
    slots[4] = -1  # a token that only fills up the batch
    expected_pool = pool.double()
    expected = reference.rope_and_store(qkv.double(), positions, cos_sin.double(), *expected_pool, slots, heads)
    pool = pool.to(device)
    inputs = (x.to(device) for x in (qkv, positions, cos_sin, pool[0], pool[1], slots))
    q = run("rope_and_store", *inputs, heads)
    assert_close(q, expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(pool.cpu().double(), expected_pool, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_rope_is_the_models(device, generator):
    qkv, positions, cos_sin, pool, slots = rope_inputs(generator, 5, 4, 2, 64, torch.float32)
    q = run("rope_and_store", *(x.to(device) for x in (qkv, positions, cos_sin, pool[0], pool[1], slots)), 4)
    assert_close(q, apply_rope(qkv[:, :4], cos_sin[positions]).double())


def test_padding_slots_touch_no_block(
    device, generator
):  # CASES C12: the pool is full, a canary in its first and last slot
    qkv, positions, cos_sin, pool, _ = rope_inputs(generator, 6, 4, 2, 16, torch.float32)
    pool = torch.randn(pool.shape, generator=generator).to(device)
    before = pool.clone()
    slots = torch.full((6,), -1)
    run("rope_and_store", *(x.to(device) for x in (qkv, positions, cos_sin, pool[0], pool[1], slots)), 4)
    assert torch.equal(pool, before)


def test_rope_takes_rows_out_of_a_wider_tensor(device, generator):
    qkv, positions, cos_sin, pool, slots = rope_inputs(generator, 4, 2, 1, 16, torch.float32)
    wide = torch.cat([qkv, qkv], dim=1).to(device)[:, :4]  # a token's heads in one piece, tokens twice as far apart
    inputs = [x.to(device) for x in (positions, cos_sin, pool[0], pool[1], slots)]
    assert torch.equal(run("rope_and_store", wide, *inputs, 2), run("rope_and_store", qkv.to(device), *inputs, 2))


# --- SiLU and multiply --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (5, 96), (2, 1536), (300, 8), (1, 5000), (0, 8)])
def test_silu_and_mul(device, generator, dtype, rows, size):
    x = (4 * torch.randn(rows, 2 * size, generator=generator)).to(device, dtype)
    assert_close(run("silu_and_mul", x), in_double("silu_and_mul", x), 2)


def test_silu_and_mul_of_extremes(device):
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device)
    out = run("silu_and_mul", torch.cat([gate, torch.ones_like(gate)], dim=1))
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e4]]))


# --- GEMV ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("M, K", [(1, 8), (7, 576), (130, 64), (5, 77), (1030, 32), (9, 4096)])
def test_gemv(device, generator, dtype, rows, M, K):
    x = torch.randn(rows, K, generator=generator).to(device, dtype)
    weight = torch.randn(M, K, generator=generator).div(K**0.5).to(device, dtype)
    bias = torch.randn(M, generator=generator).to(device, dtype)
    assert_close(run("gemv", x, weight), in_double("gemv", x, weight))
    assert_close(run("gemv", x, weight, bias), in_double("gemv", x, weight, bias))


def test_gemv_of_rows_apart_and_unaligned(device, generator):
    wide = torch.randn(4, 300, generator=generator).to(device)
    weight = torch.randn(12, 64, generator=generator).to(device)
    for x in (wide[::2, :64], wide[:, 5:69]):
        assert_close(run("gemv", x, weight), in_double("gemv", x, weight), 8)


# --- int8 linear layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (5, 96), (2, 576), (257, 8), (2, 4104), (1, 4100), (0, 64)])
def test_quantize_gives_the_references_codes(device, generator, dtype, rows, size):
    x = (3 * torch.randn(rows, size, generator=generator)).to(device, dtype)
    codes, scale = run("quantize", x)
    expected_codes, expected_scale = reference.quantize(x.cpu())
    assert torch.equal(scale.cpu(), expected_scale) and torch.equal(codes.cpu(), expected_codes)


def test_quantize_of_zeros_outliers_and_views(device, generator):
    x = torch.randn(5, 64, generator=generator)
    x[0] = 0
    x[1, 3] = 1e30  # the others become zero
    x[2] = 1e-42  # below the smallest scale that is no denormal
    x[3, 5] = float("nan")
    x[4, 7] = float("-inf")
    codes, scale = (t.cpu() for t in run("quantize", x.to(device)))
    assert codes[0].eq(0).all() and codes[1].abs().sum() == 127 and scale[0] > 0
    assert torch.equal(codes[:3], reference.quantize(x[:3])[0])
    assert scale[3].isnan() and scale[4].isinf()  # stays visible
    wide = torch.randn(6, 200, generator=generator).to(device)
    for view in (wide[::2, 8:72], wide[:, 3:67]):
        assert torch.equal(run("quantize", view)[0].cpu(), reference.quantize(view.cpu())[0])


def int8_linear_inputs(generator, device, dtype, rows, M, K):
    x = torch.randn(rows, K, generator=generator).to(device, dtype)
    codes, scale = reference.quantize(torch.randn(M, K, generator=generator) / K**0.5)
    bias = torch.randn(M, generator=generator).to(device, dtype)
    return x, codes.to(device), scale.to(device), bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 11, 70])
@pytest.mark.parametrize("M, K", [(1, 16), (7, 576), (130, 64), (5, 77), (66, 40), (9, 2064)])
def test_linear_w8a16(device, generator, dtype, rows, M, K):
    x, codes, scale, bias = int8_linear_inputs(generator, device, dtype, rows, M, K)
    for args in ((x, codes, scale), (x, codes, scale, bias)):
        assert_close(run("linear_w8a16", *args), in_double("linear_w8a16", *args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 11, 70])
@pytest.mark.parametrize("M, K", [(1, 16), (7, 576), (130, 64), (5, 77), (66, 40)])
def test_linear_w8a8(device, generator, dtype, version, rows, M, K):
    x, codes, scale, bias = int8_linear_inputs(generator, device, dtype, rows, M, K)
    assert_close(run("linear_w8a8", x, codes, scale, bias, version), in_double("linear_w8a8", x, codes, scale, bias))
    assert_close(run("linear_w8a8", x, codes, scale, None, version), in_double("linear_w8a8", x, codes, scale))


@pytest.mark.parametrize("version", [1, 2])
def test_linear_w8a8_adds_up_exactly(device, version):
    """The largest sums there are: 127 * 127 * K needs 26 bits, more than a float32 has."""
    K = 4096
    x, codes = torch.ones(2, K, device=device), torch.full((3, K), 127, dtype=torch.int8, device=device)
    codes[1] = -127
    codes[2, ::2] = -127
    codes[2, 0] = -126
    scale = torch.ones(3, device=device)
    out = run("linear_w8a8", x, codes, scale, None, version) * 127
    expected = torch.tensor([127.0 * 127 * K, -127.0 * 127 * K, 127.0]).expand(2, 3)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=0)


def test_int8_linears_read_views_and_refuse_what_they_cannot(device, generator):
    x, codes, scale, _ = int8_linear_inputs(generator, device, torch.float32, 6, 12, 64)
    wide = torch.randn(6, 200, generator=generator).to(device)
    for view in (wide[::2, 8:72], wide[:, 3:67]):
        for op in ("linear_w8a16", "linear_w8a8"):
            assert_close(run(op, view, codes, scale), in_double(op, view, codes, scale), 4)
    for op in ("linear_w8a16", "linear_w8a8"):
        with pytest.raises(RuntimeError, match=r"codes .* must be \[M, K\] int8"):
            run(op, x, codes.float(), scale)
        with pytest.raises(RuntimeError, match=r"scale .* must be \[M\] float32"):
            run(op, x, codes, scale.double())
        with pytest.raises(RuntimeError, match=r"x of shape \[6, 32\]"):
            run(op, x[:, ::2], codes[:, :32].contiguous(), scale)


# --- greedy and sampling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, vocab", [(1, 1), (3, 7), (2, 259), (5, 49152), (1, 100003), (0, 5)])
def test_argmax(device, generator, dtype, rows, vocab):
    logits = torch.randn(rows, vocab, generator=generator).to(device, dtype)  # bf16: with many ties
    assert torch.equal(run("argmax", logits).cpu(), logits.cpu().float().max(-1).indices)


@pytest.mark.parametrize(
    "row",
    [[0.0, -0.0, 0.0], [-0.0, 0.0], [-3.0, -1.0, -2.0], [float("-inf")] * 3, [1.0, float("inf"), 2.0],
     [1.0, float("nan"), 2.0, float("nan")], [-1e-40, -2e-40], [5.0] * 1000],
    ids=str,
)  # fmt: skip
def test_argmax_of_special_values_is_torchs(device, row):
    logits = torch.tensor([row], device=device)
    assert run("argmax", logits).tolist() == logits.cpu().max(-1).indices.tolist()


def sampling_inputs(device, rows, **given):
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5}
    dtypes = {"top_k": torch.int64, "uniform": torch.float64}
    values = defaults | given
    return [
        torch.as_tensor(values[n], dtype=dtypes.get(n, torch.float32)).expand(rows).contiguous().to(device)
        for n in defaults
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 300, 2049])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 10**6}, {"top_p": 0.9},
     {"top_p": 1e-6}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "temperature": 0.8, "min_p": 0.01}],
    ids=str,
)  # fmt: skip
def test_sample_draws_what_the_reference_draws(device, generator, params, vocab, dtype):
    """At 24 places of the cumulative distribution, but where the place is within rounding of two tokens' border."""
    rows = 24
    logits = (3 * torch.randn(vocab, generator=generator)).to(device, dtype).expand(rows, vocab).contiguous()
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    inputs = sampling_inputs(device, rows, uniform=uniform, **params)
    tokens = run("sample", logits, *inputs).cpu()
    nearby = [in_double_sample(logits, inputs, uniform + shift) for shift in (-1e-5, 0.0, 1e-5)]
    assert all(token in choices for token, *choices in zip(tokens, *nearby, strict=True))
    assert sum(token == exact for token, exact in zip(tokens, nearby[1], strict=True)) >= rows - 2


def in_double_sample(logits, inputs, uniform):
    *rest, _ = (x.cpu() for x in inputs)
    return reference.sample(logits.cpu(), *rest, uniform.clamp(0, 1 - 1e-12)).tolist()


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.45}], ids=str)
def test_ties_at_the_cut_keep_the_lowest_ids(device, params):
    logits = torch.zeros(200, 10, device=device)
    uniform = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    inputs = sampling_inputs(device, 200, uniform=uniform, **params)
    tokens = run("sample", logits, *inputs).cpu()
    kept = 3 if "top_k" in params else 5
    assert tokens.unique().tolist() == list(range(kept))


def test_sample_follows_the_distribution(device, generator):
    """20,000 draws of eight tokens, against the probabilities (chi-square, 99.9% of right samplers pass)."""
    draws = 20_000 if device == "cuda" else 2_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf"), 0.5, -5.0, 1.5])
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
    inputs = sampling_inputs(device, draws, uniform=uniform)
    tokens = run("sample", logits.to(device).expand(draws, 8).contiguous(), *inputs).cpu()
    counts = tokens.bincount(minlength=8).double()
    expected = logits.double().softmax(0) * draws
    assert counts[4] == 0
    real = expected > 0
    assert ((counts - expected)[real].square() / expected[real]).sum() < 22.5  # 6 degrees of freedom


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_distribution_have_tokens(device, u):
    logits = torch.tensor([[float("-inf"), 1.0, -3.0, float("-inf"), 2.0, float("-inf")]], device=device)
    token = run("sample", logits, *sampling_inputs(device, 1, uniform=u)).item()
    assert token == (1 if u == 0 else 4)


def test_a_row_is_the_same_in_any_batch(device, generator):
    logits = torch.randn(6, 500, generator=generator).to(device)
    inputs = sampling_inputs(device, 6, uniform=torch.rand(6, generator=generator), top_k=40, top_p=0.95)
    together = run("sample", logits, *inputs)
    alone = [run("sample", logits[i : i + 1], *(x[i : i + 1] for x in inputs)).item() for i in range(6)]
    assert together.tolist() == alone


# --- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 100])
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (4, 4)])
def test_decode_attention(device, generator, heads, kv_heads, head_dim, dtype):
    for length in (0, 1, 5, 67):
        q = torch.randn(heads, head_dim, generator=generator).to(device, dtype)
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(device, dtype)
        assert_close(run("decode_attention", q, k, v), in_double("decode_attention", q, k, v))


class Pages:
    """A pool in which every place that no sequence owns is NaN, and sequences whose blocks lie in it at random."""

    def __init__(self, generator, seq_lens, kv_heads, head_dim, dtype, device, block_size=16, width=None):
        blocks = [-(-length // block_size) for length in seq_lens]
        width = max(*blocks, width or 1, 1)
        num_blocks = sum(blocks) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        pool = torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan"))
        self.block_tables = torch.full((len(seq_lens), width), order.pop())  # the padding: a block full of NaN
        for b, length in enumerate(seq_lens):
            for i in range(blocks[b]):
                block = order.pop()
                self.block_tables[b, i] = block
                n = min(block_size, length - i * block_size)
                pool[:, block, :n] = torch.randn(2, n, kv_heads, head_dim, generator=generator)
        self.block_tables = self.block_tables.to(device)
        self.k, self.v = pool.to(device, dtype)
        self.seq_lens = torch.tensor(seq_lens, device=device)

    @property
    def args(self):
        return self.k, self.v, self.block_tables, self.seq_lens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version, splits", [(1, 0), (2, 0), (3, 0), (3, 3)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_attention(device, generator, version, splits, head_dim, dtype):
    pages = Pages(generator, [1, 15, 16, 17, 0, 70], 2, head_dim, dtype, device)
    q = torch.randn(6, 6, head_dim, generator=generator).to(device, dtype)
    out = run("paged_attention", q, *pages.args, version, splits)
    assert_close(out, in_double("paged_attention", q, *pages.args))
    assert out[4].eq(0).all()


@pytest.mark.parametrize("version, splits", [(1, 0), (2, 0), (3, 4)])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 2), (4, 2), (5, 1), (9, 3), (16, 2), (24, 2), (11, 1)])
def test_paged_attention_with_any_group(device, generator, heads, kv_heads, version, splits):
    pages = Pages(generator, [33, 5], kv_heads, 64, torch.float32, device)
    q = torch.randn(2, heads, 64, generator=generator).to(device)
    assert_close(run("paged_attention", q, *pages.args, version, splits), in_double("paged_attention", q, *pages.args))


@pytest.mark.parametrize("version, splits", [(1, 0), (2, 0), (3, 2)])
@pytest.mark.parametrize("block_size", [1, 3, 4, 100])
def test_paged_attention_with_any_block_size(device, generator, block_size, version, splits):
    pages = Pages(generator, [1, 7, 64, 100], 2, 40, torch.float32, device, block_size, width=130)
    q = torch.randn(4, 4, 40, generator=generator).to(device)
    assert_close(run("paged_attention", q, *pages.args, version, splits), in_double("paged_attention", q, *pages.args))


def test_more_splits_than_there_is_to_split(device, generator):
    pages = Pages(generator, [5, 300], 1, 64, torch.float32, device)
    q = torch.randn(2, 2, 64, generator=generator).to(device)
    expected = in_double("paged_attention", q, *pages.args)
    for splits in (1, 2, 7, 64):
        assert_close(run("paged_attention", q, *pages.args, 3, splits), expected)


def test_paged_attention_of_large_scores_does_not_overflow(device, generator):
    pages = Pages(generator, [40], 1, 64, torch.float32, device)
    q = 300 * torch.randn(1, 2, 64, generator=generator).to(device)
    for version in (1, 2, 3):
        out = run("paged_attention", q, *pages.args, version)
        assert_close(out, in_double("paged_attention", q, *pages.args), 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 100, 2])
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (6, 2)])
def test_rope_and_store_into_int8(device, generator, heads, kv_heads, head_dim, dtype):
    qkv, positions, cos_sin, pool, slots = rope_inputs(generator, 9, heads, kv_heads, head_dim, dtype)
    slots[4] = -1
    qkv[2, heads + kv_heads :] = 0  # a token whose values are zero
    codes = torch.full(pool.shape, 99, dtype=torch.int8)
    scales = torch.full(pool.shape[:-1], 7.0)
    expected = codes.clone(), scales.clone()
    arguments = qkv, positions, cos_sin
    expected_q = reference.rope_and_store(*arguments, *expected[0], slots, heads, *expected[1])
    codes, scales = codes.to(device), scales.to(device)
    q = run("rope_and_store", *(x.to(device) for x in arguments), *codes, slots.to(device), heads, *scales)
    assert_close(q, expected_q.double())
    torch.testing.assert_close(scales.cpu(), expected[1], rtol=TOLERANCE[dtype] / 2, atol=0)
    assert (codes.cpu().int() - expected[0].int()).abs().max() <= 1  # where rounding falls on a half
    assert (codes.cpu() != expected[0]).float().mean() < 0.01


def to_int8(pages):
    """The same pages, quantised: what no sequence owns has a scale of NaN."""
    (k, k_scale), (v, v_scale) = (reference.quantize(pool.cpu().nan_to_num(0)) for pool in (pages.k, pages.v))
    for pool, scale in ((pages.k, k_scale), (pages.v, v_scale)):
        scale[pool.cpu().isnan().any(-1)] = float("nan")
    device = pages.k.device
    args = k.to(device), v.to(device), pages.block_tables, pages.seq_lens
    return args, {"k_scale": k_scale.to(device), "v_scale": v_scale.to(device)}


def int8_in_double(op, *args, k_scale, v_scale):
    return in_double(op, *args, k_scale, v_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version, splits", [(1, 0), (2, 0), (3, 3)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_attention_over_int8(device, generator, version, splits, head_dim, dtype):
    args, scales = to_int8(Pages(generator, [1, 15, 16, 17, 0, 70], 2, head_dim, dtype, device))
    q = torch.randn(6, 6, head_dim, generator=generator).to(device, dtype)
    out = run("paged_attention", q, *args, version, splits, **scales)
    assert_close(out, int8_in_double("paged_attention", q, *args, **scales))
    assert out[4].eq(0).all()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_prefill_over_int8(device, generator, version, dtype, head_dim):
    new, lengths = [20, 7, 1, 0, 66], [20, 40, 33, 9, 70]
    args, scales = to_int8(Pages(generator, lengths, 2, head_dim, dtype, device))
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], device=device)
    q = torch.randn(sum(new), 4, head_dim, generator=generator).to(device, dtype)
    out = run("paged_prefill_attention", q, *args, starts, max(new), version, **scales)
    assert_close(out, int8_in_double("paged_prefill_attention", q, *args, starts, max(new), **scales))


def test_int8_pages_without_scales_or_with_half_of_them_are_refused(device, generator):
    args, scales = to_int8(Pages(generator, [5], 1, 64, torch.float32, device))
    q = torch.randn(1, 2, 64, generator=generator).to(device)
    with pytest.raises(RuntimeError, match="k_cache .* must be of the same dtype"):
        run("paged_attention", q, *args)
    with pytest.raises(RuntimeError, match="v_cache .* must be of the same dtype"):
        run("paged_attention", q, *args, k_scale=scales["k_scale"])
    with pytest.raises(RuntimeError, match=r"v_scale .* must be \[num_blocks, block_size, kv_heads\] float32"):
        run("paged_attention", q, *args, k_scale=scales["k_scale"], v_scale=scales["v_scale"].double())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_prefill(device, generator, version, dtype, head_dim):
    """A whole prompt, a chunk in its middle, one token, a sequence without queries, and a chunk over two tiles."""
    new, lengths = [20, 7, 1, 0, 66], [20, 40, 33, 9, 70]
    pages = Pages(generator, lengths, 2, head_dim, dtype, device)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], device=device)
    q = torch.randn(sum(new), 4, head_dim, generator=generator).to(device, dtype)
    out = run("paged_prefill_attention", q, *pages.args, starts, max(new), version)
    assert_close(out, in_double("paged_prefill_attention", q, *pages.args, starts, max(new)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (5, 1), (9, 3)])
def test_paged_prefill_with_any_group(device, generator, heads, kv_heads, dtype):
    pages = Pages(generator, [18, 65], kv_heads, 64, dtype, device, block_size=3)
    starts = torch.tensor([0, 18, 20], device=device)
    q = torch.randn(20, heads, 64, generator=generator).to(device, dtype)
    out = run("paged_prefill_attention", q, *pages.args, starts, 18)
    assert_close(out, in_double("paged_prefill_attention", q, *pages.args, starts, 18))


def test_nothing_to_do_launches_nothing(device):
    k, v = torch.zeros(2, 3, 4, 2, 64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    tables = torch.zeros(0, 1, dtype=torch.int64, device=device)
    assert run("paged_attention", torch.zeros(0, 4, 64, device=device), k, v, tables, none).shape == (0, 4, 64)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    out = run("paged_prefill_attention", torch.zeros(0, 4, 64, device=device), k, v, tables, none, start, 0)
    assert out.shape == (0, 4, 64)


@pytest.mark.parametrize("head_dim", [100, 4, 264])
def test_head_dims_that_no_kernel_has_are_refused_by_name(head_dim):
    load_kernels("cpu")
    k, v = torch.zeros(2, 1, 4, 1, head_dim)
    tables, lens = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=f"head_dim={head_dim}: must be a multiple of 8, at most 256"):
        run("paged_attention", torch.zeros(1, 1, head_dim), k, v, tables, lens)


def test_offsets_do_not_wrap(tmp_path):
    """CASES C44, without gigabytes: the offset of a slot beyond 2^31 elements is computed in 64 bits."""
    source = tmp_path / "offsets.cu"
    source.write_text("""
#include "attention.h"
int main() {
  const int64_t table[] = {0, 131072, 16000000};  // blocks of 16 tokens of 8 heads of 128
  bool right = row_of(slot_of(table, 16, 16), 7, 8) * 128 == 131072LL * 16 * 8 * 128 + 7 * 128
            && row_of(slot_of(table, 47, 16), 0, 32) * 128 == (16000000LL * 16 + 15) * 32 * 128;
  return right ? 0 : 1;
}
""")
    import subprocess

    from torch.utils.cpp_extension import include_paths

    from minillm.kernels.build import FOLDER

    program = tmp_path / "offsets"
    includes = [f"-I{path}" for path in [FOLDER, *include_paths()]]
    subprocess.run(["g++", "-std=c++20", "-Wno-unknown-pragmas", "-x", "c++", source, *includes, "-x", "none",
                    f"-L{os.path.dirname(torch.__file__)}/lib", "-ltorch", "-ltorch_cpu", "-lc10", "-o", program],
                   check=True)  # fmt: skip
    subprocess.run([program], check=True, env={"LD_LIBRARY_PATH": f"{os.path.dirname(torch.__file__)}/lib"})

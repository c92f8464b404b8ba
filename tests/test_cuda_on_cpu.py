"""The simulator's intrinsics, each against what it means."""

from pathlib import Path

import numpy as np
import pytest
import torch

from minillm.kernels import sandbox
from minillm.kernels.sandbox import Sandbox

FILE = Path(__file__).parent / "kernel_zoo" / "intrinsics.cu"
LANES = np.arange(32)
SCHEDULES = ["in_order", "reversed", "random"]


@pytest.fixture(params=SCHEDULES)
def call(request):
    def call(function, *args):
        Sandbox(FILE).call(function, *args, schedule=request.param)

    return call


def some(*shape, low=-100, high=100, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape, dtype=np.int32)


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("argument", [0, 1, 3, 8, 16, 31])
def test_shuffles(call, argument, width):
    x, out = some(32), np.zeros((4, 32), np.int32)
    call("shuffle", x, out, argument, width)
    first, last = LANES // width * width, LANES // width * width + width - 1
    up, down, xor = LANES - argument, LANES + argument, LANES ^ argument
    sources = [
        first + argument % width,
        np.where(up >= first, up, LANES),
        np.where(down <= last, down, LANES),
        np.where(xor <= last, xor, LANES),
    ]
    assert out.tolist() == [x[source].tolist() for source in sources]


def test_votes_and_reductions(call):
    x, out = some(32), np.zeros((8, 32), np.int32)
    call("vote", x, out)
    expected = [
        np.packbits(x > 0, bitorder="little").view(np.int32)[0],
        2 * (x > 90).any() + (x > -99).all(),
        x.sum(), x.min(), x.max(),
        np.bitwise_and.reduce(x), np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x),
    ]  # fmt: skip
    assert out.tolist() == [[int(e)] * 32 for e in expected]


def test_values_of_every_size_are_shuffled(call):
    out = np.zeros(32)
    call("shuffled_types", out)
    assert out.tolist() == [(31 - lane) * 3 + 1 for lane in range(32)]


def test_atomics_over_blocks(call):
    i, u, f = np.zeros(6, np.int32), np.array([-1, 0, 0], np.int32), np.zeros(1, np.float32)
    call("atomics", i, u, f)
    n = np.arange(200)
    assert i[:4].tolist() == [n.sum(), -n.sum(), -50, 199] and 1 <= i[4] <= 200 and i[5] == 7
    assert u.tolist() == [0, 0xFFFF, int(np.bitwise_xor.reduce(1 << n % 3))] and f[0] == 100


def test_dp4a(call):
    a, b, c = (some(100, low=-(2**31), high=2**31 - 1, seed=s) for s in range(3))
    out = np.zeros(100, np.int32)
    call("dp4a", a, b, c, out, 100)
    products = a.view(np.int8).reshape(100, 4).astype(np.int32) * b.view(np.int8).reshape(100, 4)
    assert out.tolist() == (products.sum(1).astype(np.int32) + c).tolist()


def test_mma_is_a_matrix_product(call):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 16, generator=generator).bfloat16(), torch.randn(16, 8, generator=generator).bfloat16()
    d = torch.randn(16, 8, generator=generator)
    expected = d.double() + a.double() @ b.double()

    def bits(x):
        return (x.view(torch.int16).int() & 0xFFFF).contiguous()

    call("mma", bits(a), bits(b), d)
    torch.testing.assert_close(d.double(), expected, rtol=1e-6, atol=1e-5)


def test_load_matrix(call):
    x, out = some(32, 8, low=0, high=2**16), np.zeros((2, 32, 4), np.int32)
    call("load_matrix", x, out)
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        for j in range(4):
            matrix = x[8 * j : 8 * j + 8]
            for transpose, m in enumerate((matrix, matrix.T)):
                pair = int(m[row, column]) | int(m[row, column + 1]) << 16
                assert np.uint32(out[transpose, lane, j]) == pair


def test_the_schedules_are_what_they_say():
    orders = {}
    for schedule in SCHEDULES:
        count, out = np.zeros(1, np.int32), np.zeros((2, 3, 8), np.int32)
        Sandbox(FILE).call("order", count, out, schedule=schedule)
        for block in range(3):  # nobody passes a barrier before all have come
            assert out[1, block].min() > out[0, block].max()
        orders[schedule] = out[0]
    assert orders["in_order"].ravel().tolist() == [16 * b + t for b in range(3) for t in range(8)]
    assert orders["reversed"].ravel().tolist() == [16 * (2 - b) + 7 - t for b in range(3) for t in range(8)]
    assert sorted(orders["random"][0] % 16) == list(range(8)) != (orders["random"][0] % 16).tolist()


def test_fibers_by_ucontext_do_the_same(monkeypatch):
    """What processors without a switch by hand use."""
    monkeypatch.setattr(sandbox, "FLAGS", [*sandbox.FLAGS, "-DCUDA_ON_CPU_UCONTEXT"])
    x, out = some(32), np.zeros((8, 32), np.int32)
    Sandbox(FILE).call("vote", x, out)
    assert out[2].tolist() == [x.sum()] * 32
    clean = FILE.with_name("clean.cu")
    for function in Sandbox(clean).functions:
        out = np.zeros(64, np.float32)
        Sandbox(clean).call(function, out)
        assert out[0] == 1, function
    with pytest.raises(sandbox.KernelError, match="divergent barrier"):
        Sandbox(FILE.with_name("simulator.cu")).call("divergent_barrier", np.zeros(64, np.float32))

"""Faulty kernels, each of which must be caught and named, and correct ones, which must not be."""

import re
from pathlib import Path

import numpy as np
import pytest

from minillm.kernels.sandbox import KernelError, Sandbox

ZOO = Path(__file__).parent / "kernel_zoo"
MODES = {"simulator": None, "address": "address", "thread": "thread"}


def faults():
    for mode in MODES:
        text = (ZOO / f"{mode}.cu").read_text()
        entries = re.findall(r'// expect: (.*)\n(?:.*\n)*?extern "C" void (\w+)', text)
        assert len(entries) == text.count('extern "C"')
        for expected, function in entries:
            yield pytest.param(mode, function, expected, id=f"{mode}-{function}")


@pytest.mark.parametrize("mode, function, expected", list(faults()))
def test_every_fault_is_caught_and_named(mode, function, expected):
    with pytest.raises(KernelError) as error:
        Sandbox(ZOO / f"{mode}.cu").call(function, np.zeros(64, np.float32), sanitizer=MODES[mode])
    first = str(error.value).splitlines()[0]
    assert re.search(expected, first), str(error.value)[:3000]


@pytest.mark.parametrize("schedule", ["reversed", "random"])
@pytest.mark.parametrize("function", ["missing_barrier", "assumed_warp_synchrony", "syncwarp_is_no_syncthreads"])
def test_races_are_seen_in_every_order(function, schedule):
    with pytest.raises(KernelError, match="data race"):
        Sandbox(ZOO / "thread.cu").call(function, np.zeros(64, np.float32), sanitizer="thread", schedule=schedule)


@pytest.mark.parametrize("schedule", ["in_order", "reversed", "random"])
@pytest.mark.parametrize("sanitizer", MODES.values(), ids=MODES)
@pytest.mark.parametrize("function", re.findall(r'extern "C" void (\w+)', (ZOO / "clean.cu").read_text()))
def test_nothing_is_said_of_correct_kernels(function, sanitizer, schedule):
    out = np.zeros(64, np.float32)
    Sandbox(ZOO / "clean.cu").call(function, out, sanitizer=sanitizer, schedule=schedule)
    assert out[0] == 1


# --- the sandbox itself ---


def sandbox(tmp_path, code: str) -> Sandbox:
    path = tmp_path / "mine.cu"
    path.write_text('#include "cuda_on_cpu.h"\n' + code)
    return Sandbox(path)


def error_of(sandbox: Sandbox, *args, **options) -> str:
    with pytest.raises(KernelError) as error:
        sandbox.call(*args, **options)
    return str(error.value).splitlines()[0]


def test_arguments_go_in_and_come_back(tmp_path):
    code = (
        'extern "C" void f(const float* a, int* b, int64_t* c, int n, float x) { b[0] = n, c[1] = int64_t(a[2] * x); }'
    )
    a, b, c = np.array([1, 2, 3], np.float32), np.zeros(2, np.int32), np.zeros(2, np.int64)
    sandbox(tmp_path, code).call("f", a, b, c, -7, 2.5)
    assert b.tolist() == [-7, 0] and c.tolist() == [0, 7] and a.tolist() == [1, 2, 3]


def test_torch_tensors_are_written_in_place(tmp_path):
    import torch

    out = torch.zeros(3)
    sandbox(tmp_path, 'extern "C" void f(float* out) { out[1] = 5; }').call("f", out)
    assert out.tolist() == [0, 5, 0]


@pytest.mark.parametrize(
    "args, message",
    [
        (("g", np.zeros(1, np.float32), 1), 'mine.cu does not define extern "C" void g'),
        (("f", np.zeros(1, np.float32)), "f takes 2 arguments, must be 1"),
        (("f", np.zeros(1, np.float64), 1), "f: out is float*, must be for float64"),
        (("f", 1, 1), "f: out must be a number"),
    ],
    ids=str,
)
def test_calls_that_do_not_fit_are_named(tmp_path, args, message):
    assert message in error_of(sandbox(tmp_path, 'extern "C" void f(float* out, int n) { out[0] = n; }'), *args)


def test_what_does_not_compile_is_named_by_its_line(tmp_path):
    broken = sandbox(tmp_path, 'extern "C" void f(float* out) { out[0] = missing; }')
    assert re.match(
        r"does not compile: mine.cu:2:\d+: error: .*missing", error_of(broken, "f", np.zeros(1, np.float32))
    )


def test_a_hang_and_a_crash_end_the_call_only(tmp_path):
    bad = sandbox(
        tmp_path,
        "__global__ void spin(volatile float* out) { while (out[0] == 0) {} }\n"
        'extern "C" void hang(float* out) { launch(spin, 1, 32, 0, nullptr, out); }\n'
        'extern "C" void crash(float* out) { *(volatile int*)8 = 1; }\n'
        'extern "C" void fine(float* out) { out[0] = 1; }\n',
    )
    out = np.zeros(1, np.float32)
    assert error_of(bad, "hang", out, timeout=1) == "hang: timed out after 1 s"
    assert "crash: crashed (SIGSEGV)" in error_of(bad, "crash", out)
    bad.call("fine", out)
    assert out[0] == 1


def test_unknown_options_are_refused(tmp_path):
    fine = sandbox(tmp_path, 'extern "C" void f(float* out) { launch(+[](float*) {}, 1, 1, 0, nullptr, out); }')
    assert "CUDA_ON_CPU_SCHEDULE=sideways" in error_of(fine, "f", np.zeros(1, np.float32), schedule="sideways")
    with pytest.raises(ValueError, match="sanitizer='memory': must be None, 'address' or 'thread'"):
        fine.call("f", np.zeros(1, np.float32), sanitizer="memory")

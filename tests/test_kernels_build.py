"""The build of the kernels: once, by several processes, killed, without tools; and never at import (CASES C42, C43)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from minillm.kernels import build
from minillm.kernels.build import KernelsUnavailable

# In a process of its own: one small kernel under the name of the one that the self-test launches.
TINY = r"""
#include "tensors.h"
__global__ void tiny(const float* x, float* out) {
  out[threadIdx.x] = x[threadIdx.x] / sqrtf((x[0] * x[0] + x[1] * x[1]) / 2);
}
Tensor rms_norm(Tensor x, Tensor, double, int64_t) {
  Tensor out = torch::stable::empty_like(x);
  launch(tiny, 1, x.size(1), 0, stream_of(x), data<float>(x), mutable_data<float>(out));
  return out;
}
STABLE_TORCH_LIBRARY_IMPL(minillm, DISPATCH_KEY, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); }
"""
BUILD_ONE = f"""
import os, pathlib, sys, torch
from minillm.kernels import build
source = pathlib.Path(os.environ["MINILLM_HOME"]) / f"tiny-{{os.getpid()}}.cu"
source.parent.mkdir(exist_ok=True)
source.write_text({TINY!r})
build.sources = lambda: [source]
build.library_path = lambda device_type, home=source.parent: home / "kernels" / "cpu-0" / "minillm_kernels_cpu.so"
build.LOCK_TIMEOUT_S = float(sys.argv[1]) if len(sys.argv) > 1 else 300
build.load_kernels("cpu")
print(torch.ops.minillm.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).tolist())
"""
RESULT = "[[0.84852"


def start(home: Path, *args, code=BUILD_ONE, **env) -> subprocess.Popen:
    env = {k: v for k, v in (os.environ | {"MINILLM_HOME": str(home)} | env).items() if v is not None}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return out, err


def library(home: Path) -> Path:
    [found] = home.glob("kernels/cpu-*/minillm_kernels_cpu.so")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache with the one kernel built by two processes at once."""
    home = tmp_path_factory.mktemp("home")
    processes = [start(home), start(home)]
    for out, _ in map(finish, processes):
        assert out.startswith(RESULT)
    return home


def test_import_compiles_nothing(tmp_path):
    code = (
        "import minillm.engine, minillm.kernels.llama, minillm.kernels.ops, sys; print('cpp_ext' in str(sys.modules))"
    )
    cases = [{}, {"CUDA_HOME": None}, {"CUDA_HOME": "/nowhere"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CXX": "/nowhere/c++"}]
    processes = [start(tmp_path, code=code, **env) for env in cases]
    for env, process in zip(cases, processes, strict=True):
        assert finish(process) == ("False\n", ""), env
    assert list(tmp_path.iterdir()) == []


def test_two_processes_build_once_and_leave_nothing_else(built):
    assert {p.name for p in library(built).parent.iterdir()} <= {
        "minillm_kernels_cpu.so", "minillm_kernels_cpu.sha256", "lock",
    }  # fmt: skip


def test_what_is_built_is_loaded_without_tools(built):
    before = library(built).stat().st_mtime_ns
    out, _ = finish(start(built, PATH="/nowhere"))
    assert out.startswith(RESULT)
    assert library(built).stat().st_mtime_ns == before


def test_a_damaged_cache_is_built_again(built, tmp_path):
    processes = {}
    for damage in ("cut in half", "no checksum", "nothing but a lock"):
        folder = tmp_path / damage / "kernels" / library(built).parent.name
        folder.mkdir(parents=True)
        (folder / "lock").write_text("12345")
        if damage != "nothing but a lock":
            content = library(built).read_bytes()
            (folder / library(built).name).write_bytes(content[: len(content) // 2])
        if damage == "cut in half":
            (folder / "minillm_kernels_cpu.sha256").write_text(library(built).with_suffix(".sha256").read_text())
        processes[damage] = start(tmp_path / damage)
    for damage, process in processes.items():
        out, _ = finish(process)
        assert out.startswith(RESULT) and build._is_whole(library(tmp_path / damage)), damage


def test_a_killed_build_is_no_obstacle(tmp_path):
    process = start(tmp_path)
    end = time.time() + 60
    while not list(tmp_path.glob("kernels/cpu-*/build-*/main.cpp")) and time.time() < end:
        time.sleep(0.05)
    time.sleep(0.5)  # the compiler runs now
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    [left] = tmp_path.glob("kernels/cpu-*/build-*")
    os.utime(left, (0, 0))  # long ago
    out, _ = finish(start(tmp_path))
    assert out.startswith(RESULT)
    assert not left.exists()


def test_a_lock_that_is_never_released_is_waited_for_only_so_long(built, tmp_path):
    folder = tmp_path / "kernels" / library(built).parent.name
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"):
        out, err = finish(start(tmp_path, 1.0))
    assert out.startswith(RESULT)
    assert f"{folder / 'lock'}: held for 1 s by another process, building without it" in err


def test_the_environments_ninja_is_found_off_path(tmp_path):
    """PATH without the virtual environment's bin directory, and without a ninja."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        if folder == os.path.dirname(sys.executable) or not os.path.isdir(folder):
            continue
        for tool in os.scandir(folder):
            if tool.name != "ninja" and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool.path)
    out, _ = finish(start(tmp_path / "home", PATH=str(tools)))
    assert out.startswith(RESULT)


# --- what is missing is named -------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    return tmp_path


def refusal(device_type: str) -> str:
    with pytest.raises(KernelsUnavailable) as error:
        build._load(device_type)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_compiler(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "no C++ compiler: '/nowhere/c++' is not on PATH" in refusal("cpu")


def test_no_ninja(empty_cache, monkeypatch):
    found = build._tool
    monkeypatch.setattr(build, "_tool", lambda name: None if name == "ninja" else found(name))
    assert "pip install ninja" in refusal("cpu")


def test_code_that_does_not_compile(empty_cache, monkeypatch):
    wrong = empty_cache / "wrong.cu"
    wrong.write_text('#include "cuda_on_cpu.h"\n\nint f() { return missing; }\n')
    monkeypatch.setattr(build, "sources", lambda: [wrong])
    message = refusal("cpu")
    assert message.startswith("the kernels could not be built") and f"{wrong}:3:" in message and "missing" in message
    wrong.write_text('#include "cuda_on_cpu.h"\n')  # and a second build in the same process works
    build._load("cpu")
    assert build._is_whole(build.library_path("cpu"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_torch_without_cuda(empty_cache, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert "is built without CUDA: install a CUDA build" in refusal("cuda")


@pytest.fixture
def fake_cuda(empty_cache, monkeypatch):
    """A torch that was built with CUDA 13.0, and an nvcc that prints what the test says."""
    from torch.utils import cpp_extension

    home = empty_cache / "cuda"
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"

    def install(release: str, architectures: str = "compute_80 compute_90"):
        nvcc.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "release {release}, V{release}.1" || echo {architectures}\n'
        )
        nvcc.chmod(0o755)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(home))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    return install


def test_no_nvcc(fake_cuda, monkeypatch):
    assert "has no bin/nvcc. Install the CUDA toolkit 13.0" in refusal("cuda")
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "it is not on PATH and CUDA_HOME is not set" in refusal("cuda")


def test_nvcc_of_another_cuda(fake_cuda):
    fake_cuda("12.4")
    assert "nvcc release 12.4 at" in refusal("cuda")


def test_nvcc_that_does_not_know_the_card(fake_cuda, monkeypatch):
    fake_cuda("13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "12.1")
    assert "cannot build for compute capability 12.1" in refusal("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_to_build_for(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(KernelsUnavailable, match="no GPU to build for: set TORCH_CUDA_ARCH_LIST"):
        build.library_path("cuda")


def test_kernels_that_do_not_run_or_compute_wrongly_are_found_at_once(monkeypatch):
    build.load_kernels("cpu")

    def no_image(*_):
        raise RuntimeError("CUDA: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.ops.minillm, "rms_norm", no_image, raising=False)
    with pytest.raises(KernelsUnavailable, match="do not run: CUDA: no kernel image"):
        build._self_test("cpu")
    monkeypatch.setattr(torch.ops.minillm, "rms_norm", lambda x, *_: x, raising=False)
    with pytest.raises(KernelsUnavailable, match=r"compute wrongly: rms_norm\(\[3, 4\]\) gave \[\[3.0, 4.0\]\]"):
        build._self_test("cpu")


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match="device_type='mps': must be 'cpu' or 'cuda'"):
        build.load_kernels("mps")

"""What nvcc makes of the kernels, which needs no GPU: registers, spills, and the width of loads."""

import os
import re
import shutil
import subprocess

import pytest
from torch.utils.cpp_extension import include_paths

from minillm.kernels import build

ARCHITECTURES = ["80", "90"]
# The most registers a thread may take. A multiprocessor has 65,536: with 64, 1,024 threads fit; with 128, 512.
BUDGET = {
    "rms_norm_row_per_thread": 64,
    "rms_norm_block_per_row": 64,
    "rms_norm_in_registers": 80,
    "rope_and_store_kernel": 64,
    "rope_and_quantize_kernel": 64,
    "silu_and_mul_kernel": 32,
    "gemv_kernel": 64,
    "quantize_kernel": 40,
    "linear_w8a16_gemv": 80,
    "linear_w8a16_gemm": 128,
    "linear_w8a8_dp4a": 128,
    "linear_w8a8_tensor_cores": 128,
    "best_token": 32,
    "unpack_tokens": 32,
    "sample_kernel": 64,
    "decode_attention_kernel": 64,
    "paged_attention_per_head": 64,
    "paged_attention_packed": 255,  # queries and sums of eight heads: two blocks of 128 threads fit
    "merge_splits": 64,
    "paged_prefill_shared": 128,
    "paged_prefill_tensor_cores": 255,
}
STREAMING = [  # the kernels that are as fast as the memory, in the form that aligned tensors take
    r"rms_norm_in_registers<.*",
    r"rope_and_store_kernel<(c10::BFloat16|c10::Half), 8>",
    r"rope_and_store_kernel<float, 4>",
    r"silu_and_mul_kernel<.*, [48]>",
    r"gemv_kernel<.*, [48], \d, \d>",
    r"best_token<.*, [48]>",
    r"paged_attention_packed<([\w:]+), \1, .*",
    r"paged_prefill_tensor_cores<\d+, c10::BFloat16>",
    r"quantize_kernel<.*, [48]>",
    r"linear_w8a16_gemv<.*, 16, \d>",
    r"linear_w8a16_gemm",
    r"linear_w8a8_dp4a<.*",
    r"linear_w8a8_tensor_cores<.*",
]
WIDE_LOAD = r"ld\.global(\.\w+)*\.(v4\.[a-z]32|v2\.[a-z]64)"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """All kernels, as the extension has them, compiled once for each architecture -> (nvcc's report, {arch: PTX})."""
    nvcc = shutil.which("nvcc")
    if nvcc is None and "nvcc" not in os.environ.get("MINILLM_REQUIRE", ""):
        pytest.skip("no nvcc")
    assert nvcc, "MINILLM_REQUIRE asks for nvcc, and it is not on PATH"
    folder = tmp_path_factory.mktemp("nvcc")
    (folder / "kernels.cu").write_text("\n".join(build.source_texts()))
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    includes = [f"-I{path}" for path in [build.FOLDER, *include_paths()]]
    run = subprocess.run([nvcc, "-std=c++20", *build.CUDA_FLAGS, *targets, *includes, "--keep",
                          "-Xptxas", "-v", "-c", "kernels.cu"], cwd=folder, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr, {a: (folder / f"kernels.compute_{a}.ptx").read_text() for a in ARCHITECTURES}


def readable(names: list[str]) -> dict[str, str]:
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {n: re.sub(r"^void |\(.*", "", line) for n, line in zip(names, out.splitlines(), strict=True)}


@pytest.mark.slow
def test_no_kernel_spills_and_all_keep_their_budget(compiled):
    report, _ = compiled
    entries = re.findall(
        r"Compiling entry function '(\S+)' for 'sm_(\d+)'\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*?Used (\d+) registers",
        report,
        re.S,
    )
    names = readable([entry[0] for entry in entries])
    assert {names[entry[0]].split("<")[0] for entry in entries} == set(BUDGET)
    assert {entry[1] for entry in entries} == set(ARCHITECTURES)
    for mangled, architecture, stack, *spills, registers in entries:
        kernel = f"{names[mangled]} for sm_{architecture}"
        assert spills == ["0", "0"] and stack == "0", f"{kernel}: {stack} bytes of stack, spills {spills}"
        assert int(registers) <= BUDGET[names[mangled].split("<")[0]], f"{kernel}: {registers} registers"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streams_are_read_16_bytes_at_a_time(compiled, architecture):
    functions = re.split(r"\n(?=\.visible \.entry)", compiled[1][architecture])[1:]
    mangled = [re.search(r"\.entry (\w+)", function)[1] for function in functions]
    names = readable(mangled)
    found = set()
    for name, function in zip(mangled, functions, strict=True):
        for pattern in STREAMING:
            if re.fullmatch(pattern, names[name]):
                found.add(pattern)
                assert re.search(WIDE_LOAD, function), f"{names[name]} for sm_{architecture} has no 16-byte load"
    assert found == set(STREAMING)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tensor_cores_are_used(compiled, architecture):
    ptx = compiled[1][architecture]
    assert ptx.count("mma.sync.aligned.m16n8k16") > 100 and "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert ptx.count("mma.sync.aligned.m16n8k32") > 10 and "dp4a" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("file", ["minillm/kernels/first_kernels.cu", "lessons/07_kernels/exercise.cu"])
def test_the_lessons_kernels_are_cuda_too(compiled, tmp_path, file):
    source = build.FOLDER.parent.parent / file
    command = ["nvcc", "-std=c++17", f"-I{build.FOLDER}", "-arch=sm_90", "-c", source, "-o", tmp_path / "out.o"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

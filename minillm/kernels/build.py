"""Builds the kernels with `torch.utils.cpp_extension.load_inline`, when they are first asked for, never at import.

One extension from all .cu files: for CUDA tensors by nvcc, for CPU tensors by the C++ compiler with cuda_on_cpu.h. It
is kept in the cache under a hash of everything that goes into it, so it is built once.

Several processes may come here at once, and any of them may be killed. So each build has a folder of its own, and its
result is moved into place in one step: what lies there is whole (and checked). The lock only saves double work. It
belongs to a process, not to a file, so it goes when its process goes; and nobody waits for it longer than
LOCK_TIMEOUT_S, since to build without it is safe.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import filelock
import torch

from ..model.weights import home

FOLDER = Path(__file__).parent
LOCK_TIMEOUT_S = 300
CPU_FLAGS = ["-O2", "-g1", "-Wno-unknown-pragmas"] + (["-fopenmp"] if sys.platform == "linux" else [])
CUDA_FLAGS = ["-O3", "-lineinfo", "-DUSE_CUDA", "--threads=2"]

log = logging.getLogger(__name__)
_loaded: set[str] = set()  # device types whose kernels are registered in this process
_lock = threading.Lock()


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be had here. The message says what is missing and how to get it."""


def load_kernels(device_type: str = "cpu") -> None:
    """Make `torch.ops.minillm.*` work on tensors of this device type, "cpu" or "cuda".

    The first call ever builds (CPU: about 20 s on 2 cores); later processes load what was built. KernelsUnavailable if
    there is no toolchain, or the build or the kernels' self-test fails.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r}: must be 'cpu' or 'cuda'")
    with _lock:
        if device_type in _loaded:
            return
        _load(device_type)
        _self_test(device_type)
        _loaded.add(device_type)


def sources() -> list[Path]:
    """The .cu files of the extension."""
    return sorted(
        path for path in FOLDER.glob("*.cu") if path.name != "first_kernels.cu"
    )  # the lesson's, without torch


def source_texts() -> list[str]:
    """Their texts. #line: the compiler, the debugger and the simulator name the file that the reader knows."""
    return [f'#line 1 "{path}"\n{path.read_text()}' for path in sources()]


def library_path(device_type: str) -> Path:
    """Where the built extension is kept: its folder's name is a hash of sources, flags, torch and what it runs on."""
    digest = hashlib.sha256()
    for path in [*sources(), *sorted(FOLDER.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    target = [" ".join(CPU_FLAGS), _compiler()] if device_type == "cpu" else [" ".join(CUDA_FLAGS), _architectures()]
    digest.update("\0".join([torch.__version__, sys.platform, os.uname().machine, *target]).encode())
    return home() / "kernels" / f"{device_type}-{digest.hexdigest()[:16]}" / f"minillm_kernels_{device_type}.so"


# --- build and load -----------------------------------------------------------------------------------------------


def _load(device_type: str) -> None:
    from . import ops  # noqa: F401  declares the ops that the library implements

    library = library_path(device_type)
    if not _is_whole(library):
        check_toolchain(device_type)
        library.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(library.parent / "lock")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except filelock.Timeout:
            log.warning("%s: held for %d s by another process, building without it", lock.lock_file, LOCK_TIMEOUT_S)
        try:
            if not _is_whole(library):  # else another process was faster
                _build(device_type, library)
                return  # load_inline has loaded it
        finally:
            lock.release()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise KernelsUnavailable(
            f"{library} cannot be loaded: {error}. Delete its folder to build it again."
        ) from error


def _is_whole(library: Path) -> bool:
    """Is it there, with the content that it was built with?"""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == library.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _build(device_type: str, library: Path) -> None:
    from torch.utils import cpp_extension

    if sys.stderr.isatty():
        print(f"minillm: building the kernels for {device_type} tensors (once, about half a minute)", file=sys.stderr)
    _remove_abandoned(library.parent)
    code = source_texts()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder, _tools_on_path():
        options = {"extra_include_paths": [str(FOLDER)], "build_directory": folder, "is_python_module": False,
                   "no_implicit_headers": True}  # fmt: skip
        try:
            if device_type == "cuda":
                os.environ["TORCH_CUDA_ARCH_LIST"] = _architectures()
                cpp_extension.CUDA_HOME = _toolkit(_nvcc())
                cpp_extension.load_inline(
                    library.stem, [""], code, extra_cuda_cflags=CUDA_FLAGS, extra_cflags=["-DUSE_CUDA"], **options
                )
            else:
                cpp_extension.load_inline(library.stem, code, extra_cflags=CPU_FLAGS, **options)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            raise KernelsUnavailable(f"the kernels could not be built: {_first_error(str(error))}") from error
        [built] = Path(folder).glob("*.so")  # torch counts a name's builds in a process: ..._v1.so
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        (Path(folder) / "sha256").write_text(digest)
        os.replace(built, library)
        os.replace(Path(folder) / "sha256", library.with_suffix(".sha256"))


def _remove_abandoned(folder: Path, older_than_s: float = 3600) -> None:
    """Delete what builds have left that were killed."""
    for left in folder.glob("build-*"):
        if time.time() - left.stat().st_mtime > older_than_s:
            shutil.rmtree(left, ignore_errors=True)


def _first_error(output: str) -> str:
    """What a person wants to see of a compiler's output: its first error; without one, all of it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern in (r"cannot find|undefined reference", r"\berror\b.*:|: error\b", r"(?i)error"):
        if found := [line for line in lines if re.search(pattern, line)]:
            return found[0]
    return " ".join(lines)


def _self_test(device_type: str) -> None:
    """A launch of the smallest kernel: an architecture the card lacks shows here, and not in the middle of work."""
    x = torch.tensor([[3.0, 4.0]], device=device_type)
    try:
        out = torch.ops.minillm.rms_norm(x, torch.ones_like(x[0]), 0.0).cpu()
    except RuntimeError as error:
        where = f" (built for {_architectures()}, the card is {_card()})" if device_type == "cuda" else ""
        raise KernelsUnavailable(f"the kernels were built, but do not run{where}: {error}") from error
    if not torch.allclose(out, torch.tensor([[0.848528, 1.131371]])):
        raise KernelsUnavailable(f"the kernels were built, but compute wrongly: rms_norm([3, 4]) gave {out.tolist()}")


# --- toolchain ----------------------------------------------------------------------------------------------------


def _compiler() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _tool(name: str) -> str | None:
    """Where a tool is: on PATH, or in the environment's own bin directory, which need not be on it."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


class _tools_on_path:
    """torch looks for ninja on PATH only."""

    def __enter__(self):
        self.path = os.environ.get("PATH", "")
        os.environ["PATH"] = os.pathsep.join([self.path, os.path.dirname(sys.executable)])

    def __exit__(self, *_):
        os.environ["PATH"] = self.path


def check_toolchain(device_type: str) -> None:
    """KernelsUnavailable, with what is missing, if the kernels cannot be built here for this device type."""
    if device_type == "cuda":
        _check_cuda()
    else:
        _check_cpu()


def _check_cpu() -> None:
    if os.name != "posix":
        raise KernelsUnavailable("the simulator runs on Linux and macOS: on Windows use WSL")
    compiler = _compiler()
    if not _tool(compiler):
        how = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++, say"
        raise KernelsUnavailable(f"no C++ compiler: {compiler!r} is not on PATH ({how}; another one: set CXX)")
    if not _tool("ninja"):
        raise KernelsUnavailable("no ninja, which torch builds with: pip install ninja")


def _check_cuda() -> None:
    if torch.version.cuda is None:
        raise KernelsUnavailable(f"torch {torch.__version__} is built without CUDA: install a CUDA build (pytorch.org)")
    _check_cpu()
    nvcc = _nvcc()
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", text)
    if not version or version[1] != torch.version.cuda.split(".")[0]:
        found = version[0] if version else "of an unknown version"
        raise KernelsUnavailable(f"nvcc {found} at {nvcc}, but torch was built with CUDA {torch.version.cuda}: "
                                 f"the first number must be the same")  # fmt: skip
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    for architecture in re.findall(r"\d+\.\d+", _architectures()):
        if f"compute_{architecture.replace('.', '')}" not in known.split():
            raise KernelsUnavailable(f"nvcc {version[0]} cannot build for compute capability {architecture}")


def _nvcc() -> Path:
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = Path(CUDA_HOME or "/nowhere") / "bin" / "nvcc"
    if not nvcc.exists():
        where = f"CUDA_HOME={CUDA_HOME} has no bin/nvcc" if CUDA_HOME else "it is not on PATH and CUDA_HOME is not set"
        raise KernelsUnavailable(f"no nvcc: {where}. Install the CUDA toolkit {torch.version.cuda}")
    return nvcc


def _toolkit(nvcc: Path) -> str:
    """Where nvcc's own toolkit is. torch takes the folder above nvcc's, which misleads where nvcc is a link or a script
    that calls another one: the libraries lie elsewhere then."""
    plan = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    return str(Path(top[1]).resolve()) if top else str(nvcc.parent.parent)


def _architectures() -> str:
    """What to build for: TORCH_CUDA_ARCH_LIST, or the card that is there."""
    if wanted := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return wanted
    if not torch.cuda.is_available():
        raise KernelsUnavailable("no GPU to build for: set TORCH_CUDA_ARCH_LIST, 9.0 for an H100, say")
    return "{}.{}".format(*torch.cuda.get_device_capability())


def main() -> int:
    """`python -m minillm.kernels.build cpu` or `... cuda`: build, load, and say which ops are there. For cuda without a
    GPU (TORCH_CUDA_ARCH_LIST says what to build for) all but the launch of a kernel."""
    from .ops import SCHEMAS

    parser = argparse.ArgumentParser(prog="python -m minillm.kernels.build", description=main.__doc__)
    parser.add_argument("device", choices=["cpu", "cuda"], help="what tensors the kernels are for")
    device = parser.parse_args().device
    runs = device == "cpu" or torch.cuda.is_available()
    try:
        load_kernels(device) if runs else _load(device)
        library = library_path(device)
    except KernelsUnavailable as error:
        print(f"minillm: error: {error}", file=sys.stderr)
        return 1
    key = device.upper()
    missing = [op for op in SCHEMAS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"minillm::{op}", key)]
    print(f"{library}: {len(SCHEMAS) - len(missing)} of {len(SCHEMAS)} ops registered for {key}"
          + (f", missing: {', '.join(missing)}" if missing else "")
          + ("" if runs else "; no GPU here, so no kernel was launched"))  # fmt: skip
    return 1 if missing else 0


def _card() -> str:
    return "{} with {}.{}".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())


if __name__ == "__main__":
    sys.exit(main())

"""What this machine has, and what each missing thing costs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from .kernels import build
from .model.weights import DEFAULT_FILE, home, resolve_dtype


@dataclass(frozen=True)
class Finding:
    name: str
    found: str | None  # None: missing
    cost: str = ""  # what it costs to be without it


def examine() -> list[Finding]:
    """Look at everything; takes about a second, which the bandwidth's measurement needs."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    model = home() / "models" / DEFAULT_FILE
    cpu = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used, {platform.machine()}"
    return [
        Finding("Python", sys.version.split()[0]),
        Finding("torch", f"{torch.__version__}, auto dtype on the CPU: {resolve_dtype('auto', torch.device('cpu'))}"),
        Finding("CPU", cpu),
        Finding("memory bandwidth", f"{read_bandwidth() / 1e9:.0f} GB/s read: the ceiling of decode on the CPU"),
        Finding("GPU", gpu, "everything runs on the CPU, more slowly"),
        Finding("nvcc", _version("nvcc"), "the kernels cannot be built for a GPU"),
        Finding("g++", _version("g++"), "the kernels cannot be built for the CPU either; plain torch is used"),
        Finding("ninja", _version("ninja"), "the kernels cannot be built (pip install ninja)"),
        *_kernels(),
        Finding("model cache", str(model) if model.exists() else None, "the first run fetches 93 MB"),
    ]


def read_bandwidth(seconds: float = 1.0, num_bytes: int = 256 << 20) -> float:
    """Bytes per second of reading a tensor larger than the caches, the median of what fits into `seconds`."""
    data = torch.ones(num_bytes // 4)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(times)


def report(findings: list[Finding]) -> str:
    width = max(len(f.name) for f in findings)
    return "\n".join(f"{f.name.ljust(width)}  {f.found or 'missing: ' + f.cost}" for f in findings)


def _kernels() -> list[Finding]:
    """The handwritten kernels: built, still to be built, or what keeps them from being built."""
    found = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        name = "kernels on a GPU" if device == "cuda" else "kernels on the CPU"
        try:
            library = build.library_path(device)
            if not library.exists():
                build.check_toolchain(device)
            state = f"built: {library}" if library.exists() else "not built yet: the first use takes half a minute"
            found.append(Finding(name, state))
        except build.KernelsUnavailable as error:
            found.append(Finding(name, None, f"{error}; plain torch is used"))
    return found


def _version(command: str) -> str | None:
    # A tool of the virtual environment counts, also where its bin directory is not on PATH.
    path = shutil.which(command) or shutil.which(command, path=os.path.dirname(sys.executable))
    if path is None:
        return None
    lines = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return next((line for line in lines if re.search(r"\d+\.\d+\.\d+", line)), path)

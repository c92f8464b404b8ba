"""Runs a .cu file that may do anything: a student's kernels, on the simulator, each call in a process of its own.

The file is compiled together with a main that calls its `extern "C"` functions by name. Arguments go through a file;
each buffer gets memory of exactly its size, so that AddressSanitizer sees the first byte beyond it. What goes wrong,
in the compiler, the simulator, a sanitizer or by a crash, becomes a KernelError whose first line says it all.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import signal
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..model.weights import home
from .build import FOLDER, KernelsUnavailable, _compiler, _tool

FLAGS = ["-std=c++17", "-g", "-Wno-unknown-pragmas", "-rdynamic"]
SANITIZERS = {
    None: [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],  # and misaligned accesses
    "thread": ["-fsanitize=thread"],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:atexit_sleep_ms=0",
}
DTYPES = {"float": np.float32, "double": np.float64, "int": np.int32, "int32_t": np.int32, "int64_t": np.int64}

MAIN = r"""
#include <cstdio>
#include <vector>
#include "{source}"

struct Argument {{ char kind; int64_t size; double number; char* buffer; }};

int main(int, char** argv) {{
  std::FILE* in = std::fopen(argv[2], "rb");
  std::vector<Argument> args;
  for (Argument a; std::fread(&a.kind, 1, 1, in) == 1; args.push_back(a)) {{
    if (a.kind == 'n') {{ if (std::fread(&a.number, 8, 1, in) != 1) return 9; continue; }}
    if (std::fread(&a.size, 8, 1, in) != 1) return 9;
    a.buffer = static_cast<char*>(malloc(a.size));
    if (a.size && std::fread(a.buffer, a.size, 1, in) != 1) return 9;
  }}
  std::string name = argv[1];
  try {{
{calls}
  }} catch (const std::exception& error) {{
    std::fprintf(stderr, "kernel error: %s\n", error.what());
    return 3;
  }}
  std::FILE* out = std::fopen(argv[3], "wb");
  for (auto& a : args)
    if (a.kind == 'b') std::fwrite(a.buffer, 1, a.size, out);
  std::fclose(out);
  return 0;
}}
"""


class KernelError(Exception):
    """What went wrong in a kernel. The first line is for people; the rest is the tool's own report."""


@dataclass(frozen=True)
class Parameter:
    type: str  # without const and *: "float"
    is_pointer: bool
    name: str


def functions(source: Path) -> dict[str, list[Parameter]]:
    """The `extern "C"` functions that a file defines, and their parameters."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source.read_text(), flags=re.S)
    found = {}
    for name, parameters in re.findall(r'extern\s+"C"\s+void\s+(\w+)\s*\(([^)]*)\)\s*\{', text):
        found[name] = []
        for parameter in filter(None, (p.strip() for p in parameters.split(","))):
            match = re.fullmatch(r"(?:const\s+)?(\w+)\s*(\*?)\s*(\w+)", parameter)
            if not match:
                raise KernelError(f"{source.name}: {name}: parameter {parameter!r} is not understood")
            found[name].append(Parameter(match[1], bool(match[2]), match[3]))
    return found


class Sandbox:
    """The functions of one .cu file. optimization: -O0 compiles fastest; whoever measures wants the extension's -O2."""

    def __init__(self, source: Path, optimization: str = "-O0"):
        self.optimization = optimization
        self.source = Path(source).resolve()
        self.functions = functions(self.source)

    def call(
        self,
        function: str,
        *args,
        schedule: str = "in_order",
        sanitizer: str | None = None,
        timeout: float = 30,
    ) -> None:
        """Call a function. Arrays (numpy, or torch on the CPU; contiguous) are passed as pointers, and hold afterwards
        what the kernels wrote; the other arguments are numbers. KernelError for whatever goes wrong."""
        arrays = self._check(function, args)
        program = self._program(sanitizer)
        with tempfile.TemporaryDirectory() as folder:
            given, back = Path(folder) / "given", Path(folder) / "back"
            given.write_bytes(b"".join(_packed(array, arg) for array, arg in zip(arrays, args, strict=True)))
            command = [str(program), function, str(given), str(back)]
            if sanitizer == "thread" and _fixed_addresses():
                command = [*_fixed_addresses(), *command]
            env = os.environ | OPTIONS | {"CUDA_ON_CPU_SCHEDULE": schedule}
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                       text=True, errors="replace", start_new_session=True)  # fmt: skip
            try:
                _, report = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise KernelError(f"{function}: timed out after {timeout:g} s") from None
            if process.returncode:
                raise KernelError(f"{self._explain(function, process.returncode, report)}\n{report}")
            offset, content = 0, back.read_bytes()
            for array in arrays:
                if array is not None:
                    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8, array.nbytes, offset)
                    offset += array.nbytes

    def _check(self, function: str, args: tuple) -> list[np.ndarray | None]:
        """The arguments as arrays, None for a number; each must be what the function's signature says."""
        if function not in self.functions:
            raise KernelError(f'{self.source.name} does not define extern "C" void {function}(...)')
        parameters, arrays = self.functions[function], []
        if len(parameters) != len(args):
            raise KernelError(f"{function} takes {len(parameters)} arguments, must be {len(args)}")
        for parameter, arg in zip(parameters, args, strict=True):
            array = None if isinstance(arg, int | float) else np.asarray(arg)
            if parameter.is_pointer != (array is not None):
                raise KernelError(f"{function}: {parameter.name} must be a {'number' if array is None else 'pointer'}")
            if array is not None and array.dtype != DTYPES.get(parameter.type):
                raise KernelError(f"{function}: {parameter.name} is {parameter.type}*, must be for {array.dtype}")
            if array is not None and not array.flags.c_contiguous:
                raise ValueError(f"{function}: {parameter.name} must be contiguous")
            arrays.append(array)
        return arrays

    def _program(self, sanitizer: str | None) -> Path:
        """The file compiled, from the cache if it was compiled before."""
        if sanitizer not in SANITIZERS:
            raise ValueError(f"sanitizer={sanitizer!r}: must be None, 'address' or 'thread'")
        calls = []
        for name, parameters in self.functions.items():
            values = [f"({p.type}*)args[{i}].buffer" if p.is_pointer else f"({p.type})args[{i}].number"
                      for i, p in enumerate(parameters)]  # fmt: skip
            calls.append(f'    if (name == "{name}") {name}({", ".join(values)});')
        main = MAIN.format(source=self.source, calls="\n".join(calls))
        flags = [*FLAGS, self.optimization, *SANITIZERS[sanitizer]]
        headers = [FOLDER / name for name in ("cuda_on_cpu.h", "intrinsics.h", "fibers.h")]
        key = "\0".join([main, self.source.read_text(), *(h.read_text() for h in headers), _compiler(), *flags])
        program = home() / "kernels" / "sandbox" / hashlib.sha256(key.encode()).hexdigest()[:16]
        if not program.exists():
            if not _tool(_compiler()):
                raise KernelsUnavailable(f"no C++ compiler: {_compiler()!r} is not on PATH (apt-get install g++, say)")
            program.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=program.parent, prefix="build-") as folder:
                (Path(folder) / "main.cpp").write_text(main)
                run = subprocess.run([_compiler(), *flags, f"-I{FOLDER}", "main.cpp", "-o", "program", "-ldl"],
                                     cwd=folder, capture_output=True, text=True)  # fmt: skip
                if run.returncode:
                    raise KernelError(f"{_compile_error(run.stderr, self.source)}\n{run.stderr}")
                os.replace(Path(folder) / "program", program)
        return program

    def _explain(self, function: str, code: int, report: str) -> str:
        """One line for what a tool says in fifty."""
        here = re.escape(self.source.name)
        if match := re.search(r"kernel error: (.*)", report):
            return match[1]
        if match := re.search(r"runtime error: (.*)", report):  # UBSan
            place = re.search(rf"({here}:\d+):\d+: runtime error", report)
            return f"{place[1] if place else function}: {match[1]}"
        if match := re.search(r"ThreadSanitizer: (data race)", report):
            accesses = re.split(r"\n\s*Previous ", report, maxsplit=1)
            kinds = [re.search(r"(?i)(atomic )?(read|write) of size (\d+)", part) for part in accesses]
            lines = [re.search(rf"{here}:\d+", part) for part in accesses]
            kind, other = ((k[2].lower() if k else "access") for k in (*kinds, None)[:2])
            place, before = ((m[0] if m else function) for m in (*lines, None)[:2])
            return f"{place}: data race: a {kind} here and a {other} at {before}, with no barrier between them"
        if match := re.search(r"AddressSanitizer: ([\w-]+)", report):
            place = re.search(rf"{here}:\d+", report)
            access = re.search(r"(READ|WRITE) of size (\d+)", report)
            what = f", a {access[1].lower()} of {access[2]} bytes" if access else ""
            beside = re.search(r"is located (\d+) bytes (.*?) of (?:a )?(\d+)-byte region", report)
            if beside:
                side = "after" if "right" in beside[2] or "after" in beside[2] else "before"
                side = "inside" if "inside" in beside[2] else side
                what += f", {beside[1]} bytes {side} a buffer of {beside[3]} bytes"
            return f"{place[0] if place else function}: {match[1]}{what}"
        if code < 0:
            return f"{function}: crashed ({signal.Signals(-code).name}): run it with sanitizer='address' to see where"
        return f"{function}: ended with exit code {code}"


def _packed(array: np.ndarray | None, number) -> bytes:
    if array is None:
        return b"n" + struct.pack("d", number)
    return b"b" + struct.pack("q", array.nbytes) + array.tobytes()


def _compile_error(output: str, source: Path) -> str:
    errors = [line for line in output.splitlines() if re.search(r"\berror:", line)]
    own = [line for line in errors if source.name in line]
    first = (own or errors or [output.strip().splitlines()[-1] if output.strip() else "the compiler failed"])[0]
    return f"does not compile: {first.replace(str(source), source.name)}"


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """Older ThreadSanitizers cannot work where the kernel scatters addresses widely: setarch turns that off."""
    setarch = _tool("setarch")
    if not setarch:
        return ()
    works = subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0
    return (setarch, "-R") if works else ()

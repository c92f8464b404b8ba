"""The kernels' tests with the kernels built under a sanitizer, in a cache of their own:

    python tests/sanitized.py address            out of bounds and misaligned accesses (AddressSanitizer, UBSan)
    python tests/sanitized.py thread             missing barriers (ThreadSanitizer)

Further options go to pytest (-k "in_order and gemv"). Linux only: the sanitizer's libraries are preloaded.

Threads and blocks run in order: a sanitizer judges what is ordered by barriers, not what happened to come first.
"""

import os
import subprocess
import sys
import tempfile

import torch

from minillm.kernels import build
from minillm.kernels.sandbox import OPTIONS, SANITIZERS, _fixed_addresses

LIBRARIES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}


def main(sanitizer: str, *options: str) -> int:
    """Run the tests in a process that has the sanitizer's libraries from its first instruction on."""
    paths = [subprocess.check_output([build._compiler(), f"-print-file-name={name}"], text=True).strip()
             for name in LIBRARIES[sanitizer]]  # fmt: skip
    env = os.environ | OPTIONS | {"SANITIZED": sanitizer, "LD_PRELOAD": ":".join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        env["MINILLM_HOME"] = os.environ.get("MINILLM_SANITIZED_HOME", folder)
        command = [sys.executable, __file__, "tests/test_kernels.py", "-qsx", "-p", "no:cacheprovider", *options]
        return subprocess.run([*_fixed_addresses(), *command], env=env).returncode


def inside(*options: str) -> int:
    import pytest

    del os.environ["LD_PRELOAD"]  # the compiler needs no sanitizer
    # One OS thread: what both sanitizers and the simulator can follow.
    keep = [flag for flag in build.CPU_FLAGS if flag not in ("-fopenmp", "-O2")]
    build.CPU_FLAGS = [*keep, "-O1", *SANITIZERS[os.environ["SANITIZED"]]]
    torch.set_num_threads(1)
    return pytest.main(["-k", "in_order and not cuda", *options])  # a later -k replaces this one


if __name__ == "__main__":
    if "SANITIZED" in os.environ:
        sys.exit(inside(*sys.argv[1:]))
    if len(sys.argv) < 2 or sys.argv[1] not in LIBRARIES:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))

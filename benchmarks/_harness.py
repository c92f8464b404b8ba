"""What every benchmark shares: options, the machine's description, checks, and the table or JSON that comes out."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Check:
    """A figure that is asked for: `value` must be at least or at most `bound`."""

    name: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a check does not hold")
    parser.add_argument("--save", metavar="FILE", help="also write the JSON here (benchmarks/results/)")
    return parser


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def report(args: argparse.Namespace, rows: list[dict], checks: list[Check], extra: dict | None = None) -> None:
    """Print rows and checks, save them where asked, and exit as --check says. `extra`: further parts of the JSON, of
    which lists of dicts are printed as tables too."""
    result = {
        "benchmark": Path(sys.argv[0]).stem,
        "machine": machine(),
        "rows": rows,
        "checks": [{**asdict(check), "holds": check.holds} for check in checks],
        **(extra or {}),
    }
    if args.save:
        Path(args.save).write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    else:
        for name, part in {"": rows, **(extra or {})}.items():
            if name:
                print(f"\n{name.replace('_', ' ')}")
            _print_table(part if isinstance(part, list) else [part])
        print()
        for check in checks:
            sign = ">=" if check.at_least else "<="
            print(f"{'ok  ' if check.holds else 'FAIL'}  {check.name}: {check.value:.2f} {sign} {check.bound:g}")
    if args.check and not all(check.holds for check in checks):
        sys.exit(1)


def _print_table(rows: list[dict]) -> None:
    columns = list(rows[0])
    lines = [columns, *([_text(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print("\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines))


def _text(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""minillm: LLM inference from scratch, one step at a time, on a real model."""

from importlib import import_module

_PUBLIC = {
    "LLM": ".engine",
    "Completion": ".completion",
    "Metrics": ".completion",
    "SamplingParams": ".model.sampling",
    "load_model": ".model.weights",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    # At first use: importing the package must not import torch, which takes a second (`minillm --help`).
    if name not in _PUBLIC:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name], __name__), name)

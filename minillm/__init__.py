"""minillm: LLM inference from scratch, one step at a time, on a real model."""

from .completion import Completion, Metrics
from .model.sampling import SamplingParams
from .model.weights import load_model

__all__ = ["Completion", "Metrics", "SamplingParams", "load_model"]

"""Tiny models, and the real one, for all tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub

import pytest

from minillm.model.config import ModelConfig
from minillm.model.weights import load_model, random_model


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """6 query and 2 KV heads: counts that hide no mistake, as 64 and 8 would."""
    return ModelConfig(
        vocab_size=259, hidden_size=96, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16,
        intermediate_size=128, max_position_embeddings=256,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
    return random_model(tiny_config)


@pytest.fixture(scope="session")
def default_model():
    """SmolLM2-135M-Instruct in float32; fetched on first use."""
    return load_model(dtype="float32")

"""Task 2.3: the values are forgotten"""

from __future__ import annotations

import torch


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    return config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * num_tokens

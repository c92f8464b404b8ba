"""Task 2.3: all query heads are counted"""

from __future__ import annotations

import torch


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_heads * config.head_dim * dtype.itemsize * num_tokens

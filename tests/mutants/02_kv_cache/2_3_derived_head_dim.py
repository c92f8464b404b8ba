"""Task 2.3: head_dim is taken for hidden_size / num_heads"""

from __future__ import annotations

import torch


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    return (
        2
        * config.num_layers
        * config.num_kv_heads
        * (config.hidden_size // config.num_heads)
        * dtype.itemsize
        * num_tokens
    )

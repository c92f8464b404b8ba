"""Task 3.3: the weights are read again for each token"""

from __future__ import annotations

import torch

from minillm.kv_cache import kv_bytes
from minillm.prefill_decode import PassCost


def pass_cost(config: ModelConfig, num_tokens: int, context: int, dtype: torch.dtype) -> PassCost:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention_weights = config.hidden_size * (q + 2 * kv) + q * config.hidden_size
    layer_weights = attention_weights + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer_weights
    head = config.vocab_size * config.hidden_size
    # Token i of the new ones attends over context + i + 1 keys: twice a product of head_dim per query head.
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    flops = 2 * weights * num_tokens + 2 * head + config.num_layers * 4 * q * pairs
    embedding_rows = num_tokens * config.hidden_size
    kv_traffic = kv_bytes(config, context + 2 * num_tokens, dtype)  # all read, the new ones written before
    return PassCost(flops, (weights * num_tokens + head + embedding_rows) * dtype.itemsize + kv_traffic)

"""Task 2.1: a refused extend has already changed the length"""

from __future__ import annotations

import torch

from minillm.model.llama import attention


class ContiguousCache:
    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0  # tokens whose keys and values are kept, those of the pass under way included
        self.start = 0  # where the tokens of the pass under way go

    def extend(self, num_tokens: int) -> None:
        self.length += num_tokens
        if self.length > self.capacity:
            raise ValueError(f"num_tokens={num_tokens}: the cache holds {self.length} of at most {self.capacity}")
        self.start = self.length - num_tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer, self.start : self.length] = k
        self.v[layer, self.start : self.length] = v
        return attention(q, self.k[layer, : self.length], self.v[layer, : self.length])

    @property
    def kv_bytes(self) -> int:
        return self.k[:, : self.length].nbytes + self.v[:, : self.length].nbytes

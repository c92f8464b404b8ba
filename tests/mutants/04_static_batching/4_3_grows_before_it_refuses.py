"""Task 4.3: the length has grown when the capacity is refused"""

from __future__ import annotations

import minillm.static_batching as module
from minillm.static_batching import *


class PaddedCache(module.PaddedCache):
    def extend(self, real: Tensor) -> Tensor:
        num_rows, T = real.shape
        self.length += T
        if self.length > self.capacity:
            raise ValueError(f"real: {T} columns, the cache holds {self.length} of at most {self.capacity}")
        self.start = self.length - T
        self.real[:, self.start : self.length] = real
        held = self.real[:, : self.length]  # [rows, M]
        columns = torch.arange(self.length, device=real.device)
        causal = columns[None, :] <= columns[self.start :, None]  # [T, M]
        self.mask = causal & held[:, None, :] & real[:, :, None]  # [rows, T, M]
        rows, pads = (~held).nonzero(as_tuple=True)
        self.pads = rows * self.capacity + pads  # as indices into [rows * capacity]
        return (held.cumsum(dim=1)[:, self.start :] - 1).clamp(min=0)

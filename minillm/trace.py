"""What each step of a batch did: the record that the pictures of steps 4 to 6 are drawn from (`plots.py`).

Pass a list as `trace=` to a step's `generate`, or `trace=True` to `LLM`: one `StepTrace` is appended a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RowTrace:
    """The part of one request in one pass."""

    request_id: int
    start: int  # position of its first token in the pass
    num_tokens: int  # tokens that it needed
    decode: bool  # ran the token that it had just chosen, not its prompt
    padding: int = 0  # further places of the pass that were its own and did nothing


@dataclass(frozen=True)
class StepTrace:
    rows: list[RowTrace]
    kv_allocated: int  # tokens that the memory given to requests can hold
    kv_used: int  # tokens that it does hold, after the pass
    waiting: int = 0  # requests in the queue
    preempted: list[int] = field(default_factory=list)  # requests that gave their memory back
    seconds: float = 0.0
    # paged memory only: the pool, block by block
    num_blocks: int = 0
    owners: dict[int, list[int]] = field(default_factory=dict)  # block -> requests that hold it
    cached: list[int] = field(default_factory=list)  # blocks that nobody holds and whose content may be found again

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def free(self) -> int:
        return self.num_blocks - len(self.owners) - len(self.cached)


@dataclass(frozen=True)
class Waste:
    """What a run paid for and did not need."""

    padded_prompt_tokens: int  # places of prefill passes that held no token
    finished_decode_slots: int  # places of decode passes whose request had ended
    kv_waste: float  # part of the memory given to requests that held no token, over all steps
    unused_kv_bytes: float  # the same in bytes, mean over the steps

    @classmethod
    def of(cls, trace: list[StepTrace], bytes_per_token: int = 1) -> Waste:
        """bytes_per_token: `kv_bytes(config, 1, dtype)`; without it, unused_kv_bytes is in tokens."""
        allocated, used = sum(step.kv_allocated for step in trace), sum(step.kv_used for step in trace)
        rows = [row for step in trace for row in step.rows]
        return cls(
            padded_prompt_tokens=sum(row.padding for row in rows if not row.decode),
            finished_decode_slots=sum(row.padding for row in rows if row.decode),
            kv_waste=1 - used / allocated if allocated else 0.0,
            unused_kv_bytes=bytes_per_token * (allocated - used) / len(trace) if trace else 0.0,
        )

"""Types of the compiled extension; its meaning is documented in ktqueue.operators.native."""

from collections.abc import Sequence
from typing import Any

Packed = tuple[str, int, int, Sequence[Any]]

def isa() -> str: ...
def available_cpus() -> int: ...
def threads() -> int: ...
def set_threads(threads: int, spin_microseconds: int) -> None: ...
def row_bytes(quant: str, columns: int) -> int: ...
def dequantize(quant: str, data: Any, out: Any, isa: str = "") -> None: ...
def paged_attention(
    query: Any,
    key: Any,
    value: Any,
    cache_keys: Any,
    cache_values: Any,
    query_starts: Any,
    context_lengths: Any,
    page_table: Any,
    slot_mapping: Any,
    scaling: float,
    sliding_window: int,
    out: Any,
    isa: str = "",
) -> None: ...

class ExpertLayer:
    def __init__(self, gate: Packed, up: Packed, down: Packed, isa: str = "") -> None: ...
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any, out: Any) -> None: ...
    @property
    def isa(self) -> str: ...

"""Fetching: short steps copy a share of their missing experts to the GPU over PCIe, while the CPU computes the rest.

Both read host memory at the same time, and together they reach a higher bandwidth. A step is captured before it is
known which experts it will use, so kernels choose and copy them (kernels/fetch.py). Long steps stream instead
(streaming.py).
The two use the same staging memory, which is safe because no step does both and steps follow one another. While a step
that streams runs beside others, these fetch nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ktqueue.operators.gpu.copy_stream import CopyStream
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import ExpertLocations, ExpertResidency, RoutedLayer
from ktqueue.operators.gpu.kernels.fetch import divide, fetch

Ranges = Sequence[tuple[int, int]]
"""(address, bytes) of the pieces of an expert in host memory, in the order of its record."""


@dataclass(frozen=True, slots=True)
class FetchedShares:
    """The share of a step's missing experts that is fetched, from 0 to 1. `one_token`: in steps of one token,
    whose few experts can only be divided coarsely. `several_tokens`: in all others."""

    one_token: float
    several_tokens: float

    def of(self, tokens: int) -> float:
        """The share for a step of `tokens` tokens."""
        return self.one_token if tokens == 1 else self.several_tokens


class _HostLayer:
    """Where the experts of a layer are in host memory.

    addresses: [experts, parts] int64, for kernels; parts: [parts, 2] int64, start and size in words of 8 bytes; sizes:
    the same in bytes.
    """

    def __init__(self, layer: RoutedLayer, copies: CopyStream) -> None:
        self.sizes, addresses = split_into_parts([layer.packed.ranges(expert) for expert in range(layer.experts)])
        for_kernels = [[copies.device_address(address) for address in row] for row in addresses]
        self.addresses = torch.tensor(for_kernels, dtype=torch.int64, device=copies.device)
        self.parts = torch.tensor(self.sizes, dtype=torch.int64, device=copies.device) // 8


class FetchedExperts(ExpertResidency):
    """Where the experts are during short steps that fetch some of them.

    All host memory of `layers` is pinned, and a part of their experts is in `pool`. resident: the residency whose
    `use_counts` these steps share. shares: how much is fetched. Set it before steps are captured.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream, resident: ExpertResidency
    ) -> None:
        self.shares = FetchedShares(0.0, 0.0)
        self.memory = pool.memory
        self._layers = layers
        self._pool = pool
        self.resident = resident
        self._host_layers = [_HostLayer(layer, copies) for layer in layers]
        # All layers share these: the current layer's are read before the next layer's are written.
        self._offsets = torch.full((pool.host.shape[1],), ABSENT, dtype=torch.int64, device=copies.device)
        self._sources: dict[tuple[int, int], torch.Tensor] = {}  # by number of slots and parts
        self._tokens = 0
        self.allowed = torch.ones(1, device=copies.device)
        """1, or 0 while another step uses the staging memory and the bus. Captured steps read it."""

    def locations(self, layer: int) -> ExpertLocations:
        """See ExpertResidency."""
        offsets = self._offsets[: self._layers[layer].experts]
        return ExpertLocations(offsets, offsets, fixed=False)

    def use_counts(self, layer: int) -> torch.Tensor | None:
        """See ExpertResidency."""
        return self.resident.use_counts(layer)

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """See ExpertResidency and divide."""
        self._tokens = len(ids)
        divide(
            ids,
            self._pool.offsets[layer, : self._layers[layer].experts],
            self._host_layers[layer].addresses,
            self.shares.of(len(ids)),
            self.allowed,
            self._pool.staging_start,
            self._layers[layer].record.bytes,
            offsets=self.locations(layer).gate_up,
            sources=self._sources_of(layer, len(ids)),
            cpu_ids=cpu_ids,
        )

    def wait_for_arrival(self, layer: int) -> None:
        """Copy the chosen experts on the current stream."""
        host, record = self._host_layers[layer], self._layers[layer].record.bytes
        sources = self._sources_of(layer, self._tokens)
        fetch(sources, host.parts, host.sizes, self.memory, self._pool.staging_start, record)

    def fetched(self, layer: int, tokens: int, absent: int) -> int:
        """How many experts a step fetches that uses so many absent ones: see divide."""
        return min(int(self.shares.of(tokens) * absent), self._slots(layer, tokens))

    def _slots(self, layer: int, tokens: int) -> int:
        """The largest number of experts that can be fetched."""
        absent = self._layers[layer].experts - self._pool.slots[layer]
        used = min(tokens * self._layers[layer].experts_per_token, absent)
        return max(1, min(absent, int(self.shares.of(tokens) * used)))

    def _sources_of(self, layer: int, tokens: int) -> torch.Tensor:
        """[slots, parts] int64: host addresses of what is fetched."""
        key = self._slots(layer, tokens), len(self._host_layers[layer].sizes)
        if key not in self._sources:
            self._sources[key] = torch.zeros(key, dtype=torch.int64, device=self.memory.device)
        return self._sources[key]


def split_into_parts(experts: Sequence[Ranges]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Cut the records of a layer's experts at the same places, so that each part is contiguous in all of them.

    Returns the parts as (start, bytes) in a record, and for each expert the address of each part. Raises ValueError if
    the experts differ in size.
    """
    bounds = [[0, *accumulate(size for _, size in ranges)] for ranges in experts]  # of the ranges, in the record
    starts = sorted({start for ends in bounds for start in ends})
    addresses = []
    for ranges, ends in zip(experts, bounds, strict=True):
        if ends[-1] != bounds[0][-1]:
            raise ValueError(f"experts of a layer have {bounds[0][-1]} bytes, not {ends[-1]}")
        within = [bisect_right(ends, start) - 1 for start in starts[:-1]]
        addresses.append([ranges[i][0] + start - ends[i] for i, start in zip(within, starts, strict=False)])
    return [(start, end - start) for start, end in pairwise(starts)], addresses

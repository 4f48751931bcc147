"""FetchedExperts: short steps bring a share of the experts that they use and the GPU has not, while the CPU computes
the others.

Long steps stream instead (streamer.py), whose staging memory this uses: no step does both, and they follow one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.copy_stream import CopyStream
from ktqueue.operators.gpu.experts.fetched import divide, fetch, parts_of
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import ExpertPlaces, Places, RoutedLayer


@dataclass(frozen=True, slots=True)
class FetchedShares:
    """Of the absent experts that a step uses, the part that comes to it, from 0 to 1: `one` for a step of one token,
    whose few experts can only be divided coarsely, `several` for all others."""

    one: float
    several: float

    def of(self, tokens: int) -> float:
        """For a step of so many tokens."""
        return self.one if tokens == 1 else self.several


class _Layer:
    """How the experts of a layer lie in host memory. addresses: [experts, parts] int64; parts: [parts, 2] int64, start
    and size in words; sizes: the same in bytes."""

    def __init__(self, layer: RoutedLayer, copies: CopyStream) -> None:
        ranges = [layer.packed.ranges(expert) for expert in range(layer.experts)]
        self.sizes, addresses = parts_of(ranges[0], ranges)
        seen = [[copies.device_address(one) for one in row] for row in addresses]
        self.addresses = torch.tensor(seen, dtype=torch.int64, device=copies.device)
        self.parts = torch.tensor(self.sizes, dtype=torch.int64, device=copies.device) // 8


class Fetcher:
    """For `layers` that `pool` holds in part, all of whose host memory is pinned. shares: what comes; to be set before
    steps are captured."""

    def __init__(self, layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream) -> None:
        self.shares = FetchedShares(0.0, 0.0)
        self.memory = pool.memory
        self._layers = layers
        self._pool = pool
        self._held = [_Layer(layer, copies) for layer in layers]
        # One of each for all layers: a layer's are read before the next one's are written.
        self._offsets = torch.full((pool.host.shape[1],), ABSENT, dtype=torch.int64, device=copies.device)
        self._sources: dict[tuple[int, int], torch.Tensor] = {}  # by slots and parts

    def places(self, layer: int) -> Places:
        """Where `choose` says that the experts of a layer are."""
        offsets = self._offsets[: self._layers[layer].experts]
        return Places(offsets, offsets, chosen=False)

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """Take experts from the CPU: see divide."""
        divide(
            ids,
            self._pool.offsets[layer, : self._layers[layer].experts],
            self._held[layer].addresses,
            self.shares.of(len(ids)),
            self._pool.staging_start,
            self._layers[layer].record.bytes,
            offsets=self.places(layer).gate_up,
            sources=self._to_come(layer, len(ids)),
            cpu_ids=cpu_ids,
        )

    def fetch(self, layer: int, tokens: int) -> None:
        """Let them come, for a step of so many tokens."""
        held, record = self._held[layer], self._layers[layer].record.bytes
        sources = self._to_come(layer, tokens)
        fetch(sources, held.parts, held.sizes, self.memory, self._pool.staging_start, record)

    def _to_come(self, layer: int, tokens: int) -> torch.Tensor:
        """[slots, parts]: as many as can come at most."""
        absent = self._layers[layer].experts - self._pool.slots[layer]
        used = min(tokens * self._layers[layer].experts_per_token, absent)
        slots = max(1, min(absent, int(self.shares.of(tokens) * used)))
        key = slots, len(self._held[layer].sizes)
        if key not in self._sources:
            self._sources[key] = torch.zeros(key, dtype=torch.int64, device=self.memory.device)
        return self._sources[key]


class FetchedExperts:
    """ExpertPlaces of the steps that fetch. `resident`: of those that do not."""

    def __init__(self, fetcher: Fetcher, resident: ExpertPlaces) -> None:
        self.memory = fetcher.memory
        self._fetcher = fetcher
        self._resident = resident
        self._tokens = 0

    def places(self, layer: int) -> Places:
        """See ExpertPlaces."""
        return self._fetcher.places(layer)

    def counts(self, layer: int) -> torch.Tensor | None:
        """See ExpertPlaces."""
        return self._resident.counts(layer)

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """See ExpertPlaces."""
        self._tokens = len(ids)
        self._fetcher.choose(layer, ids, cpu_ids)

    def arrive(self, layer: int) -> None:
        """See ExpertPlaces."""
        self._fetcher.fetch(layer, self._tokens)

    def leave(self, layer: int) -> None:
        """What comes next to their place comes behind them on the same stream."""

    def settle(self, layer: int) -> None:
        """It is as for every other layer."""

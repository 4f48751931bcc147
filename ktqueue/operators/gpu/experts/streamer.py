"""Streamer: long steps bring experts that live on the CPU to the GPU, layer by layer, while they compute.

Two areas of GPU memory take turns: while the experts of one layer are used, those of the next one arrive. What does
not arrive in the time is left to the CPU, which computes it meanwhile. Tables of its own say where each expert is, so
steps that do not stream see nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.operators.gpu.copy_stream import Copy, CopyStream, Mark, host_bytes
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import ExpertPlaces, Places, RoutedLayer

AREAS = 2
KEPT = 32  # lists of copies remembered for each layer: finding one takes half a millisecond
Numbers = npt.NDArray[np.int64]


def area_bytes(layers: Sequence[RoutedLayer], slots: Sequence[int]) -> int:
    """What one area must hold: all experts of any layer that have no slot."""
    return max(
        ((layer.experts - count) * layer.record.bytes for count, layer in zip(slots, layers, strict=True)), default=0
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is streamed while the pool is as it is. Of each layer: how many experts, whether there are others that are
    not on the GPU, and the copies."""

    version: int
    counts: tuple[int, ...]
    on_cpu: list[bool]
    copies: list[list[Copy]]


class Streamer:
    """For `layers` whose slots `pool` holds; its staging memory is AREAS times `area_bytes`."""

    def __init__(self, layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream) -> None:
        self._layers = layers
        self._pool = pool
        self._copies = copies
        self._area = area_bytes(layers, pool.slots)
        experts = pool.host.shape[1]
        # [layers, gate_up and down, experts]: the two are apart, so that runs of experts come in one copy.
        self._tables = torch.full((len(layers), 2, experts), ABSENT, dtype=torch.int64, device=copies.device)
        self._known: list[dict[bytes, list[Copy]]] = [{} for _ in layers]  # of each layer, by the experts chosen
        self._plan = _Plan(-1, (), [], [])
        self._freed: list[Mark | None] = [None] * AREAS
        self.bytes_streamed = 0

    def begin(self, resident: ExpertPlaces, share: float, *, last_too: bool) -> "StreamedExperts":
        """A step that streams `share` (from 0 to 1) of the experts that are not on the GPU; those of the last layer
        only if `last_too`. `resident`: where the steps that stream nothing find experts."""
        layers = len(self._layers) - (not last_too)
        counts = tuple(
            round(share * (layer.experts - slots)) if index < layers else 0
            for index, (layer, slots) in enumerate(zip(self._layers, self._pool.slots, strict=True))
        )
        if (self._plan.version, self._plan.counts) != (self._pool.version, counts):
            self._plan = self._make(counts)
        self._copies.after(self._copies.here())  # short steps before may have fetched experts to the areas
        return StreamedExperts(self, resident, self._plan)

    def places(self, layer: int, on_cpu: bool) -> Places:
        """Where the experts of a layer are in the step that has begun."""
        gate_up, down = self._tables[layer, :, : self._layers[layer].experts]
        return Places(gate_up, down, on_gpu=True, on_cpu=on_cpu)

    def bring(self, copies: list[Copy], layer: int) -> tuple[Mark, Mark]:
        """Let the experts of a layer come as soon as its area is free: marks before and behind the copies."""
        freed = self._freed[layer % AREAS]
        if freed is not None:
            self._copies.after(freed)
        begun = self._copies.mark()
        self._copies.copy(copies)
        self.bytes_streamed += sum(target.nbytes for _, target in copies)
        return begun, self._copies.mark()

    def hold(self, mark: Mark) -> None:
        """Let the current stream wait for `mark`."""
        self._copies.hold(mark)

    def here(self) -> Mark:
        """Behind all that has been launched."""
        return self._copies.here()

    def free(self, layer: int, mark: Mark) -> None:
        """All that reads the area of this layer is before `mark`."""
        self._freed[layer % AREAS] = mark

    @property
    def memory(self) -> torch.Tensor:
        """What offsets count in."""
        return self._pool.memory

    def _make(self, counts: tuple[int, ...]) -> _Plan:
        """Choose the experts of lowest number, lay them out in the areas and fill the tables."""
        tables = np.stack([self._pool.host, self._pool.host], axis=1)
        copies: list[list[Copy]] = []
        on_cpu: list[bool] = []
        for index, (layer, count) in enumerate(zip(self._layers, counts, strict=True)):
            absent = np.flatnonzero(self._pool.host[index, : layer.experts] == ABSENT)
            chosen = absent[:count]
            on_cpu.append(count < len(absent))
            start = self._pool.staging_start + index % AREAS * self._area
            record, order = layer.record, np.arange(len(chosen))
            down_start = start + len(chosen) * record.gate_up_bytes
            tables[index, 0, chosen] = start + order * record.gate_up_bytes
            # `down` adds down_start to where a record begins, so that is what is taken off here.
            tables[index, 1, chosen] = down_start + order * (record.bytes - record.down_start) - record.down_start
            copies.append(self._runs(index, chosen, start, down_start))
        self._tables.copy_(self._copies.staged(torch.from_numpy(tables)), non_blocking=True)
        return _Plan(self._pool.version, counts, on_cpu, copies)

    def _runs(self, index: int, experts: Numbers, gate_up: int, down: int) -> list[Copy]:
        """Copies of the experts' gate_up parts to `gate_up` and of their down parts to `down`, one after the other."""
        known, key = self._known[index], experts.tobytes()
        if key not in known:
            if len(known) >= KEPT:
                known.pop(next(iter(known)))
            known[key] = self._find_runs(self._layers[index], experts.tolist(), gate_up, down)
        return known[key]

    def _find_runs(self, layer: RoutedLayer, experts: list[int], gate_up: int, down: int) -> list[Copy]:
        pieces: tuple[list[tuple[int, int, int]], ...] = ([], [])  # (address, offset, bytes)
        for expert in experts:
            done = 0
            for address, size in layer.packed.ranges(expert):
                if done < layer.record.down_start:
                    pieces[0].append((address, gate_up, size))
                    gate_up += size
                else:
                    pieces[1].append((address, down, size))
                    down += size
                done += size
        runs: list[tuple[int, int, int]] = []
        for address, offset, size in (*pieces[0], *pieces[1]):
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (address, offset):
                address, offset, size = runs[-1][0], runs[-1][1], runs.pop()[2] + size
            runs.append((address, offset, size))
        memory = self._pool.memory
        return [(host_bytes(address, size), memory[offset : offset + size]) for address, offset, size in runs]


class StreamedExperts:
    """ExpertPlaces of one step that streams."""

    def __init__(self, streamer: Streamer, resident: ExpertPlaces, plan: _Plan) -> None:
        self.memory = streamer.memory
        self._streamer = streamer
        self._resident = resident
        self._plan = plan
        self._arriving: dict[int, Mark] = {}
        self._copying: list[tuple[Mark, Mark]] = []
        self._computing: list[tuple[Mark, Mark]] = []  # behind one layer's experts, before those of the next
        self._settled: Mark | None = None
        for layer in range(AREAS):
            self._bring(layer)

    def places(self, layer: int) -> Places:
        """See ExpertPlaces."""
        if self._plan.counts[layer] == 0:
            return self._resident.places(layer)
        return self._streamer.places(layer, on_cpu=self._plan.on_cpu[layer])

    def counts(self, layer: int) -> torch.Tensor | None:
        """See ExpertPlaces."""
        return self._resident.counts(layer)

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """It is known before."""

    def arrive(self, layer: int) -> None:
        """See ExpertPlaces."""
        if self._settled is not None:
            self._computing.append((self._settled, self._streamer.here()))
        if layer in self._arriving:
            self._streamer.hold(self._arriving.pop(layer))

    def leave(self, layer: int) -> None:
        """See ExpertPlaces."""
        self._streamer.free(layer, self._streamer.here())
        self._bring(layer + AREAS)

    def settle(self, layer: int) -> None:
        """See ExpertPlaces."""
        self._settled = self._streamer.here()

    @property
    def layers(self) -> int:
        """Layers whose experts are streamed."""
        return sum(count > 0 for count in self._plan.counts)

    def seconds(self) -> tuple[float, float] | None:
        """Of a step that is done, on average for a layer: what its copies took, and what the GPU took from the experts
        of the layer before it to its own; 0: not known. None: the step is not done."""
        if self._settled is None or not self._settled.passed():
            return None
        return _mean(self._copying), _mean(self._computing)

    def _bring(self, layer: int) -> None:
        if layer < len(self._plan.counts) and self._plan.counts[layer] > 0:
            begun, there = self._streamer.bring(self._plan.copies[layer], layer)
            self._copying.append((begun, there))
            self._arriving[layer] = there


def _mean(spans: list[tuple[Mark, Mark]]) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans) / len(spans) if spans else 0.0

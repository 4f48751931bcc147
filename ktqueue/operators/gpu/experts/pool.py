"""ExpertPool: GPU memory for experts, and the tables that say where each expert is.

Each slot belongs to one layer, so an expert can only replace another expert of its layer. The pool does not decide
which experts are worth a slot.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.copy_stream import Copy, CopyStream
from ktqueue.operators.gpu.experts.step import RoutedLayer

ABSENT = -1


def slots_that_fit(layers: Sequence[RoutedLayer], budget: int) -> list[int]:
    """Number of experts of each layer that fit into `budget` bytes, if the layers take one expert in turn."""
    slots, left = [0] * len(layers), budget
    growing = list(enumerate(layers))
    while growing:
        growing = [(i, layer) for i, layer in growing if slots[i] < layer.experts and layer.record.bytes <= left]
        for i, layer in growing:
            if layer.record.bytes <= left:
                slots[i] += 1
                left -= layer.record.bytes
    return slots


class ExpertPool:
    """The slots of all layers, followed by `staging` bytes for experts that are copied for a single step.

    memory: uint8 on the device. offsets: [layers, experts] int64 on the device, where each expert's record begins, or
    ABSENT. host: the same table on the host; changes reach the device with `publish`. Layers with fewer experts than
    others have ABSENT in the rest of their row.
    """

    def __init__(self, layers: Sequence[RoutedLayer], slots: Sequence[int], staging: int, copies: CopyStream) -> None:
        self._layers = layers
        self._copies = copies
        self.slots = slots
        sizes = [count * layer.record.bytes for count, layer in zip(slots, layers, strict=True)]
        self._starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self.staging_start = int(self._starts[-1])
        self.version = 0
        """Grows with each change of the tables."""
        self.memory = torch.empty(self.staging_start + staging, dtype=torch.uint8, device=copies.device)
        experts = max((layer.experts for layer in layers), default=0)
        self.host: npt.NDArray[np.int64] = np.full((len(layers), experts), ABSENT, np.int64)
        for index, count in enumerate(slots):
            self.host[index, :count] = self.offsets_of_slots(index)
            for expert in range(count):
                self.upload(index, expert, int(self.host[index, expert]))
        copies.finish()
        self.offsets = torch.from_numpy(self.host).to(copies.device, copy=True)

    def is_absent(self) -> npt.NDArray[np.bool_]:
        """Which experts have no slot, [layers, experts]."""
        found: npt.NDArray[np.bool_] = self.host == ABSENT
        return found

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return self.memory.nbytes + self.offsets.nbytes

    def offsets_of_slots(self, layer: int) -> list[int]:
        """Where the slots of a layer begin in `memory`."""
        size = self._layers[layer].record.bytes
        return [int(self._starts[layer]) + slot * size for slot in range(self.slots[layer])]

    def upload(self, layer: int, expert: int, offset: int) -> None:
        """Copy an expert's record to `offset` in `memory`, on the copy stream."""
        copies: list[Copy] = []
        for address, size in self._layers[layer].packed.ranges(expert):
            copies.append((native.host_bytes(address, size), self.memory[offset : offset + size]))
            offset += size
        self._copies.copy(copies)

    def publish(self) -> None:
        """Let steps that are launched from now on use the table in `host`."""
        self.offsets.copy_(self._copies.staged(torch.from_numpy(self.host)), non_blocking=True)
        self.version += 1

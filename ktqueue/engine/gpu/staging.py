"""Host arrays to the device, and results back, without the host ever waiting for a copy to the device.

A step's arrays are written side by side into one pinned buffer, copied in one piece, and seen on the device as views of
one buffer there. On a CPU "device" the same is done with plain memory. Knows nothing of what the arrays mean.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

_ALIGNED = 64  # bytes; every array begins at a multiple of it
_FIRST_ROOM = 1 << 16  # bytes


class _Buffers:
    """`size` bytes on the host, pinned for a GPU, and as many on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.size = size
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.bytes: NDArray[np.uint8] = self.host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def writable(self) -> None:
        """Wait until the last copy has read the host's bytes: as a rule long ago, since each step ends with a wait."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, count: int) -> None:
        """Copy the first `count` bytes, after all that the current stream was given and before all that comes."""
        self.device[:count].copy_(self.host[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where arrays of so many bytes begin, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


def _view(buffer: torch.Tensor, start: int, count: int, shape: Many[int], dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + count].view(dtype).view(*shape)


class Staging:
    """Arrays of any shapes, other ones each time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._buffers = _Buffers(_FIRST_ROOM, self._device)

    def put(self, arrays: Many[NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device, valid until the next call."""
        starts, end = _places(one.nbytes for one in arrays)
        if end > self._buffers.size:
            self._buffers = _Buffers(2 * end, self._device)
        buffers = self._buffers
        buffers.writable()
        for one, start in zip(arrays, starts, strict=True):
            buffers.bytes[start : start + one.nbytes].view(one.dtype).reshape(one.shape)[...] = one
        buffers.send(end)
        return [
            _view(buffers.device, start, one.nbytes, one.shape, _torch_type(one.dtype))
            for one, start in zip(arrays, starts, strict=True)
        ]


class FixedStaging:
    """Arrays of fixed names, shapes and types, whose device tensors never move: what a captured graph reads.

    `arrays` are written by the host, between `open` and `send`; `host` are the same as tensors; `device` is where they
    arrive.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]], device: str) -> None:
        types = {name: (shape, np.dtype(kind)) for name, (shape, kind) in shapes.items()}
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in types.values()]
        starts, end = _places(sizes)
        self._buffers = _Buffers(end, torch.device(device))
        self.arrays: dict[str, NDArray[Any]] = {}
        self.host: dict[str, torch.Tensor] = {}
        self.device: dict[str, torch.Tensor] = {}
        for (name, (shape, kind)), start, size in zip(types.items(), starts, sizes, strict=True):
            self.host[name] = _view(self._buffers.host, start, size, shape, _torch_type(kind))
            self.device[name] = _view(self._buffers.device, start, size, shape, _torch_type(kind))
            self.arrays[name] = self.host[name].numpy()

    def open(self) -> dict[str, NDArray[Any]]:
        """The arrays, to be written to."""
        self._buffers.writable()
        return self.arrays

    def send(self) -> None:
        """Copy all arrays to the device, on the current stream."""
        self._buffers.send(self._buffers.size)


class Fetcher:
    """Results from the device: one copy, one wait."""

    def __init__(self, device: str) -> None:
        self._pinned: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if torch.device(device).type == "cuda":
            self._pinned = torch.empty(0, dtype=torch.int64, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, values: torch.Tensor, meanwhile: Callable[[], None]) -> NDArray[np.int64]:
        """`values` [count] int64 on the host, good until the next call; the wait of a step, `meanwhile` is called
        before it. What that enqueues on the current stream comes behind the copy of the values."""
        if self._pinned is None or self._arrived is None:
            meanwhile()
            array: NDArray[np.int64] = values.numpy()
            return array
        if len(self._pinned) < len(values):
            self._pinned = torch.empty(2 * len(values), dtype=torch.int64, pin_memory=True)
        pinned = self._pinned[: len(values)]
        pinned.copy_(values, non_blocking=True)
        self._arrived.record()
        meanwhile()
        self._arrived.synchronize()
        fetched: NDArray[np.int64] = pinned.numpy()
        return fetched


_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def _torch_type(kind: np.dtype[Any]) -> torch.dtype:
    return _TYPES[kind]

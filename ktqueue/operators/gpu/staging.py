"""Copies host arrays to the device and results back. The host never waits for a copy to the device.

A step's arrays are written side by side into one pinned buffer, copied in one piece, and are views of one buffer on
the device. If the device is a CPU, the same is done with plain memory. Knows nothing of the arrays' meaning.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.kernels.copy_words import copy_words

_ALIGNED = 64  # bytes; every array starts at a multiple of it
_FIRST_SIZE = 1 << 16  # bytes


class _Buffers:
    """A buffer of `size` bytes on the host, pinned for a GPU, and one of that size on the device. Both begin as 0."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = is_gpu(device)
        self.size = size
        with torch.inference_mode(False):  # so that they can be written in any mode
            self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
            self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.bytes: NDArray[np.uint8] = self.host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait_until_writable(self) -> None:
        """Wait until the last copy has read the host's bytes. It usually has, because each step ends with a wait."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, count: int) -> None:
        """Queue a copy of the first `count` bytes, a multiple of 4, on the current stream."""
        copy_words(self.host[:count], self.device[:count])
        if self._copied is not None:
            self._copied.record()


def _aligned(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of arrays of these sizes that lie side by side, and the end of the last one. All in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


def _view(buffer: torch.Tensor, start: int, count: int, shape: Many[int], dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + count].view(dtype).view(*shape)


class Staging:
    """Copies arrays whose shapes may differ each time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._buffers = _Buffers(_FIRST_SIZE, self._device)

    def put(self, arrays: Many[NDArray[Any]]) -> list[torch.Tensor]:
        """Copy arrays to the device. The tensors are valid until the next call."""
        starts, end = _aligned(array.nbytes for array in arrays)
        self._buffers.wait_until_writable()
        if end > self._buffers.size:
            self._buffers = _Buffers(2 * end, self._device)
        buffers = self._buffers
        for array, start in zip(arrays, starts, strict=True):
            buffers.bytes[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        buffers.send(end)
        return [
            _view(buffers.device, start, array.nbytes, array.shape, _torch_type(array.dtype))
            for array, start in zip(arrays, starts, strict=True)
        ]


class FixedStaging:
    """Arrays with fixed names, shapes and types, whose device tensors never move. Captured graphs read them.

    The host writes `arrays` between `open` and `send`. `host` are the same arrays as tensors; `device` are the copies.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]], device: str | torch.device) -> None:
        types = {name: (shape, np.dtype(kind)) for name, (shape, kind) in shapes.items()}
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in types.values()]
        starts, end = _aligned(sizes)
        self._buffers = _Buffers(end, torch.device(device))
        self._last_start, self._last_item = starts[-1], list(types.values())[-1][1].itemsize
        self.arrays: dict[str, NDArray[Any]] = {}
        self.host: dict[str, torch.Tensor] = {}
        self.device: dict[str, torch.Tensor] = {}
        for (name, (shape, kind)), start, size in zip(types.items(), starts, sizes, strict=True):
            self.host[name] = _view(self._buffers.host, start, size, shape, _torch_type(kind))
            self.device[name] = _view(self._buffers.device, start, size, shape, _torch_type(kind))
            self.arrays[name] = self.host[name].numpy()

    def open(self) -> dict[str, NDArray[Any]]:
        """Return the arrays, once they may be written."""
        self._buffers.wait_until_writable()
        return self.arrays

    def send(self, of_last: int | None = None) -> None:
        """Queue a copy of all arrays to the device on the current stream. of_last: elements of the last array, if the
        others are not needed."""
        size = self._buffers.size if of_last is None else self._last_start + of_last * self._last_item
        self._buffers.send(size)

    @property
    def bytes(self) -> int:
        """Device memory of all arrays."""
        return self._buffers.size

    def write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write all arrays, each to the beginning of the one of that name, and send as much of the last as is given."""
        opened = self.open()
        for name, array in arrays.items():
            opened[name][: len(array)] = array
        self.send(len(array))


class ResultFetcher:
    """Brings results from the device to the host with one copy and one wait."""

    def __init__(self, device: str) -> None:
        self._pinned: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if is_gpu(device):
            self._pinned = torch.empty(0, dtype=torch.int64, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, values: torch.Tensor, meanwhile: Callable[[], None]) -> NDArray[np.int64]:
        """Copy `values` [count] int64 to the host and wait for them. The result is valid until the next call.

        `meanwhile` is called before the wait. Its work on the current stream is queued behind the copy.
        """
        if self._pinned is None or self._arrived is None:
            meanwhile()
            array: NDArray[np.int64] = values.numpy()
            return array
        if len(self._pinned) < len(values):
            self._pinned = torch.empty(2 * len(values), dtype=torch.int64, pin_memory=True)
        pinned = self._pinned[: len(values)]
        copy_words(values, pinned)
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

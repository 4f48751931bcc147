"""HostBuffer: bytes that the host writes for each step, and their copy on the device, which never moves."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.kernels.copy_words import copy_words

_ALIGNED = 64  # bytes


def aligned(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of arrays that lie side by side, multiples of 64, and the end of the last. All in bytes, as sizes are."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


class HostBuffer:
    """A buffer of `size` bytes on the host, pinned for a GPU, and one of the same size on the device. All are 0 first.

    The host never waits for a copy, only to write again before the last copy is done. It usually is, because each step
    ends with a wait.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = is_gpu(device)
        self.size = size
        with torch.inference_mode(False):  # so that they can be written in any mode
            self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
            self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.bytes: NDArray[np.uint8] = self.host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait_until_writable(self) -> None:
        """Wait until the last copy has read the host's bytes."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, count: int) -> None:
        """Queue a copy of the first `count` bytes on the current stream. count: a multiple of 4."""
        copy_words(self.host[:count], self.device[:count])
        if self._copied is not None:
            self._copied.record()

    def write(self, arrays: list[NDArray[Any]], offsets: list[int]) -> None:
        """Write arrays to the host's bytes, each from its offset in bytes on."""
        for array, offset in zip(arrays, offsets, strict=True):
            self.bytes[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array

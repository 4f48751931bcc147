"""CopyStream: copies of host memory to the device beside the steps, ordered by marks. On CPU tensors, at once."""

import ctypes
import logging
from collections.abc import Iterable

import numpy as np
import torch

from ktqueue.core.units import format_bytes
from ktqueue.operators.gpu.handoff.driver import Driver

logger = logging.getLogger(__name__)

Copy = tuple[torch.Tensor, torch.Tensor]
"""(source on the host, target on the device), [bytes] uint8 each."""


class Mark:
    """A point on a stream. Without an event it is passed already (CPU)."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def passed(self) -> bool:
        """Whether all before it is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: "Mark") -> float:
        """Time on the device from `earlier`; both are passed. 0 on a CPU, where nobody waits for a copy."""
        if self.event is None or earlier.event is None:
            return 0.0
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CopyStream:
    """A stream of its own for copies to `device`."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._driver = Driver.load() if on_gpu else None
        self._pinned: list[int] = []

    def pin(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Pin host memory, (address, bytes) each, until `close`, so that copies from it make nobody wait and kernels
        can read it. What cannot be pinned stays as it is, with a warning and False."""
        if self._driver is None:
            return True
        for address, size in joined(ranges):
            try:
                self._driver.host_register(address, size)
            except RuntimeError as error:
                logger.warning("%s of experts cannot be pinned, copies of them are slow: %s", format_bytes(size), error)
                return False
            self._pinned.append(address)
        return True

    def device_address(self, address: int) -> int:
        """How kernels name the byte at `address` of memory that is pinned."""
        return address if self._driver is None else self._driver.device_address(address)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy each source, which must stay as it is until then, to its target. The host does not wait if the source
        is pinned."""
        if self._stream is None:
            for source, target in copies:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)

    def after(self, mark: Mark) -> None:
        """What is copied from now on waits for `mark`."""
        if self._stream is not None and mark.event is not None:
            self._stream.wait_event(mark.event)

    def hold(self, mark: Mark) -> None:
        """Let the current stream wait for `mark`."""
        if mark.event is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def mark(self) -> Mark:
        """Behind all copies so far."""
        return Mark(None if self._stream is None else self._stream.record_event(_event()))

    def here(self) -> Mark:
        """Behind all that has been launched on the current stream."""
        return Mark(None if self._stream is None else torch.cuda.current_stream(self.device).record_event(_event()))

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor, from which the current stream may copy while the original changes."""
        return tensor.clone() if self._stream is None else tensor.pin_memory()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the host, to which the device copies without making anybody wait."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)

    def finish(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Wait for all copies, and give back what was pinned."""
        self.finish()
        while self._pinned and self._driver is not None:
            self._driver.host_unregister(self._pinned.pop())


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes), rising; those that touch are one."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(ranges):
        if found and sum(found[-1]) == address:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((address, size))
    return found


def host_bytes(address: int, size: int) -> torch.Tensor:
    """Host memory as [size] uint8, to be read only and while it lives."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

"""CopyStream: copies from host memory to the device while steps run. On CPU tensors, copies are synchronous."""

import logging
import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch

from ktqueue.core.units import format_bytes
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.handoff.driver import Driver
from ktqueue.operators.gpu.kernels.operation import launch_after_all

logger = logging.getLogger(__name__)

Copy = tuple[torch.Tensor, torch.Tensor]
"""(source on the host, target on the device), both [bytes] uint8."""


class Mark:
    """A point on a stream. Without an event (on a CPU) it has been passed already."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def passed(self) -> bool:
        """Whether everything before the mark is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: "Mark") -> float:
        """Device time between two marks that were passed. 0 on a CPU, where nothing waits for a copy."""
        if self.event is None or earlier.event is None:
            return 0.0
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CopyStream:
    """A second stream of `device`, for copies."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.on_gpu = is_gpu(self.device)
        self._stream = torch.cuda.Stream(self.device) if self.on_gpu else None  # type: ignore[no-untyped-call]
        self._driver = Driver.load() if self.on_gpu else None
        self._pinned: list[int] = []
        # Memory that is freed while it is pinned makes later copies from the same addresses fail.
        weakref.finalize(self, _unpin_quietly, self._driver, self._pinned).atexit = False

    def pin(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Pin host memory, given as (address, bytes), until `close`.

        Copies from pinned memory are asynchronous, and kernels can read it. Returns False and logs a warning if the
        memory cannot be pinned.
        """
        if self._driver is None:
            return True
        for address, size in merge_ranges(ranges):
            try:
                self._driver.host_register(address, size)
            except RuntimeError as error:
                logger.warning("%s of experts cannot be pinned, copies of them are slow: %s", format_bytes(size), error)
                return False
            self._pinned.append(address)
        return True

    def device_address(self, address: int) -> int:
        """The address by which kernels read the pinned byte at host address `address`."""
        return address if self._driver is None else self._driver.device_address(address)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy each source to its target. Sources must not change until then. The host waits for sources that are not
        pinned."""
        if self._stream is None:
            for source, target in copies:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)

    def wait_for(self, mark: Mark) -> None:
        """Let all later copies wait for `mark`."""
        if self._stream is not None and mark.event is not None:
            self._stream.wait_event(mark.event)

    def let_steps_wait_for(self, mark: Mark) -> None:
        """Let the current stream, which runs the steps, wait for `mark`."""
        if mark.event is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)
            launch_after_all()

    def mark(self) -> Mark:
        """A mark after all copies so far."""
        return Mark(None if self._stream is None else self._stream.record_event(_timed_event()))

    def mark_step(self) -> Mark:
        """A mark after everything launched on the current stream so far."""
        if self._stream is None:
            return Mark(None)
        return Mark(torch.cuda.current_stream(self.device).record_event(_timed_event()))

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor, from which the current stream can copy while the original changes."""
        return tensor.clone() if self._stream is None else tensor.pin_memory()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory, pinned so that copies from the device to it are asynchronous."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)

    def finish(self) -> None:
        """Block until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Block until all copies are done, then unpin the memory."""
        self.finish()
        _unpin(self._driver, self._pinned)


def _unpin(driver: Driver | None, addresses: list[int]) -> None:
    while addresses and driver is not None:
        driver.host_unregister(addresses.pop())


def _unpin_quietly(driver: Driver | None, addresses: list[int]) -> None:
    with suppress(RuntimeError):  # a finaliser has no caller
        _unpin(driver, addresses)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) sorted by address, adjacent ranges merged."""
    merged: list[tuple[int, int]] = []
    for address, size in sorted(ranges):
        if merged and sum(merged[-1]) == address:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((address, size))
    return merged


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

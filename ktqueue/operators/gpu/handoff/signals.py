"""How a stream tells the hand-off's service that a task is ready, and learns that it is done.

Three ways behind one protocol: words in pinned memory, host functions, and a plain call where there is no stream.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ktqueue.operators.gpu.handoff.driver import Driver, MemoryOperation
from ktqueue.operators.native_handoff import DEFERS, HandoffService, SlotMemory


class Signals(Protocol):
    """Both calls only enqueue, on the current stream, and may be captured in a graph."""

    def request(self, slot: int, word: int) -> None:
        """The input of the slot is complete: run the task."""

    def settle(self, slot: int, word: int) -> None:
        """What is enqueued from here on finds the output of the task."""


class Direct:
    """Without a stream: a request is run at once, in the calling thread."""

    def __init__(self, service: HandoffService) -> None:
        self._service = service

    def request(self, slot: int, word: int) -> None:
        """Run the task."""
        self._service.run(slot, word)

    def settle(self, slot: int, word: int) -> None:
        """It is done already."""


class Flags:
    """The GPU itself writes the request word and waits for the done word: one node each."""

    def __init__(self, slots: Sequence[SlotMemory], driver: Driver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._words = [
            (driver.device_address(one.request.data_ptr()), driver.device_address(one.done.data_ptr())) for one in slots
        ]

    def request(self, slot: int, word: int) -> None:
        """G2 and G3 of csrc/handoff/handoff.h."""
        request, done = self._words[slot]
        self._enqueue(MemoryOperation("write", done, 0), MemoryOperation("write", request, word))

    def settle(self, slot: int, word: int) -> None:
        """G4 of csrc/handoff/handoff.h."""
        self._enqueue(MemoryOperation("wait", self._words[slot][1], word))

    def _enqueue(self, *operations: MemoryOperation) -> None:
        self._driver.memory_operations(torch.cuda.current_stream(self._device).cuda_stream, operations)


class HostFunctions:
    """CUDA's own thread runs the task, on a stream beside the current one, which goes on meanwhile. Tasks of all slots
    share that stream, so that they run in the order of their requests, each behind what the one before has deferred.

    A task that hangs there hangs the process's CUDA with it: nothing can answer in its place.
    """

    def __init__(self, service: HandoffService, slots: int, driver: Driver, device: torch.device) -> None:
        self._service = service
        self._driver = driver
        self._device = device
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ended: list[torch.cuda.Event | None] = [None] * slots

    def request(self, slot: int, word: int) -> None:
        """Fork: the stream beside takes over once the input is there. What the task defers runs behind its end."""
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        self._driver.launch_host_function(self._beside.cuda_stream, *self._service.host_task(slot, word))
        self._ended[slot] = self._beside.record_event()
        if word & DEFERS:
            self._driver.launch_host_function(self._beside.cuda_stream, *self._service.rest_task())

    def settle(self, slot: int, word: int) -> None:
        """Join."""
        ended = self._ended[slot]
        assert ended is not None
        torch.cuda.current_stream(self._device).wait_event(ended)

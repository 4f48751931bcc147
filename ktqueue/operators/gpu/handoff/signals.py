"""How a stream tells the hand-off's service that a task is ready, and learns that it is done.

There are three ways behind one protocol: words in pinned memory, host functions, and a plain call without a stream.
"""

from typing import Protocol

import torch

from ktqueue.operators.gpu.handoff.driver import Driver, MemoryOperation
from ktqueue.operators.native_handoff import HandoffMemory, HandoffService


class Signals(Protocol):
    """Both calls only enqueue on the current stream, and a graph can capture them."""

    def request(self, word: int) -> None:
        """Ask for the task; its input is complete."""

    def wait(self, word: int) -> None:
        """Wait for the task: its output is complete for everything enqueued after this."""


class DirectCalls:
    """Runs a task in the calling thread as soon as it is requested. There is no stream."""

    def __init__(self, service: HandoffService) -> None:
        self._service = service

    def request(self, word: int) -> None:
        """Run the task."""
        self._service.run(word)

    def wait(self, word: int) -> None:
        """Do nothing: the task is done."""


class WordSignals:
    """The GPU itself writes the request word and waits for the done word, each as one node of the graph."""

    def __init__(self, memory: HandoffMemory, driver: Driver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._request, self._done = (driver.device_address(w.data_ptr()) for w in (memory.request, memory.done))

    def request(self, word: int) -> None:
        """Steps G2 and G3 of csrc/handoff/handoff.h."""
        self._enqueue(MemoryOperation("write", self._done, 0), MemoryOperation("write", self._request, word))

    def wait(self, word: int) -> None:
        """Step G4 of csrc/handoff/handoff.h."""
        self._enqueue(MemoryOperation("wait", self._done, word))

    def _enqueue(self, *operations: MemoryOperation) -> None:
        self._driver.memory_operations(torch.cuda.current_stream(self._device).cuda_stream, operations)


class HostFunctionSignals:
    """A thread of CUDA runs the task on a second stream, while the current stream continues.

    A task that hangs there blocks all of the process's CUDA work: nothing can answer in its place.
    """

    def __init__(self, service: HandoffService, driver: Driver, device: torch.device) -> None:
        self._service = service
        self._driver = driver
        self._device = device
        self._task_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ended: torch.cuda.Event | None = None

    def request(self, word: int) -> None:
        """Fork: the task stream runs the task once the input is complete."""
        self._task_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._driver.launch_host_function(self._task_stream.cuda_stream, *self._service.host_task(word))
        self._ended = self._task_stream.record_event()

    def wait(self, word: int) -> None:
        """Join."""
        assert self._ended is not None
        torch.cuda.current_stream(self._device).wait_event(self._ended)

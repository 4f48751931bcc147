"""How a stream tells the hand-off's service that a task is ready, and learns that it is done.

There are three ways behind one protocol: words in pinned memory, host functions, and a plain call without a stream.
"""

from typing import Protocol

import torch

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.handoff.driver import Driver, MemoryOperation
from ktqueue.operators.gpu.kernels.operation import launch_after_all
from ktqueue.operators.native_handoff import HandoffMemory, HandoffService


class StepStream(Protocol):
    """The stream that runs the steps."""

    def can_wait_for_words(self) -> bool:
        """Whether the stream can write words in memory and wait for them."""

    def device_address(self, address: int) -> int:
        """The device address of the pinned memory at host address `address`."""

    def enqueue(self, *operations: MemoryOperation) -> None:
        """Enqueue `operations` as one node."""

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""


class CudaStream:
    """The current stream of a CUDA device. Raises ValueError for another device."""

    def __init__(self, device: torch.device) -> None:
        if not is_gpu(device):
            raise ValueError(f"device must be cpu or cuda, got {device}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.driver = Driver.load()

    def can_wait_for_words(self) -> bool:
        """See StepStream."""
        return self.driver.has_memory_operations(self.device.index)

    def device_address(self, address: int) -> int:
        """See StepStream."""
        return self.driver.device_address(address)

    def enqueue(self, *operations: MemoryOperation) -> None:
        """See StepStream."""
        self.driver.memory_operations(torch.cuda.current_stream(self.device).cuda_stream, operations)

    def is_capturing(self) -> bool:
        """See StepStream."""
        return torch.cuda.is_current_stream_capturing()


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
    """The stream itself writes the request word and waits for the done word, each as one node of the graph. The next
    kernel begins behind such a node, and never early: only kernels let others do so."""

    def __init__(self, memory: HandoffMemory, stream: StepStream) -> None:
        self._stream = stream
        self._request, self._done = (stream.device_address(w.data_ptr()) for w in (memory.request, memory.done))

    def request(self, word: int) -> None:
        """Steps G2 and G3 of csrc/handoff/handoff.h."""
        self._stream.enqueue(MemoryOperation("write", self._done, 0), MemoryOperation("write", self._request, word))
        launch_after_all()

    def wait(self, word: int) -> None:
        """Step G4 of csrc/handoff/handoff.h."""
        self._stream.enqueue(MemoryOperation("wait", self._done, word))
        launch_after_all()


class HostFunctionSignals:
    """A thread of CUDA runs the task on a second stream, while the current stream continues.

    A task that hangs there blocks all of the process's CUDA work: nothing can answer in its place.
    """

    def __init__(self, service: HandoffService, stream: CudaStream) -> None:
        self._service = service
        self._driver = stream.driver
        self._device = stream.device
        self._task_stream = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
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
        launch_after_all()

"""How a function of fixed tensors is done again: by replaying a CUDA graph, or by calling it once more."""

from collections.abc import Callable
from typing import Protocol

import torch

Function = Callable[[], torch.Tensor]
"""Reads and writes the same tensors each time."""

WARM_UPS = 2  # calls before the capture: kernels are compiled and loaded in them


class Capturer(Protocol):
    """Makes functions repeatable."""

    def capture(self, function: Function) -> Function:
        """`function`, to be called at any later time on the same device. Its result is good until the next call of any
        function captured here."""

    def used(self) -> int:
        """Bytes of the device's memory that are taken, by whomever."""


class Again:
    """Calls the function again: for a CPU."""

    def capture(self, function: Function) -> Function:
        """The function itself."""
        return function

    def used(self) -> int:
        """Nothing is ever taken."""
        return 0


class GraphCapturer:
    """Captures CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Function) -> Function:
        """A replay of what `function` does on the GPU now; its work on the host is not repeated.

        Raises what CUDA says of work that cannot be captured.
        """
        current = torch.cuda.current_stream(self._device)
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(beside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def used(self) -> int:
        """By this and all other processes."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

"""Makes a function of fixed tensors repeatable: as a CUDA graph, or by calling it again."""

import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import torch

Function = Callable[[], torch.Tensor]
"""A function that reads and writes the same tensors each time."""

WARM_UPS = 2  # calls before the capture, in which kernels are compiled and loaded


class Capturer(Protocol):
    """Captures functions for later calls."""

    def compile(self, functions: Iterable[Function]) -> None:
        """Compile the kernels that `functions` launch, without running any. Each is made when it is needed. Without
        this, their first runs compile one kernel after the other."""

    def capture(self, function: Function) -> Function:
        """Return a function that repeats `function` on the same device.

        Its result is valid until the next call of any function captured here.
        """

    def used_bytes(self) -> int:
        """Device memory in use by all processes, in bytes."""


class RepeatedCall:
    """Calls the function again. For CPUs. The last result is overwritten with NaN first, as a graph would change it."""

    def __init__(self) -> None:
        self._last = torch.empty(0)

    def compile(self, functions: Iterable[Function]) -> None:
        """See Capturer. On a CPU there are no kernels."""

    def capture(self, function: Function) -> Function:
        """See Capturer."""

        def repeat() -> torch.Tensor:
            self._last.fill_(torch.nan)
            self._last = function()
            return self._last

        return repeat

    def used_bytes(self) -> int:
        """See Capturer. Nothing is measured on a CPU."""
        return 0


class GraphCapturer:
    """Captures CUDA graphs that share one memory pool, because only one of them runs at a time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        # Kernels keep the priority that they are captured with: these may overtake those of an overlapped step.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def compile(self, functions: Iterable[Function]) -> None:
        """See Capturer. Captures that are thrown away: what runs in between would read what no kernel has written."""
        # It imports Triton: 0.3 s that a CPU need not wait.
        from ktqueue.operators.gpu.kernels.operation import compiled_side_by_side

        pool, rest = torch.cuda.graph_pool_handle(), iter(functions)
        graphs = []  # their pool must not be freed before the last of them
        for some in (islice(rest, 1), rest):
            with compiled_side_by_side() as missing, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # where all kernels are missing
                for function in some:
                    graphs.append(torch.cuda.CUDAGraph())
                    # What is done once in a process, such as loading a library, is allowed in a capture of this kind.
                    with torch.cuda.graph(graphs[-1], pool=pool, stream=self._stream, capture_error_mode="relaxed"):
                        function()
            if not missing:
                return  # an earlier start has compiled the kernels of the first function, so probably all

    def capture(self, function: Function) -> Function:
        """Capture what `function` does on the GPU now. Its work on the host is not repeated.

        Raises the CUDA error if the work cannot be captured.
        """
        current = torch.cuda.current_stream(self._device)
        side_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(side_stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def used_bytes(self) -> int:
        """See Capturer."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

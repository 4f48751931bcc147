"""SideStream: kernels that run beside those of the current stream. On CPU tensors, they run at once."""

from collections.abc import Callable
from typing import TypeVar

import torch

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.kernels.operation import launch_after_all

R = TypeVar("R")
Work = Callable[[torch.Tensor], R]


class SideStream:
    """A second stream of `device`. It can be captured with the current one.

    Memory that is allocated on it is used again on it. So the results must be read before the next `start`.
    """

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]

    def start(self, work: Work[R], x: torch.Tensor) -> Work[R]:
        """Begin work(x) once the current stream has come here. x must live until the result is taken.

        Returns a function that gives the result for any argument, and lets the current stream wait for it.
        """
        side = self._stream
        if side is None:
            result = work(x)
            return lambda _: result
        current = torch.cuda.current_stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            launch_after_all()
            begun = work(x)

        def taken(_: torch.Tensor) -> R:
            current.wait_stream(side)
            launch_after_all()
            return begun

        return taken

"""A step that is launched a layer at a time. On CPU tensors a layer is computed when it is launched."""

from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import torch

from ktqueue.engine.logits import Logits
from ktqueue.operators.gpu.device import is_gpu

AHEAD = 3
"""Parts that the device has to do while the host does something else. Small copies to the device, which other steps
need, are queued behind the experts of these layers."""


class PartedStep:
    """A step whose layers are launched on the stream that is current when it is made.

    `parts` launches what comes before the first layer, then a layer each time, and returns the logits [scored, vocab].
    """

    def __init__(self, parts: Generator[None, None, Logits], device: torch.device) -> None:
        self._parts = parts
        self._stream = torch.cuda.current_stream(device) if is_gpu(device) else None
        self._unfinished: deque[torch.cuda.Event] = deque()  # ends of parts that the device has not done
        self.logits: Logits | None = None
        """None until all is launched."""
        self._error: BaseException | None = None
        self.launch()

    @property
    def is_done(self) -> bool:
        """Whether the device has computed the logits."""
        return self.logits is not None and not self._parts_ahead()

    def launch(self) -> bool:
        """Launch the next part. Returns False if there is none. After a part that failed, raises its error again."""
        if self.logits is not None:
            return False
        if self._error is not None:  # `parts` has ended without logits
            raise self._error
        with torch.inference_mode(), self._on_stream():
            try:
                next(self._parts)
            except StopIteration as end:
                self.logits = end.value
            except BaseException as error:
                self._error = copy(error)  # without its traceback, which would keep the tensors of the step alive
                raise
            if self._stream is not None:
                self._unfinished.append(self._stream.record_event())
        return True

    def keep_ahead(self, *, until_idle: bool = False) -> None:
        """See LaunchedStep. On a CPU, launch one part."""
        if self._stream is None:
            self.launch()
            return
        queued = torch.cuda.current_stream(self._stream.device).record_event() if until_idle else None
        while self._parts_ahead() < AHEAD and self.launch():
            if queued is not None and queued.query():
                return

    def finish(self) -> Logits:
        """Launch what is left, and wait for the logits."""
        while self.launch():
            pass
        if self._stream is not None:
            self._stream.synchronize()
        assert self.logits is not None
        return self.logits

    def _parts_ahead(self) -> int:
        while self._unfinished and self._unfinished[0].query():  # type: ignore[no-untyped-call]
            self._unfinished.popleft()
        return len(self._unfinished)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

"""Typed wrapper of the compiled hand-off: a service that runs expert layers on request words in shared memory.

The protocol, the layout of the input and the argument why nobody reads too early are in csrc/handoff/handoff.h.
Knows no GPU: whoever writes the words may be a stream, a host function or a test.
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from ktqueue_kernels import _kernels

from ktqueue.operators.native import ExpertLayer

LINE = 128
"""Bytes between two words: processors fetch cache lines in pairs."""
_PREDICTS = 1 << 10
_TOKENS_AT = 11


def request_word(layer: int, tokens: int, *, predicts: bool = False) -> int:
    """The number, never 0, that names a task. predicts: after the request the GPU writes which experts the next layer
    will probably use."""
    return tokens << _TOKENS_AT | predicts * _PREDICTS | layer + 1


class HandoffMemory(NamedTuple):
    """Memory of one task at a time, all on the host: input [bytes] uint8, out [max_tokens, hidden] float32, and two
    words [1] int32. Each begins on a cache line; the words are LINE bytes apart or more."""

    input: torch.Tensor
    out: torch.Tensor
    request: torch.Tensor
    done: torch.Tensor


@dataclass(frozen=True, slots=True)
class HandoffStatistics:
    """Since the start. experts_used: different experts of a task, added up; bytes: of their packed weights;
    predicted: experts that were predicted, predicted_used: of those what the layer then used."""

    tasks: int
    failed: int
    busy_seconds: float
    experts_used: int
    bytes: int
    predicted: int
    predicted_used: int


class HandoffService:
    """Runs tasks on `memory`: in a thread that watches the request word (`serve`), in `run`, or in a host function.

    An idle thread spins for `idle_seconds`, then naps for up to 5 ms between two looks. A task that has not ended after
    `stuck_seconds` breaks the service: all requests are then answered without being run, and `take_error` says so from
    then on. The memory and the layers are kept alive. Raises ValueError.
    """

    def __init__(
        self,
        hidden: int,
        experts_per_token: int,
        max_tokens: int,
        memory: HandoffMemory,
        *,
        serve: bool,
        idle_seconds: float = 0.02,
        stuck_seconds: float = 60.0,
    ) -> None:
        self._service = _kernels.Handoff(
            hidden,
            experts_per_token,
            max_tokens,
            (memory.input.data_ptr(), memory.out.data_ptr(), memory.request.data_ptr(), memory.done.data_ptr()),
            memory,
            serve,
            idle_seconds,
            stuck_seconds,
        )
        # Before the interpreter takes memory away from under the thread.
        self._close = weakref.finalize(self, self._service.close, 1.0)

    def add_layer(self, layer: ExpertLayer) -> int:
        """The number of `layer` in request words. Raises ValueError if its hidden size is another."""
        return self._service.add_layer(layer.bound)

    def x_offset(self, tokens: int) -> int:
        """Where, in the input of a task of `tokens`, the activations begin; the expert ids begin at 0, the weights
        right behind them."""
        return self._service.x_offset(tokens)

    def predicted_offset(self, tokens: int) -> int:
        """Where, in the input of a task of `tokens` that predicts, the ids [tokens, experts_per_token] int64 begin that
        the next layer will probably get."""
        return self._service.predicted_offset(tokens)

    def run(self, word: int) -> None:
        """Run a task in this thread, without reading or writing the words."""
        self._service.run(word)

    def host_task(self, word: int) -> tuple[int, int]:
        """Addresses of a `void (*)(void *)` and of its argument: that call does `run(word)`. Both stay valid as long as
        this object lives."""
        return self._service.host_function, self._service.host_task(word)

    def take_error(self) -> str | None:
        """The first error since the last call."""
        return self._service.take_error()

    @property
    def statistics(self) -> HandoffStatistics:
        """Since the start."""
        return HandoffStatistics(*self._service.statistics())

    def close(self, seconds: float = 1.0) -> bool:
        """End the thread; requests not yet served are answered without being run. False if a task did not end within
        `seconds`: its thread is left behind and its memory with it. A second call does nothing."""
        if not self._close.alive:
            return True
        self._close.detach()
        return self._service.close(seconds)

"""Typed wrapper of the compiled hand-off: a service that runs expert layers on request words in shared memory.

csrc/handoff/handoff.h has the protocol, the layout of the input, and the proof that nobody reads too early. Knows no
GPU: a stream, a host function or a test may write the words.
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
_SOME_ROWS = 1 << 11
_TOKENS_AT = 12


def request_word(layer: int, tokens: int, *, predicts: bool = False, all_rows: bool = True) -> int:
    """Return the number, never 0, that names a task. predicts: after the request the GPU writes which experts the next
    layer will probably use. all_rows: tokens without an expert get rows of 0; otherwise these are not written."""
    return tokens << _TOKENS_AT | (not all_rows) * _SOME_ROWS | predicts * _PREDICTS | layer + 1


class HandoffMemory(NamedTuple):
    """Memory of one task at a time, all on the host: input [bytes] uint8, out [max_tokens, hidden] float32, and two
    words [1] int32. Each begins on a cache line; the words are LINE bytes apart or more."""

    input: torch.Tensor
    out: torch.Tensor
    request: torch.Tensor
    done: torch.Tensor


@dataclass(frozen=True, slots=True)
class HandoffStatistics:
    """Totals since the start. experts_used: different experts of each task; bytes: of their packed weights; predicted:
    predicted experts; predicted_used: how many of these the layer then used."""

    tasks: int
    failed: int
    busy_seconds: float
    experts_used: int
    bytes: int
    predicted: int
    predicted_used: int


class HandoffService:
    """Runs tasks on `memory`: in a thread that watches the request word (`serve`), in `run`, or in a host function.

    An idle thread spins for `idle_seconds`, then naps for up to 5 ms between two reads of the word. A task that takes
    longer than `stuck_seconds` breaks the service: it then answers all requests without running them, and every
    `take_error` reports this. Keeps the memory and the layers alive. Raises ValueError.
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
        # The thread must end before the interpreter frees its memory.
        self._close = weakref.finalize(self, self._service.close, 1.0)

    def add_layer(self, layer: ExpertLayer) -> int:
        """Return the number of `layer` in request words. Raises ValueError if its hidden size differs."""
        return self._service.add_layer(layer.bound)

    def x_offset(self, tokens: int) -> int:
        """Return where the activations begin in the input of a task of `tokens`. Expert ids begin at 0, their weights
        follow."""
        return self._service.x_offset(tokens)

    def predicted_offset(self, tokens: int) -> int:
        """Return where the predicted ids [tokens, experts_per_token] int64 of the next layer begin in the input of a
        task of `tokens` that predicts."""
        return self._service.predicted_offset(tokens)

    def run(self, word: int) -> None:
        """Run a task in this thread, without reading or writing the words."""
        self._service.run(word)

    def host_task(self, word: int) -> tuple[int, int]:
        """Addresses of a `void (*)(void *)` and of its argument: that call does `run(word)`. Both stay valid as long as
        this object lives."""
        return self._service.host_function, self._service.host_task(word)

    def take_error(self) -> str | None:
        """Return the first error since the last call."""
        return self._service.take_error()

    @property
    def statistics(self) -> HandoffStatistics:
        """Totals since the start."""
        return HandoffStatistics(*self._service.statistics())

    @property
    def uses(self) -> list[list[int]]:
        """How often the tasks used each expert of each layer."""
        return self._service.uses()

    def close(self, seconds: float = 1.0) -> bool:
        """End the thread and answer unserved requests without running them. Returns False if a task did not end within
        `seconds`: its thread and its memory are then abandoned. A second call does nothing."""
        if not self._close.alive:
            return True
        self._close.detach()
        return self._service.close(seconds)

"""Typed wrapper of the compiled hand-off: a service that runs expert layers on request words in shared memory.

The protocol, the layout of the input and the argument why nobody reads too early are in csrc/handoff/handoff.h.
Knows no GPU: whoever writes the words may be a stream, a host function or a test.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from ktqueue_kernels import _kernels

from ktqueue.operators.native import ExpertLayer

LINE = 128
"""Bytes between two words: processors fetch cache lines in pairs."""
DEFERS = 1 << 10
"""Bit of the word of a task that leaves the last experts of each token for later."""
_ADDS = 1 << 11
_PREDICTS = 1 << 12
_TOKENS_AT = 13


def request_word(layer: int, tokens: int, *, defers: bool = False, adds: bool = False, predicts: bool = False) -> int:
    """The number, never 0, that names a task. defers: it leaves the last experts of each token for later; adds: to its
    output goes what the task before has left; predicts: behind the request comes what the next layer will use."""
    return tokens << _TOKENS_AT | predicts * _PREDICTS | adds * _ADDS | defers * DEFERS | layer + 1


def names_task(word: int, layer: int, tokens: int) -> bool:
    """Whether a request word is one of this layer and this number of tokens."""
    return word & ~(DEFERS | _ADDS | _PREDICTS) == request_word(layer, tokens)


class SlotMemory(NamedTuple):
    """What one slot works on, all in CPU memory: input [bytes] uint8, out [max_tokens, hidden] float32, the two words
    [1] int32. Each begins on a cache line; the words lie LINE apart or more."""

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
    """Runs tasks on `slots`: by a thread of its own that watches the request words (`serve`), by `run`, or by a host
    function.

    deferred_experts: the last of each token, which a task that defers leaves for later; such a task and the next one
    need slots of their own (csrc/handoff/handoff.h says why).
    An idle thread spins for `idle_seconds`, then naps for up to 5 ms between two looks. A task that has not ended after
    `stuck_seconds` breaks the service: all requests are then answered without being run, and `take_error` says so from
    then on. Memory of slots and layers are kept alive. Raises ValueError.
    """

    def __init__(
        self,
        hidden: int,
        experts_per_token: int,
        max_tokens: int,
        slots: Sequence[SlotMemory],
        *,
        serve: bool,
        deferred_experts: int = 0,
        idle_seconds: float = 0.02,
        stuck_seconds: float = 60.0,
    ) -> None:
        self._service = _kernels.Handoff(
            hidden,
            experts_per_token,
            max_tokens,
            deferred_experts,
            [(one.input.data_ptr(), one.out.data_ptr(), one.request.data_ptr(), one.done.data_ptr()) for one in slots],
            list(slots),
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

    def run(self, slot: int, word: int) -> None:
        """Run a task in this thread, what it defers included, words aside."""
        self._service.run(slot, word)

    def host_task(self, slot: int, word: int) -> tuple[int, int]:
        """Addresses of a `void (*)(void *)` and of its argument: the call is `run(slot, word)`, but for what the task
        defers. They last as long as this object."""
        return self._service.host_function, self._service.host_task(slot, word)

    def rest_task(self) -> tuple[int, int]:
        """The same for what the last task has deferred."""
        return self._service.rest_function, self._service.rest_task()

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

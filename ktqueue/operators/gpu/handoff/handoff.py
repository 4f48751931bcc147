"""Handoff: tokens routed to the CPU's experts go there and their results come back, in stream order, without a sync.

What a step enqueues can be captured in a CUDA graph and replayed. The protocol is in csrc/handoff/handoff.h; signals.py
has the three ways to follow it. Rows are not moved here: kernels that make them anyway write them straight to where the
CPU reads them, and read its result from where it writes it.
"""

from typing import NamedTuple, get_args

import torch

from ktqueue.operators.gpu.handoff.driver import Driver
from ktqueue.operators.gpu.handoff.memory import SLOTS, input_bytes, word_bytes
from ktqueue.operators.gpu.handoff.signals import Direct, Flags, HostFunctions, Signals
from ktqueue.operators.gpu.settings import HandoffMethod
from ktqueue.operators.native import ExpertLayer
from ktqueue.operators.native_handoff import (
    LINE,
    HandoffService,
    HandoffStatistics,
    SlotMemory,
    names_task,
    request_word,
)


class HandoffBuffers(NamedTuple):
    """Memory of one task, pinned if the device is a GPU, whose kernels may use it as their own. The input: x [tokens,
    hidden] float32, cpu_ids [tokens, experts_per_token] int64, -1 where the CPU has nothing to do, weights of that
    shape, float32. result: [tokens, hidden] float32; to be read by volatile loads, past the caches. predicted: as
    cpu_ids, what the next layer will probably get."""

    x: torch.Tensor
    cpu_ids: torch.Tensor
    weights: torch.Tensor
    result: torch.Tensor
    predicted: torch.Tensor


class Handoff:
    """Runs layers of experts on the CPU for tensors of `device`, at most `max_tokens` tokens at a time: `buffers`, then
    `request`, then `settle`.

    A slot holds one task; with two, the CPU works on one while the GPU fills the other. Tasks run one at a time, in
    the order of their requests as far as there is one. deferred_experts: of each token, the last of a task that defers:
    they are computed behind its end, and the next task, which has another slot, adds them to its result.
    method: "flags" lets the GPU write and watch words in pinned memory, "host_functions" has CUDA's own thread run the
    task; "auto" takes flags where the device can, "direct" where the tensors live on the CPU: there a task runs within
    `request`. `idle_milliseconds`: without a request until the serving thread stops spinning and naps for up to 5 ms
    between two looks. `stuck_seconds`: of one task until the hand-off is broken: the GPU then goes on with whatever the
    buffers hold, and every `check` raises.

    Not for several threads at once. Raises ValueError for sizes, methods and devices that do not fit, RuntimeError if
    CUDA's libraries do not do as they are asked.
    """

    def __init__(
        self,
        hidden: int,
        experts_per_token: int,
        max_tokens: int,
        device: str | torch.device,
        *,
        slots: int = SLOTS,
        deferred_experts: int = 0,
        method: HandoffMethod = "auto",
        idle_milliseconds: float = 20.0,
        stuck_seconds: float = 60.0,
    ) -> None:
        if min(hidden, experts_per_token, max_tokens, slots) < 1:
            raise ValueError("hidden, experts_per_token, max_tokens and slots must be positive")
        self._shape = (hidden, experts_per_token, max_tokens)
        self._device = torch.device(device)
        driver = None if self._device.type == "cpu" else self._load_driver()
        self.method = self._choose(method, driver)
        """What "auto" came to: "flags", "host_functions" or "direct"."""
        memory = _allocate(hidden, experts_per_token, max_tokens, slots, pinned=driver is not None)
        self._service = HandoffService(
            hidden,
            experts_per_token,
            max_tokens,
            memory,
            serve=self.method == "flags",
            deferred_experts=deferred_experts,
            idle_seconds=idle_milliseconds / 1000,
            stuck_seconds=stuck_seconds,
        )
        self._memory = memory
        self._signals: Signals = Direct(self._service)
        if driver is not None:
            self._signals = (
                Flags(memory, driver, self._device)
                if self.method == "flags"
                else HostFunctions(self._service, slots, driver, self._device)
            )
        self._pending: list[tuple[int, bool] | None] = [None] * slots  # word, whether in a capture

    def _load_driver(self) -> Driver:
        if self._device.type != "cuda":
            raise ValueError(f"device must be cpu or cuda, got {self._device}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        return Driver.load()

    def _choose(self, method: HandoffMethod, driver: Driver | None) -> HandoffMethod:
        if method not in get_args(HandoffMethod):
            raise ValueError(f"method must be one of {', '.join(get_args(HandoffMethod))}, got {method!r}")
        if (driver is None) != (method == "direct") and method != "auto":
            raise ValueError(f"method {method!r} does not go with tensors on {self._device}")
        if driver is None:
            return "direct"
        able = driver.has_memory_operations(self._device.index)
        if method == "flags" and not able:
            raise ValueError(f"method 'flags' is not possible: streams of {self._device} cannot wait for memory")
        return ("flags" if able else "host_functions") if method == "auto" else method

    def add_layer(self, layer: ExpertLayer) -> int:
        """The number of `layer` for the calls below; it is kept alive. Raises ValueError if its hidden size is another,
        or for more than 1,023 layers."""
        return self._service.add_layer(layer)

    def begin(self) -> None:
        """To be called when a step begins, whose tasks must not overtake those that a step before has left.

        Enqueues: wait for every task that was requested and not settled, as an exception between the two leaves it.
        Raises RuntimeError if there is one and a graph is being captured.
        """
        for slot in range(len(self._pending)):
            self._abandon(slot, self._capturing())

    def buffers(self, tokens: int, *, slot: int = 0) -> HandoffBuffers:
        """The memory of the slot's next task: its input is to be written by what is enqueued on the current stream
        before `request`, by one kernel or by several; its result is to be read by what is enqueued behind `settle`.

        Nothing but stream order is needed (csrc/handoff/handoff.h has the argument): a kernel's stores are done when it
        ends, and the request is written behind a fence for the whole system; the task before has read its input, and
        what is enqueued before `request` has read its result, when the CPU sees this one. A task of the slot that was
        requested and not settled, as an exception between the two leaves it, is waited for first. Raises ValueError for
        a number of tokens that does not fit; RuntimeError if there is such a task and a graph is being captured.
        """
        hidden, experts_per_token, max_tokens = self._shape
        if not 1 <= tokens <= max_tokens:
            raise ValueError(f"tokens must be from 1 to {max_tokens}, got {tokens}")
        self._abandon(slot, self._capturing())
        memory = self._memory[slot]
        at = self._service.x_offset(tokens), self._service.predicted_offset(tokens)
        x, cpu_ids, weights, predicted = _input(memory.input, tokens, experts_per_token, hidden, *at)
        return HandoffBuffers(x, cpu_ids, weights, memory.out[:tokens], predicted)

    def request(
        self,
        layer: int,
        tokens: int,
        *,
        slot: int = 0,
        defers: bool = False,
        adds: bool = False,
        predicts: bool = False,
    ) -> None:
        """Enqueue the request for a task whose input is in `buffers`.

        defers: its result lacks the last experts of each token, and the next task, of another slot, has to add them;
        adds: the task before defers, and its result comes to this one's. predicts: what is enqueued from here to
        `settle` fills in `predicted`. Raises RuntimeError if the slot's last task was not waited for.
        """
        if self._pending[slot] is not None:
            raise RuntimeError(f"the last task of slot {slot} was not waited for")
        word = request_word(layer, tokens, defers=defers, adds=adds, predicts=predicts)
        self._signals.request(slot, word)
        self._pending[slot] = (word, self._capturing())

    def settle(self, layer: int, tokens: int, *, slot: int = 0) -> None:
        """Enqueue: wait for the slot's task; its result is in `buffers` until the slot's next task. Raises RuntimeError
        if the slot's last request was of another layer or number of tokens: the GPU would wait for ever."""
        pending = self._pending[slot]
        if pending is None or not names_task(pending[0], layer, tokens):
            raise RuntimeError(f"slot {slot} has no task of layer {layer} with {tokens} tokens to wait for")
        self._pending[slot] = None
        self._signals.settle(slot, pending[0])

    def check(self) -> None:
        """Raise RuntimeError with the first error of any task since the last call. To be called after a sync.

        A task that failed has returned rows of NaN.
        """
        self._pending = [one if one and not one[1] else None for one in self._pending]  # captures have ended
        message = self._service.take_error()
        if message is not None:
            raise RuntimeError(message)

    @property
    def statistics(self) -> HandoffStatistics:
        """Of all tasks since the start."""
        return self._service.statistics

    def close(self) -> None:
        """End the serving thread. No stream may still use this hand-off, and no graph that was captured with it may
        run again."""
        self._service.close()

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _abandon(self, slot: int, capturing: bool) -> None:
        """Wait for a task that was requested and not settled: the CPU may still read the slot."""
        pending = self._pending[slot]
        if pending is None:
            return
        if capturing:
            raise RuntimeError(f"the last task of slot {slot} was not waited for, and now a graph is being captured")
        word, captured = pending
        if not captured:  # a capture that failed has requested nothing
            self._signals.settle(slot, word)
        self._pending[slot] = None


def _input(
    memory: torch.Tensor, tokens: int, experts_per_token: int, hidden: int, x_offset: int, predicted_offset: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, cpu_ids, weights and predicted ids of a task, views of memory [bytes] uint8, where csrc/handoff/handoff.h has
    them."""
    pairs = tokens * experts_per_token
    return (
        memory[x_offset : x_offset + 4 * tokens * hidden].view(torch.float32).view(tokens, hidden),
        memory[: 8 * pairs].view(torch.int64).view(tokens, experts_per_token),
        memory[8 * pairs : 12 * pairs].view(torch.float32).view(tokens, experts_per_token),
        memory[predicted_offset : predicted_offset + 8 * pairs].view(torch.int64).view(tokens, experts_per_token),
    )


def _allocate(hidden: int, experts_per_token: int, max_tokens: int, slots: int, *, pinned: bool) -> list[SlotMemory]:
    """Memory for slots, as HandoffService wants it. The words of all slots share one block."""
    size = input_bytes(hidden, experts_per_token, max_tokens)
    block = torch.zeros(word_bytes(slots), dtype=torch.uint8, pin_memory=pinned)
    begin = -block.data_ptr() % LINE
    words = [block[at : at + 4].view(torch.int32) for at in range(begin, begin + 2 * slots * LINE, LINE)]
    return [
        SlotMemory(
            torch.zeros(size, dtype=torch.uint8, pin_memory=pinned),
            torch.zeros(max_tokens, hidden, dtype=torch.float32, pin_memory=pinned),
            words[2 * slot],
            words[2 * slot + 1],
        )
        for slot in range(slots)
    ]

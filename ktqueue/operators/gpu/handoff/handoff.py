"""Handoff: send tokens to the CPU's experts and get the results back, in stream order and without a sync.

A step that uses it can be captured in a CUDA graph and replayed. csrc/handoff/handoff.h has the protocol, signals.py
the three ways to follow it. Rows are not copied: the kernels that compute them write to the memory that the CPU reads,
and read the result from the memory that the CPU writes.
"""

from typing import NamedTuple, get_args

import torch

from ktqueue.core.settings.engine import HandoffMethod
from ktqueue.operators.gpu.handoff.signals import (
    CudaStream,
    DirectCalls,
    HostFunctionSignals,
    Signals,
    StepStream,
    WordSignals,
)
from ktqueue.operators.native import ExpertLayer
from ktqueue.operators.native_handoff import (
    LINE,
    HandoffMemory,
    HandoffService,
    HandoffStatistics,
    request_word,
)

_WORD_BYTES = 3 * LINE  # two words, each in a line of its own, wherever their memory begins


class HandoffBuffers(NamedTuple):
    """Memory of one task. For a GPU it is pinned, and kernels may use it like device memory.

    x: [tokens, hidden] float32, the input. cpu_ids: [tokens, experts_per_token] int64, -1: the GPU computes it.
    weights: of that shape, float32. result: [tokens, hidden] float32; kernels must read it with volatile loads, past
    the caches. predicted: as cpu_ids, the experts that the next layer will probably use.
    """

    x: torch.Tensor
    cpu_ids: torch.Tensor
    weights: torch.Tensor
    result: torch.Tensor
    predicted: torch.Tensor


def pinned_bytes(hidden: int, experts_per_token: int, max_tokens: int) -> int:
    """Host memory that a hand-off pins. torch pins memory in powers of two."""
    sizes = _WORD_BYTES, _input_bytes(hidden, experts_per_token, max_tokens), 4 * max_tokens * hidden
    return sum(1 << (size - 1).bit_length() for size in sizes)


class Handoff:
    """Runs layers of experts on the CPU for tensors of `device`: `buffers`, then `request`, then `wait`.

    One task at a time, of at most `max_tokens` tokens. `method`: with "flags" the GPU writes and watches words in
    pinned memory; with "host_functions" a thread of CUDA runs the task; with "direct" the tensors are on the CPU, and
    `request` runs the task. "auto" takes the first of these that the device supports. `idle_milliseconds`: after this
    time without a request the serving thread stops spinning and naps for up to 5 ms between two looks.
    `stuck_seconds`: a task that takes longer breaks the hand-off. The GPU then continues with what is in
    the buffers, and every `check` raises. `stream`: runs the steps; None: the current one of `device`.

    Not thread-safe. Raises ValueError for a wrong size, method or device, RuntimeError if a call of CUDA fails.
    """

    def __init__(
        self,
        hidden: int,
        experts_per_token: int,
        max_tokens: int,
        device: str | torch.device,
        *,
        method: HandoffMethod = "auto",
        idle_milliseconds: float = 20.0,
        stuck_seconds: float = 60.0,
        stream: StepStream | None = None,
    ) -> None:
        if min(hidden, experts_per_token, max_tokens) < 1:
            raise ValueError("hidden, experts_per_token and max_tokens must be positive")
        self._shape = (hidden, experts_per_token, max_tokens)
        cuda = None if torch.device(device).type == "cpu" else CudaStream(torch.device(device))
        self._stream = cuda if stream is None else stream
        self.method = _choose_method(method, self._stream, device)
        """"flags", "host_functions" or "direct"."""
        self._memory = _allocate(hidden, experts_per_token, max_tokens, pinned=cuda is not None)
        self._service = HandoffService(
            hidden,
            experts_per_token,
            max_tokens,
            self._memory,
            serve=self.method == "flags",
            idle_seconds=idle_milliseconds / 1000,
            stuck_seconds=stuck_seconds,
        )
        self._signals: Signals = DirectCalls(self._service)
        if self.method == "flags" and self._stream is not None:
            self._signals = WordSignals(self._memory, self._stream)
        if self.method == "host_functions" and cuda is not None:
            self._signals = HostFunctionSignals(self._service, cuda)
        self._pending: _Pending | None = None

    def add_layer(self, layer: ExpertLayer) -> int:
        """Add a layer and keep it alive. Returns its number for the calls below.

        Raises ValueError if its hidden size differs, or for more than 1,023 layers.
        """
        return self._service.add_layer(layer)

    def buffers(self, tokens: int) -> HandoffBuffers:
        """The memory of the next task. Kernels enqueued before `request` write its input; kernels enqueued after `wait`
        read its result.

        Stream order is enough (csrc/handoff/handoff.h explains why): the stores of a kernel are done when it ends, and
        the request is written behind a system-wide fence. By the time the CPU sees this request, the task before has
        read its input, and what was enqueued before `request` has read its result.

        If an exception left a task without `wait`, its end is waited for first. Raises ValueError for a number of
        tokens out of range, RuntimeError if there is such a task while a graph is being captured.
        """
        hidden, experts_per_token, max_tokens = self._shape
        if not 1 <= tokens <= max_tokens:
            raise ValueError(f"tokens must be from 1 to {max_tokens}, got {tokens}")
        self._finish_abandoned_task()
        pairs = tokens * experts_per_token
        ids_shape = tokens, experts_per_token
        memory = self._memory.input
        x, predicted = self._service.x_offset(tokens), self._service.predicted_offset(tokens)
        return HandoffBuffers(
            x=memory[x : x + 4 * tokens * hidden].view(torch.float32).view(tokens, hidden),
            cpu_ids=memory[: 8 * pairs].view(torch.int64).view(ids_shape),
            weights=memory[8 * pairs : 12 * pairs].view(torch.float32).view(ids_shape),
            result=self._memory.out[:tokens],
            predicted=memory[predicted : predicted + 8 * pairs].view(torch.int64).view(ids_shape),
        )

    def request(self, layer: int, tokens: int, *, predicts: bool = False, all_rows: bool = True) -> None:
        """Enqueue the request for a task whose input is in `buffers`.

        predicts: kernels enqueued between here and `wait` fill in `predicted`. all_rows: rows of the result for which
        the CPU computes no expert are 0; otherwise they keep what they have. Raises RuntimeError if the last task was
        not waited for.
        """
        if self._pending is not None:
            raise RuntimeError("the last task was not waited for")
        word = request_word(layer, tokens, predicts=predicts, all_rows=all_rows)
        self._signals.request(word)
        self._pending = _Pending(layer, tokens, word, self._is_capturing())

    def wait(self, layer: int, tokens: int) -> None:
        """Enqueue a wait for the task. Its result is in `buffers` until the next task.

        Raises RuntimeError if the last request was for another layer or number of tokens: the GPU would wait forever.
        """
        pending = self._pending
        if pending is None or (pending.layer, pending.tokens) != (layer, tokens):
            raise RuntimeError(f"there is no task of layer {layer} with {tokens} tokens to wait for")
        self._pending = None
        self._signals.wait(pending.word)

    def check(self) -> None:
        """Raise RuntimeError with the first error of any task since the last call. Call it after a sync.

        The result of a failed task is NaN.
        """
        if self._pending is not None and self._pending.captured:
            self._pending = None  # the capture has ended
        message = self._service.take_error()
        if message is not None:
            raise RuntimeError(message)

    @property
    def statistics(self) -> HandoffStatistics:
        """Totals of all tasks since the start."""
        return self._service.statistics

    @property
    def uses(self) -> list[list[int]]:
        """How often the CPU computed each expert of each layer, over all tokens."""
        return self._service.uses

    def close(self) -> None:
        """Stop the serving thread. No stream may still use this hand-off, and no graph that was captured with it may be
        replayed again."""
        self._service.close()

    def _is_capturing(self) -> bool:
        return self._stream is not None and self._stream.is_capturing()

    def _finish_abandoned_task(self) -> None:
        """Enqueue a wait for a task that was requested and not waited for: the CPU may still read its input."""
        pending = self._pending
        if pending is None:
            return
        if self._is_capturing():
            raise RuntimeError("the last task was not waited for, and now a graph is being captured")
        if not pending.captured:  # a capture that failed has requested nothing
            self._signals.wait(pending.word)
        self._pending = None


def _choose_method(method: HandoffMethod, stream: StepStream | None, device: str | torch.device) -> HandoffMethod:
    if method not in get_args(HandoffMethod):
        raise ValueError(f"method must be one of {', '.join(get_args(HandoffMethod))}, got {method!r}")
    if (stream is None) != (method == "direct") and method != "auto":
        raise ValueError(f"method {method!r} does not go with tensors on {device}")
    if stream is None:
        return "direct"
    can_wait = stream.can_wait_for_words()
    if method == "flags" and not can_wait:
        raise ValueError(f"method 'flags' is not possible: streams of {device} cannot wait for memory")
    return ("flags" if can_wait else "host_functions") if method == "auto" else method


class _Pending(NamedTuple):
    """A task that was requested and not waited for. captured: the request is part of a graph and did not run."""

    layer: int
    tokens: int
    word: int
    captured: bool


def _input_bytes(hidden: int, experts_per_token: int, max_tokens: int) -> int:
    """Size of the input in the layout of csrc/handoff/handoff.h.

    A pair of a token and an expert takes 20 bytes: its id, its weight and a predicted id. Then follows x in float32.
    Both x and the predictions begin on a cache line, so there is padding.
    """
    return 20 * max_tokens * experts_per_token + 128 + 4 * max_tokens * hidden


def _allocate(hidden: int, experts_per_token: int, max_tokens: int, *, pinned: bool) -> HandoffMemory:
    block = torch.zeros(_WORD_BYTES, dtype=torch.uint8, pin_memory=pinned)
    begin = -block.data_ptr() % LINE
    request, done = (block[start : start + 4].view(torch.int32) for start in (begin, begin + LINE))
    return HandoffMemory(
        torch.zeros(_input_bytes(hidden, experts_per_token, max_tokens), dtype=torch.uint8, pin_memory=pinned),
        torch.zeros(max_tokens, hidden, dtype=torch.float32, pin_memory=pinned),
        request,
        done,
    )

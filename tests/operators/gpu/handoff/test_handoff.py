"""The hand-off on CPU tensors, and its signals with Python in place of the stream."""

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.handoff.driver import MemoryOperation
from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.kernels.operation import dependent_launches, launch_options
from ktqueue.operators.native_handoff import request_word
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

HIDDEN, EXPERTS, K, MAX_TOKENS = 96, 5, 2, 9
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def layers(random_weights: Callable[..., Bytes]) -> list[native.ExpertLayer]:
    """Two expert layers."""

    def matrices(rows: int, columns: int, seed: int) -> PackedExperts:
        data = [random_weights("Q8_0", rows * columns, seed + i) for i in range(EXPERTS)]
        return PackedExperts("Q8_0", rows, columns, data)

    return [
        native.ExpertLayer(
            ExpertWeights(matrices(64, HIDDEN, seed), matrices(64, HIDDEN, seed + 10), matrices(HIDDEN, 64, seed + 20))
        )
        for seed in (0, 100)
    ]


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    """x [tokens, HIDDEN], ids and weights [tokens, K]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(K).indices
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype), ids, torch.rand(tokens, K, generator=generator)


def forward(layer: native.ExpertLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer itself, without a hand-off."""
    out = torch.empty(len(x), HIDDEN)
    layer.forward(x.float().numpy(), ids.numpy(), weights.numpy(), out.numpy())
    return out


def submit(handoff: Handoff, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Write the rows to the buffers and request the task. Returns the memory of its result, [tokens, HIDDEN]."""
    buffers = handoff.buffers(len(x))
    for target, source in zip(buffers[:3], (x, ids, weights), strict=True):
        target.copy_(source)
    handoff.request(layer, len(x))
    return buffers.result


def run(handoff: Handoff, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A whole task; returns a copy of its result."""
    result = submit(handoff, layer, x, ids, weights)
    handoff.wait(layer, len(x))
    return result.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_direct_calls_equal_the_layer(layers: list[native.ExpertLayer], dtype: torch.dtype) -> None:
    handoff = Handoff(HIDDEN, K, MAX_TOKENS, "cpu")
    assert handoff.method == "direct"
    numbers = [handoff.add_layer(layer) for layer in layers]
    for tokens in (1, 4, MAX_TOKENS):
        for number, layer in zip(numbers, layers, strict=True):
            rows = inputs(tokens, tokens, dtype)
            assert torch.equal(run(handoff, number, *rows), forward(layer, *rows))
    handoff.check()
    assert handoff.statistics.tasks == 6
    handoff.close()


def test_errors_reach_check(layers: list[native.ExpertLayer]) -> None:
    handoff = Handoff(HIDDEN, K, MAX_TOKENS, "cpu")
    number = handoff.add_layer(layers[0])
    x, ids, weights = inputs(2)
    assert run(handoff, number, x, ids + EXPERTS, weights).isnan().all()
    with pytest.raises(RuntimeError, match="experts of layer 0 on 2 tokens: expert id must be from 0 to 4 or -1"):
        handoff.check()
    handoff.check()


def test_wrong_arguments_are_refused(layers: list[native.ExpertLayer]) -> None:
    handoff = Handoff(HIDDEN, K, MAX_TOKENS, "cpu")
    number = handoff.add_layer(layers[0])
    for tokens in (0, MAX_TOKENS + 1):
        with pytest.raises(ValueError, match=f"tokens must be from 1 to {MAX_TOKENS}, got {tokens}"):
            handoff.buffers(tokens)
    with pytest.raises(RuntimeError, match="no task of layer 0 with 2 tokens"):
        handoff.wait(number, 2)
    submit(handoff, number, *inputs(2))
    for layer, tokens in ((number, 1), (number + 1, 2)):
        with pytest.raises(RuntimeError, match=f"no task of layer {layer} with {tokens} tokens"):
            handoff.wait(layer, tokens)
    with pytest.raises(RuntimeError, match="the last task was not waited for"):
        handoff.request(number, 2)
    handoff.wait(number, 2)
    with pytest.raises(RuntimeError, match="no task of layer 0 with 2 tokens"):
        handoff.wait(number, 2)
    methods: list[tuple[Any, str]] = [
        ("flags", "method 'flags' does not go with tensors on cpu"),
        ("best", "method must be one of auto, flags, host_functions, direct, got 'best'"),
    ]
    for method, message in methods:
        with pytest.raises(ValueError, match=message):
            Handoff(HIDDEN, K, MAX_TOKENS, "cpu", method=method)
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        Handoff(HIDDEN, K, MAX_TOKENS, "meta")


class PlayedStream:
    """A StepStream that runs each operation at once, and waits as long as a wait takes. While `capturing`, operations
    are recorded only, as in a graph."""

    def __init__(self) -> None:
        self.nodes = 0
        self.capturing = False

    def can_wait_for_words(self) -> bool:
        return True

    def device_address(self, address: int) -> int:
        return address

    def is_capturing(self) -> bool:
        return self.capturing

    def enqueue(self, *operations: MemoryOperation) -> None:
        if self.capturing:
            return
        self.nodes += 1
        for operation in operations:
            word = np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(operation.address))
            if operation.kind == "write":
                word[0] = operation.value
                continue
            end = time.monotonic() + 20
            while int(word[0]) != operation.value:
                assert time.monotonic() < end, "no answer"
                time.sleep(0)


@pytest.fixture
def stream() -> PlayedStream:
    """The stream of `flags`."""
    return PlayedStream()


@pytest.fixture
def flags(stream: PlayedStream) -> Iterator[Handoff]:
    """A hand-off with words in memory."""
    handoff = Handoff(HIDDEN, K, MAX_TOKENS, "cpu", stream=stream)
    assert handoff.method == "flags"
    yield handoff
    handoff.close()


def test_flags_serve_step_after_step(flags: Handoff, stream: PlayedStream, layers: list[native.ExpertLayer]) -> None:
    numbers = [flags.add_layer(layer) for layer in layers]
    for step in range(20):
        for number, layer in zip(numbers, layers, strict=True):
            rows = inputs(1 + step % 3, step)
            assert torch.equal(run(flags, number, *rows), forward(layer, *rows))
    assert stream.nodes == 2 * 40, "one node for each of the two signals"
    flags.check()
    assert flags.statistics.tasks == 40


def test_no_kernel_is_launched_early_behind_a_signal(flags: Handoff, layers: list[native.ExpertLayer]) -> None:
    """Only a kernel lets another begin, not an operation of the stream."""
    number, rows = flags.add_layer(layers[0]), inputs(2)
    with dependent_launches(True):
        submit(flags, number, *rows)
        assert [launch_options()["WAITS"] for _ in range(2)] == [False, True]
        flags.wait(number, 2)
        assert [launch_options()["WAITS"] for _ in range(2)] == [False, True]


def test_flags_serve_the_same_word_each_time(flags: Handoff, layers: list[native.ExpertLayer]) -> None:
    """The done word of the previous task must not count for this task."""
    number = flags.add_layer(layers[0])
    for step in range(30):
        rows = inputs(MAX_TOKENS, step)
        assert torch.equal(run(flags, number, *rows), forward(layers[0], *rows))


def test_the_next_task_waits_for_an_abandoned_one(
    flags: Handoff, stream: PlayedStream, layers: list[native.ExpertLayer]
) -> None:
    """After an exception between request and wait, the next rows must not overwrite what the CPU still reads."""
    number = flags.add_layer(layers[0])
    submit(flags, number, *inputs(MAX_TOKENS, 1))
    rows = inputs(2, 2)
    assert torch.equal(run(flags, number, *rows), forward(layers[0], *rows))
    assert stream.nodes == 4
    assert flags.statistics.tasks == 2


def test_buffers_wait_for_an_abandoned_task(
    flags: Handoff, stream: PlayedStream, layers: list[native.ExpertLayer]
) -> None:
    number = flags.add_layer(layers[0])
    submit(flags, number, *inputs(MAX_TOKENS, 1))
    with pytest.raises(RuntimeError, match="the last task was not waited for"):
        flags.request(number, 2)
    assert stream.nodes == 1
    flags.buffers(2)
    assert stream.nodes == 2 and flags.statistics.tasks == 1
    with pytest.raises(RuntimeError, match="no task of layer 0 with 2 tokens"):
        flags.wait(number, 2)


def test_a_failed_capture_leaves_nothing_to_wait_for(
    flags: Handoff, stream: PlayedStream, layers: list[native.ExpertLayer]
) -> None:
    number = flags.add_layer(layers[0])
    rows = inputs(2)
    stream.capturing = True
    submit(flags, number, *rows)
    with pytest.raises(RuntimeError, match="was not waited for, and now a graph is being captured"):
        flags.buffers(2)
    flags.check()
    submit(flags, number, *rows)
    stream.capturing = False
    assert torch.equal(run(flags, number, *rows), forward(layers[0], *rows))
    assert stream.nodes == 2


def test_buffers_have_the_layout_that_the_service_reads() -> None:
    handoff = Handoff(4, 2, 3, "cpu")
    buffers = handoff.buffers(3)
    assert [list(buffer.shape) for buffer in buffers] == [[3, 4], [3, 2], [3, 2], [3, 4], [3, 2]]
    for target in buffers:
        target.copy_(torch.arange(target.numel()).view_as(target))
    memory = torch.empty(0, dtype=torch.uint8).set_(buffers.x.untyped_storage())
    assert memory[:48].view(torch.int64).tolist() == [*range(6)]
    assert memory[48:72].view(torch.float32).tolist() == [*range(6)]
    assert memory[128:176].view(torch.float32).tolist() == [*range(12)]
    assert memory[192:240].view(torch.int64).tolist() == [*range(6)]
    assert not memory[72:128].any() and not memory[176:192].any() and not memory[240:].any()
    handoff.close()


@pytest.mark.parametrize(("hidden", "k", "max_tokens"), [(7, 1, 1), (96, 2, 9), (33, 5, 3)])
def test_the_memory_holds_the_largest_task(hidden: int, k: int, max_tokens: int) -> None:
    handoff = Handoff(hidden, k, max_tokens, "cpu")
    task = handoff.buffers(max_tokens)
    parts = [task.cpu_ids, task.weights, task.x, task.predicted]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    assert all(end <= following.data_ptr() for end, following in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= task.x.untyped_storage().data_ptr() + task.x.untyped_storage().nbytes()
    handoff.close()


def test_a_request_word_names_layer_and_tokens() -> None:
    assert request_word(47, 1) == 1 << 12 | 48
    assert request_word(0, 1, predicts=True) == 1 << 12 | 1 << 10 | 1
    assert request_word(0, 1, all_rows=False) == 1 << 12 | 1 << 11 | 1

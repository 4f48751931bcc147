"""The hand-off on CPU tensors, and its signals with Python as the stream."""

import time

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.handoff.driver import MemoryOperation
from ktqueue.operators.gpu.handoff.handoff import Handoff, _allocate
from ktqueue.operators.gpu.handoff.signals import DirectCalls, WordSignals
from ktqueue.operators.native_handoff import HandoffService, request_word
from ktqueue.operators.packed import ExpertWeights, PackedExperts

HIDDEN, EXPERTS, K, MOST = 96, 5, 2, 9


@pytest.fixture
def layers(random_weights):
    def matrices(rows: int, columns: int, seed: int) -> PackedExperts:
        data = [random_weights("Q8_0", rows * columns, seed + i) for i in range(EXPERTS)]
        return PackedExperts("Q8_0", rows, columns, data)

    return [
        native.ExpertLayer(
            ExpertWeights(matrices(64, HIDDEN, seed), matrices(64, HIDDEN, seed + 10), matrices(HIDDEN, 64, seed + 20))
        )
        for seed in (0, 100)
    ]


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(K).indices
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype), ids, torch.rand(tokens, K, generator=generator)


def forward(layer: native.ExpertLayer, x, ids, weights) -> torch.Tensor:
    out = torch.empty(len(x), HIDDEN)
    layer.forward(x.float().numpy(), ids.numpy(), weights.numpy(), out.numpy())
    return out


def submit(handoff: Handoff, layer: int, x, ids, weights) -> torch.Tensor:
    """Put the rows where the CPU reads them and request the task; where its result, [tokens, hidden], will be."""
    buffers = handoff.buffers(len(x))
    for target, source in zip(buffers[:3], (x, ids, weights), strict=True):
        target.copy_(source)
    handoff.request(layer, len(x))
    return buffers.result


def run(handoff: Handoff, layer: int, x, ids, weights) -> torch.Tensor:
    """The result of a task from its beginning to its end."""
    result = submit(handoff, layer, x, ids, weights)
    handoff.wait(layer, len(x))
    return result.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_direct_equals_the_layer(layers, dtype):
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    assert handoff.method == "direct"
    numbers = [handoff.add_layer(layer) for layer in layers]
    for tokens in (1, 4, MOST):
        for number, layer in zip(numbers, layers, strict=True):
            given = inputs(tokens, tokens, dtype)
            assert torch.equal(run(handoff, number, *given), forward(layer, *given))
    handoff.check()
    assert handoff.statistics.tasks == 6
    handoff.close()


def test_errors_reach_check(layers):
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    number = handoff.add_layer(layers[0])
    x, ids, weights = inputs(2)
    assert run(handoff, number, x, ids + EXPERTS, weights).isnan().all()
    with pytest.raises(RuntimeError, match="experts of layer 0 on 2 tokens: expert id must be from 0 to 4 or -1"):
        handoff.check()
    handoff.check()


def test_refuses_what_does_not_fit(layers):
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    number = handoff.add_layer(layers[0])
    for tokens in (0, MOST + 1):
        with pytest.raises(ValueError, match=f"tokens must be from 1 to {MOST}, got {tokens}"):
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
    for options, message in [
        ({"method": "flags"}, "method 'flags' does not go with tensors on cpu"),
        ({"method": "best"}, "method must be one of auto, flags, host_functions, direct, got 'best'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Handoff(HIDDEN, K, MOST, "cpu", **options)
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        Handoff(HIDDEN, K, MOST, "meta")


class Stream:
    """Runs memory operations as a stream does: one after the other, and a wait takes as long as it takes."""

    def __init__(self, memory) -> None:
        self.words = {word.data_ptr(): word for word in (memory.request, memory.done)}
        self.nodes = 0

    def device_address(self, address: int) -> int:
        return address

    def memory_operations(self, stream: int, operations: list[MemoryOperation]) -> None:
        assert stream == 5
        self.nodes += 1
        for one in operations:
            word = self.words[one.address]
            if one.kind == "write":
                word[0] = one.value
                continue
            end = time.monotonic() + 20
            while int(word[0]) != one.value:
                assert time.monotonic() < end, "nobody answered"
                time.sleep(0)


@pytest.fixture
def flags(monkeypatch):
    """(hand-off whose stream is played by Python, the stream)."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Handle", (), {"cuda_stream": 5}))
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    memory = _allocate(HIDDEN, K, MOST, pinned=False)
    handoff._service = HandoffService(HIDDEN, K, MOST, memory, serve=True)
    handoff._memory = memory
    stream = Stream(memory)
    handoff._signals = WordSignals(memory, stream, torch.device("cpu"))
    yield handoff, stream
    handoff.close()


def test_flags_serve_step_after_step(flags, layers):
    handoff, stream = flags
    numbers = [handoff.add_layer(layer) for layer in layers]
    for step in range(20):
        for number, layer in zip(numbers, layers, strict=True):
            given = inputs(1 + step % 3, step)
            assert torch.equal(run(handoff, number, *given), forward(layer, *given))
    assert stream.nodes == 2 * 40, "one for each of the two signals"
    handoff.check()
    assert handoff.statistics.tasks == 40


def test_flags_with_the_same_word_each_time(flags, layers):
    """The done word of the task before must not pass for this one's."""
    handoff, _ = flags
    number = handoff.add_layer(layers[0])
    for step in range(30):
        given = inputs(MOST, step)
        assert torch.equal(run(handoff, number, *given), forward(layers[0], *given))


def test_a_task_that_nobody_waited_for_is_waited_for_by_the_next(flags, layers):
    """An exception between the two must not let the next rows overwrite what the CPU still reads."""
    handoff, stream = flags
    number = handoff.add_layer(layers[0])
    submit(handoff, number, *inputs(MOST, 1))
    given = inputs(2, 2)
    assert torch.equal(run(handoff, number, *given), forward(layers[0], *given))
    assert stream.nodes == 4
    assert handoff.statistics.tasks == 2


def test_buffers_wait_for_a_task_that_was_abandoned(flags, layers):
    handoff, stream = flags
    number = handoff.add_layer(layers[0])
    submit(handoff, number, *inputs(MOST, 1))
    with pytest.raises(RuntimeError, match="the last task was not waited for"):
        handoff.request(number, 2)
    assert stream.nodes == 1
    handoff.buffers(2)
    assert stream.nodes == 2 and handoff.statistics.tasks == 1
    with pytest.raises(RuntimeError, match="no task of layer 0 with 2 tokens"):
        handoff.wait(number, 2)


def test_captures_that_fail_leave_nothing_to_wait_for(flags, layers, monkeypatch):
    handoff, stream = flags
    number = handoff.add_layer(layers[0])
    given = inputs(2)
    handoff._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    handoff._signals = DirectCalls(handoff._service)  # what is captured does not reach the service's words
    submit(handoff, number, *given)
    with pytest.raises(RuntimeError, match="was not waited for, and now a graph is being captured"):
        handoff.buffers(2)
    handoff.check()
    submit(handoff, number, *given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    handoff._signals = WordSignals(handoff._memory, stream, torch.device("cpu"))
    assert torch.equal(run(handoff, number, *given), forward(layers[0], *given))
    assert stream.nodes == 2


def test_buffers_are_the_memory_that_the_service_reads_and_writes():
    handoff = Handoff(4, 2, 3, "cpu")
    buffers = handoff.buffers(3)
    assert [list(one.shape) for one in buffers] == [[3, 4], [3, 2], [3, 2], [3, 4], [3, 2]]
    for target in buffers:
        target.copy_(torch.arange(target.numel()).view_as(target))
    memory, out = handoff._memory[:2]
    assert memory[:48].view(torch.int64).tolist() == [*range(6)]
    assert memory[48:72].view(torch.float32).tolist() == [*range(6)]
    assert memory[128:176].view(torch.float32).tolist() == [*range(12)]
    assert memory[192:240].view(torch.int64).tolist() == [*range(6)]
    assert not memory[72:128].any() and not memory[176:192].any() and not memory[240:].any()
    assert out.flatten().tolist() == [*range(12)]
    handoff.close()


def test_the_memory_holds_a_task_of_the_most_tokens():
    assert request_word(47, 1) == 1 << 13 | 48
    assert request_word(0, 1, predicts=True) == 1 << 13 | 1 << 12 | 1
    for hidden, k, most in ((7, 1, 1), (96, 2, 9), (33, 5, 3)):
        memory = _allocate(hidden, k, most, pinned=False)
        service = HandoffService(hidden, k, most, memory, serve=False)
        assert service.x_offset(most) + 4 * most * hidden <= service.predicted_offset(most)
        assert service.predicted_offset(most) + 8 * most * k <= memory.input.nbytes
        assert service.x_offset(most) >= 12 * most * k

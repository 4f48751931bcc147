"""The hand-off on CPU tensors, its signals with Python as the stream, and its kernels in Triton's interpreter."""

import os
import subprocess
import sys
import time

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.driver import MemoryOperation
from ktqueue.operators.gpu.handoff import Handoff, _allocate
from ktqueue.operators.gpu.signals import Direct, Flags
from ktqueue.operators.gpu.transfer import Packed, Transfer, pack
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_direct_equals_the_layer(layers, dtype):
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    assert handoff.method == "direct"
    numbers = [handoff.add_layer(layer) for layer in layers]
    for tokens in (1, 4, MOST):
        for number, layer in zip(numbers, layers, strict=True):
            given = inputs(tokens, tokens, dtype)
            handoff.submit(number, *given)
            assert torch.equal(handoff.wait(number, tokens), forward(layer, *given))
    handoff.check()
    assert handoff.statistics.tasks == 6
    handoff.close()


def test_two_slots_and_strides(layers):
    handoff = Handoff(HIDDEN, K, MOST, "cpu", method="direct")
    numbers = [handoff.add_layer(layer) for layer in layers]
    given = [inputs(3, 1), inputs(5, 2)]
    wide = [torch.cat([one, one], dim=1)[:, :HIDDEN] for one, *_ in given]
    turned = [ids.t().contiguous().t() for _, ids, _ in given]
    for slot in (0, 1):
        handoff.submit(numbers[slot], wide[slot], turned[slot], given[slot][2], slot=slot)
    for slot in (1, 0):
        assert torch.equal(handoff.wait(numbers[slot], len(wide[slot]), slot=slot), forward(layers[slot], *given[slot]))


def test_errors_reach_check(layers):
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    number = handoff.add_layer(layers[0])
    x, ids, weights = inputs(2)
    handoff.submit(number, x, ids + EXPERTS, weights)
    assert handoff.wait(number, 2).isnan().all()
    with pytest.raises(RuntimeError, match="experts of layer 0 on 2 tokens: expert id must be from 0 to 4 or -1"):
        handoff.check()
    handoff.check()


def test_refuses_what_does_not_fit(layers):
    handoff = Handoff(HIDDEN, K, MOST, "cpu")
    number = handoff.add_layer(layers[0])
    x, ids, weights = inputs(2)
    for arguments, message in [
        ((x[:, :64], ids, weights), r"x must be \[1..9, 96\], got \[2, 64\]"),
        ((x[:0], ids[:0], weights[:0]), r"x must be \[1..9, 96\], got \[0, 96\]"),
        (inputs(MOST + 1), r"x must be \[1..9, 96\], got \[10, 96\]"),
        ((x, ids[:1], weights), r"must be \[2, 2\], got \[1, 2\] and \[2, 2\]"),
        ((x, ids, weights[:, :1]), r"must be \[2, 2\], got \[2, 2\] and \[2, 1\]"),
        ((x, ids.int(), weights), "got torch.float32, torch.int32 and torch.float32"),
        ((x.int(), ids, weights), "got torch.int32, torch.int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            handoff.submit(number, *arguments)
    with pytest.raises(RuntimeError, match="slot 1 has no task of layer 0 with 2 tokens"):
        handoff.wait(number, 2, slot=1)
    handoff.submit(number, x, ids, weights)
    with pytest.raises(RuntimeError, match="slot 0 has no task of layer 0 with 1 tokens"):
        handoff.wait(number, 1)
    handoff.wait(number, 2)
    for options, message in [
        ({"method": "flags"}, "method 'flags' does not go with tensors on cpu"),
        ({"method": "best"}, "method must be one of auto, flags, host_functions, direct, got 'best'"),
        ({"transfer": "mapped"}, "transfer cannot be 'mapped' without a GPU"),
        ({"slots": 0}, "must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            Handoff(HIDDEN, K, MOST, "cpu", **options)
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        Handoff(HIDDEN, K, MOST, "meta")


class Stream:
    """Runs memory operations as a stream does: one after the other, and a wait takes as long as it takes."""

    def __init__(self, memory) -> None:
        self.words = {word.data_ptr(): word for one in memory for word in (one.request, one.done)}
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
    memory = _allocate(HIDDEN, K, MOST, 2, pinned=False)
    handoff._service = HandoffService(HIDDEN, K, MOST, memory, serve=True)
    handoff._memory = memory
    handoff._transfer = Transfer(memory, K, torch.device("cpu"), "auto")
    stream = Stream(memory)
    handoff._signals = Flags(memory, stream, torch.device("cpu"))
    yield handoff, stream
    handoff.close()


def test_flags_serve_step_after_step(flags, layers):
    handoff, stream = flags
    numbers = [handoff.add_layer(layer) for layer in layers]
    for step in range(20):
        for number, layer in zip(numbers, layers, strict=True):
            given = inputs(1 + step % 3, step)
            handoff.submit(number, *given, slot=step % 2)
            assert torch.equal(handoff.wait(number, len(given[0]), slot=step % 2), forward(layer, *given))
    assert stream.nodes == 2 * 40
    handoff.check()


def test_flags_with_the_same_word_each_time(flags, layers):
    """The done word of the task before must not pass for this one's."""
    handoff, _ = flags
    number = handoff.add_layer(layers[0])
    for step in range(30):
        given = inputs(MOST, step)
        handoff.submit(number, *given)
        assert torch.equal(handoff.wait(number, MOST), forward(layers[0], *given))


def test_a_submit_that_nobody_waited_for_is_waited_for_by_the_next(flags, layers):
    """An exception between the two must not let the next rows overwrite what the CPU still reads."""
    handoff, stream = flags
    number = handoff.add_layer(layers[0])
    handoff.submit(number, *inputs(MOST, 1))
    given = inputs(2, 2)
    handoff.submit(number, *given)
    assert torch.equal(handoff.wait(number, 2), forward(layers[0], *given))
    assert stream.nodes == 4
    assert handoff.statistics.tasks == 2


def test_rows_where_the_cpu_finds_them_equal_the_layer(flags, layers):
    """Nothing is copied: the input is written to the slot, the result read there; a node each for the two signals."""
    handoff, stream = flags
    numbers = [handoff.add_layer(layer) for layer in layers]
    for step in range(20):
        for number, layer in zip(numbers, layers, strict=True):
            x, ids, weights = inputs(1 + step % 3, step)
            buffers = handoff.buffers(len(x), slot=step % 2)
            for target, source in zip(buffers, (x, ids, weights), strict=False):
                target.copy_(source)
            handoff.request(number, len(x), slot=step % 2)
            handoff.settle(number, len(x), slot=step % 2)
            assert torch.equal(buffers.result, forward(layer, x, ids, weights))
    assert stream.nodes == 2 * 40
    handoff.check()


def test_buffers_wait_for_a_task_that_was_abandoned(flags, layers):
    handoff, stream = flags
    number = handoff.add_layer(layers[0])
    handoff.submit(number, *inputs(MOST, 1))
    with pytest.raises(RuntimeError, match="the last task of slot 0 was not waited for"):
        handoff.request(number, 2)
    handoff.buffers(2)
    assert stream.nodes == 2 and handoff.statistics.tasks == 1
    for tokens in (0, MOST + 1):
        with pytest.raises(ValueError, match=f"tokens must be from 1 to {MOST}, got {tokens}"):
            handoff.buffers(tokens)
    with pytest.raises(RuntimeError, match="slot 0 has no task of layer 0 with 2 tokens"):
        handoff.settle(number, 2)


def test_captures_that_fail_leave_nothing_to_wait_for(flags, layers, monkeypatch):
    handoff, stream = flags
    number = handoff.add_layer(layers[0])
    given = inputs(2)
    handoff._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    handoff._signals = Direct(handoff._service)  # what is captured does not reach the service's words
    handoff.submit(number, *given)
    with pytest.raises(RuntimeError, match="was not waited for, and now a graph is being captured"):
        handoff.submit(number, *given)
    handoff.check()
    handoff.submit(number, *given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    handoff._signals = Flags(list(_memory_of(handoff)), stream, torch.device("cpu"))
    handoff.submit(number, *given)
    handoff.wait(number, 2)
    assert stream.nodes == 2


def _memory_of(handoff: Handoff):
    return handoff._transfer._slots


INTERPRETED = """
import torch
from ktqueue.operators.gpu.transfer import Packed, pack
from ktqueue.operators.gpu.triton_handoff import fetch

for tokens, hidden, k, dtype in ((1, 2048, 8, torch.bfloat16), (3, 45, 3, torch.float32), (2, 1025, 1, torch.float16)):
    x = torch.randn(tokens, hidden + 3).to(dtype)[:, :hidden]
    ids, weights = torch.randint(-1, 2**40, (tokens, k)), torch.rand(tokens, k)
    offset = -(-12 * tokens * k // 64) * 64
    memories = [torch.full((offset + 4 * tokens * hidden,), 7, dtype=torch.uint8) for _ in range(2)]
    for memory, fused in zip(memories, (False, True)):
        pack(Packed.of(memory, tokens, k, hidden, offset), x, ids, weights, fused=fused)
    assert torch.equal(*memories)
    assert torch.equal(memories[0][offset:].view(torch.float32).view(tokens, hidden), x.float())
    back = torch.full((tokens + 1, hidden), 7.0)
    fetch(x.float().contiguous(), back[:tokens])
    assert torch.equal(back[:tokens], x.float()) and back[tokens].eq(7).all()
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr


def test_packed_views_share_the_memory():
    memory = torch.zeros(64 + 4 * 3 * 4, dtype=torch.uint8)
    views = Packed.of(memory, 3, 1, 4, 64)
    pack(views, torch.ones(3, 4), torch.tensor([[2], [-1], [3]]), torch.tensor([[0.5], [1], [2]]), fused=False)
    assert memory[:24].view(torch.int64).tolist() == [2, -1, 3]
    assert memory[24:36].view(torch.float32).tolist() == [0.5, 1, 2]
    assert memory[64:].view(torch.float32).eq(1).all()


def test_a_slot_holds_its_most_tokens():
    assert request_word(47, 1) == 1 << 10 | 48
    for hidden, k, most in ((7, 1, 1), (96, 2, 9), (33, 5, 3)):
        (memory,) = _allocate(hidden, k, most, 1, pinned=False)
        service = HandoffService(hidden, k, most, [memory], serve=False)
        assert service.x_offset(most) + 4 * most * hidden <= memory.input.nbytes
        assert service.x_offset(most) >= 12 * most * k

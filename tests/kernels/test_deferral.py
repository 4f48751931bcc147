"""What a task defers comes to the next one: the hand-off's service with Python in the GPU's place."""

import ctypes
import subprocess
import sys

import pytest
import torch
from played_gpu import EXPERTS, HIDDEN, MOST, Gpu, K, inputs

from ktqueue.operators import native
from ktqueue.operators.native_handoff import HandoffService, request_word


@pytest.fixture
def layers(make_weights):
    return [native.ExpertLayer(make_weights("Q8_0", EXPERTS, HIDDEN, 32, seed)) for seed in range(3)]


@pytest.fixture(params=["served", "called", "host functions"])
def make_gpu(request):
    """make_gpu(deferred) -> a Gpu. Its `answer(slot, word)` has a request run and waits for its end alone, `finish()`
    has the rest run where that is a call of its own."""
    made = []

    def make(deferred: int) -> Gpu:
        gpu = Gpu(serve=request.param == "served", deferred_experts=deferred)

        def answer(slot: int, word: int) -> None:
            if request.param == "served":
                gpu.request(word, slot)
                gpu.wait(word, slot)
            elif request.param == "called":
                gpu.service.run(slot, word)
            else:
                call(*gpu.service.host_task(slot, word))

        def finish() -> None:
            if request.param == "host functions":
                call(*gpu.service.rest_task())

        def call(function: int, argument: int) -> None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)

        gpu.answer, gpu.finish = answer, finish
        made.append(gpu)
        return gpu

    yield make
    for one in made:
        assert one.service.close()


def only(ids: torch.Tensor, slots: slice) -> torch.Tensor:
    """ids with -1 outside of `slots`."""
    found = torch.full_like(ids, -1)
    found[:, slots] = ids[:, slots]
    return found


@pytest.mark.parametrize("deferred", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 5, MOST])
def test_each_task_has_what_the_one_before_deferred(make_gpu, layers, run_layer, tokens, deferred):
    """Three layers as a step has them, twice. Where the GPU has experts there are holes."""
    gpu = make_gpu(deferred)
    numbers = [gpu.service.add_layer(layer) for layer in layers]
    waited, late = slice(0, K - deferred), slice(K - deferred, K)
    for again in range(2):
        before = torch.zeros(tokens, HIDDEN)
        for index, layer in enumerate(layers):
            x, ids, weights = inputs(tokens, 10 * again + index)
            ids[::3, index] = -1
            last, slot = index == 2, index % 2
            word = request_word(numbers[index], tokens, defers=not last, adds=index > 0)
            gpu.write(x, ids, weights, slot)
            gpu.answer(slot, word)
            found = gpu.memory[slot].out[:tokens].clone()
            at_once = ids if last else only(ids, waited)
            torch.testing.assert_close(found, run_layer(layer, x, at_once, weights) + before, atol=1e-5, rtol=1e-5)
            gpu.memory[slot].input[: 12 * tokens * K] = 255  # only the activations are still read
            gpu.finish()
            before = run_layer(layer, x, only(ids, late), weights)
    assert gpu.service.take_error() is None
    assert gpu.service.statistics.tasks == 6


def test_all_of_a_task_is_counted(make_gpu, layers):
    gpu = make_gpu(1)
    number = gpu.service.add_layer(layers[0])
    x, _, weights = inputs(2)
    gpu.write(x, torch.tensor([[0, 1, 2], [2, 5, 4]]), weights)  # one token waits for what the other defers
    gpu.answer(0, request_word(number, 2, defers=True))
    statistics = gpu.service.statistics
    assert (statistics.tasks, statistics.failed, statistics.experts_used) == (1, 0, 5)


@pytest.mark.parametrize("slot_of_it", [0, K - 1])
def test_an_error_goes_on_to_what_is_added(make_gpu, layers, slot_of_it):
    """Whether the expert that is none was deferred or not."""
    gpu = make_gpu(1)
    number = gpu.service.add_layer(layers[0])
    x, ids, weights = inputs(2)
    wrong = ids.clone()
    wrong[1, slot_of_it] = EXPERTS
    gpu.write(x, wrong, weights)
    gpu.answer(0, request_word(number, 2, defers=True))
    assert gpu.memory[0].out[:2].isnan().all()
    gpu.write(x, ids, weights, 1)
    gpu.answer(1, request_word(number, 2, adds=True))
    assert gpu.memory[1].out[:2].isnan().all()
    assert "expert id must be from 0 to 5 or -1 for none, got 6 for token 1" in gpu.service.take_error()
    assert gpu.service.take_error() is None


def test_what_a_failed_task_should_have_added_is_not_added_later(make_gpu, layers):
    gpu = make_gpu(1)
    number = gpu.service.add_layer(layers[0])
    given = inputs(2)
    for slot, word, message in (
        (0, request_word(number, 2, defers=True), None),
        (1, request_word(number + 1, 2, defers=True, adds=True), "a layer that is not there"),
        (0, request_word(number, 2, adds=True), "2 tokens adds what was deferred of 0"),
    ):
        gpu.write(*given, slot)
        gpu.answer(slot, word)
        assert (message or "") in (gpu.service.take_error() or "")
        assert gpu.memory[slot].out[:2].isnan().all() == (message is not None)
        gpu.finish()


def test_what_was_not_deferred_is_not_added(make_gpu, layers, run_layer):
    """Nor is what a step has left that was given up."""
    gpu = make_gpu(1)
    number = gpu.service.add_layer(layers[0])
    given = inputs(2)
    for defers, message in (
        (False, "2 tokens adds what was deferred of 0"),
        (True, "3 tokens adds what was deferred of 2"),
    ):
        gpu.write(*given)
        gpu.answer(0, request_word(number, 2, defers=defers))
        gpu.finish()
        tokens = 2 + defers
        gpu.write(*inputs(tokens), slot=1)
        gpu.answer(1, request_word(number, tokens, adds=True))
        assert gpu.memory[1].out[:tokens].isnan().all()
        assert message in gpu.service.take_error()
    gpu.write(*given)
    gpu.answer(0, request_word(number, 2, defers=True))
    gpu.finish()
    gpu.write(*given, slot=1)
    gpu.answer(1, request_word(number, 2))
    assert torch.equal(gpu.memory[1].out[:2], run_layer(layers[0], *given))


@pytest.mark.parametrize("deferred", [K, K + 1])
def test_a_token_waits_for_one_expert_at_least(deferred):
    with pytest.raises(ValueError, match=f"deferred experts must be from 0 to {K - 1}, got {deferred}"):
        HandoffService(HIDDEN, K, MOST, Gpu(serve=False).memory, serve=False, deferred_experts=deferred)


STUCK = """
import sys, time
import numpy as np, torch
from ktqueue.operators import native
from ktqueue.operators.native_handoff import HandoffService, SlotMemory, request_word
from ktqueue.operators.packed import ExpertWeights, PackedExperts

native.set_threads(1)
size = 10000  # tokens: no machine is through with them in the fraction of a second that this process lives
quiet = [np.zeros(512 * 1024 * 4, np.uint8)] * 8
packed = [PackedExperts("F32", *shape, quiet) for shape in ((1024, 512), (1024, 512), (512, 1024))]
layer = native.ExpertLayer(ExpertWeights(*packed))
words = torch.zeros(256, dtype=torch.int32)
words = words[-words.data_ptr() % 128 // 4:]
inputs = [torch.zeros(100 * size + 64 + 2048 * size, dtype=torch.uint8) for _ in range(2)]
ids = torch.arange(8 * size).view(size, 8) % 8
ids[:, 0] = -1  # there is nothing to wait for
inputs[0][:64 * size].view(torch.int64).copy_(ids.flatten())
memory = [SlotMemory(inputs[i], torch.zeros(size, 512), words[64 * i:][:1], words[64 * i + 32:][:1]) for i in range(2)]
service = HandoffService(512, 8, size, memory, serve=True, deferred_experts=7, stuck_seconds=0.5)
number = service.add_layer(layer)
for slot, word in enumerate((request_word(number, size, defers=True), request_word(number, size, adds=True))):
    memory[slot].request[0] = word
    end = time.monotonic() + 20
    while int(memory[slot].done[0]) != word:
        assert time.monotonic() < end, "nobody answered"
        time.sleep(0.001)
    assert service.statistics.tasks == 1
    assert slot == 1 or service.take_error() is None
assert "has not ended after 0.5" in service.take_error()
print("leaving", service.close(0.1))
"""


def test_a_rest_that_hangs_holds_up_nobody():
    """Its task is answered before it begins, the next one by the thread that watches."""
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "leaving False\n"), ended.stderr

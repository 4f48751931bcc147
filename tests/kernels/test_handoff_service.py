"""The service of the hand-off. Python plays the GPU: it writes request words and reads done words in shared memory."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_types import MakeWeights, RunLayer
from played_gpu import EXPERTS, HIDDEN, MOST, Gpu, K, inputs

from ktqueue.operators import native
from ktqueue.operators.native_handoff import HandoffService, request_word

HELPERS = str(Path(__file__).parents[1] / "helpers")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    assert gpu.service.close()


@pytest.fixture
def layers(make_weights: MakeWeights) -> list[native.ExpertLayer]:
    return [native.ExpertLayer(make_weights("Q4_0", EXPERTS, HIDDEN, 32, seed)) for seed in range(3)]


def test_replays_equal_the_layer(gpu: Gpu, layers: list[native.ExpertLayer], run_layer: RunLayer) -> None:
    """Each replay has the same words, as in a captured graph, but other rows."""
    numbers = [gpu.service.add_layer(layer) for layer in layers]
    for replay in range(30):
        for number, layer in zip(numbers, layers, strict=True):
            rows = inputs(1 + replay % 2, 10 * replay + number)
            assert torch.equal(gpu.run(number, *rows), run_layer(layer, *rows))
    assert gpu.service.statistics.tasks == 90


def test_one_layer_may_have_the_same_word_each_time(
    gpu: Gpu, layers: list[native.ExpertLayer], run_layer: RunLayer
) -> None:
    number = gpu.service.add_layer(layers[0])
    for replay in range(50):
        rows = inputs(2, replay)
        assert torch.equal(gpu.run(number, *rows), run_layer(layers[0], *rows))


def test_the_service_counts_what_it_ran(gpu: Gpu, layers: list[native.ExpertLayer]) -> None:
    number = gpu.service.add_layer(layers[0])
    x, _, weights = inputs(2)
    gpu.run(number, x, torch.tensor([[0, 1, -1], [1, 5, 1]]), weights)
    statistics = gpu.service.statistics
    assert (statistics.tasks, statistics.failed, statistics.experts_used) == (1, 0, 3)
    assert statistics.bytes == 3 * sum(size for _, size in layers[0].ranges(0))
    assert statistics.busy_seconds > 0
    assert gpu.service.uses[number] == [1, 3, 0, 0, 0, 1]


def test_predictions_are_counted_and_change_no_result(
    gpu: Gpu, layers: list[native.ExpertLayer], run_layer: RunLayer
) -> None:
    numbers = [gpu.service.add_layer(layer) for layer in layers]
    for replay in range(30):
        for number, layer in zip(numbers, layers, strict=True):
            rows = inputs(2, 10 * replay + number)
            predicted = torch.tensor([[0, 3, 3], [-1, EXPERTS, 2**62]])
            word = request_word(number, 2, predicts=True)  # after the last layer there is none
            gpu.write(*rows)
            gpu.predict(predicted)
            gpu.request(word)
            gpu.wait(word)
            assert torch.equal(gpu.memory.out[:2], run_layer(layer, *rows))
    used = [set(inputs(2, 10 * replay + number)[1].flatten().tolist()) for replay in range(30) for number in (1, 2)]
    statistics = gpu.service.statistics
    assert (statistics.predicted, statistics.predicted_used) == (2 * 60, sum(len(experts & {0, 3}) for experts in used))
    assert 0 < statistics.predicted_used < statistics.predicted


def test_a_prediction_counts_for_the_next_task_only(gpu: Gpu, layers: list[native.ExpertLayer]) -> None:
    """A step that ends early and a step that runs a layer twice count no use for another task's prediction."""
    first, second = (gpu.service.add_layer(layer) for layer in layers[:2])
    rows = inputs(2)
    for numbers in ([first, second], [second, second]):
        before = gpu.service.statistics.predicted
        gpu.predict(rows[1])
        gpu.run(first, *rows, predicts=True)
        for number in numbers:
            gpu.run(number, *rows)
        assert gpu.service.statistics.predicted - before == (0 if numbers[0] == first else len(torch.unique(rows[1])))


def test_an_error_gives_nan_and_is_reported_once(
    gpu: Gpu, layers: list[native.ExpertLayer], run_layer: RunLayer
) -> None:
    number = gpu.service.add_layer(layers[0])
    x, ids, weights = inputs(3)
    wrong = ids.clone()
    wrong[1, 2] = EXPERTS
    assert gpu.run(number, x, wrong, weights).isnan().all()
    assert gpu.run(number + 1, x, ids, weights).isnan().all()
    assert gpu.service.take_error() == (
        "experts of layer 0 on 3 tokens: expert id must be from 0 to 5 or -1 for none, got 6 for token 1"
    )
    assert gpu.service.take_error() is None
    assert torch.equal(gpu.run(number, x, ids, weights), run_layer(layers[0], x, ids, weights))
    assert (gpu.service.statistics.tasks, gpu.service.statistics.failed) == (1, 2)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (request_word(0, MOST + 1), f"at most {MOST} tokens, got {MOST + 1}"),
        (request_word(1, 2), "names a layer that is not there"),
        (2 << 11, "names a layer that is not there"),
        (0x7FFFFFFF, "names a layer that is not there"),
    ],
)
def test_an_invalid_word_is_answered(gpu: Gpu, layers: list[native.ExpertLayer], word: int, message: str) -> None:
    gpu.service.add_layer(layers[0])
    gpu.request(word)
    gpu.wait(word)
    assert message in (gpu.service.take_error() or "")
    assert gpu.memory.out[0].isnan().all()


def test_a_task_may_have_no_expert_on_the_cpu(gpu: Gpu, layers: list[native.ExpertLayer]) -> None:
    number = gpu.service.add_layer(layers[0])
    x, ids, weights = inputs(2)
    assert gpu.run(number, x, torch.full_like(ids, -1), weights).eq(0).all()
    assert gpu.service.statistics.experts_used == 0


def test_rows_without_an_expert_may_stay_as_they_are(
    gpu: Gpu, layers: list[native.ExpertLayer], run_layer: RunLayer
) -> None:
    number = gpu.service.add_layer(layers[0])
    x, ids, weights = inputs(3)
    ids[1] = -1
    gpu.memory.out.fill_(7.0)
    expected = run_layer(layers[0], x, ids, weights)
    assert expected[1].eq(0).all()
    expected[1] = 7.0
    assert torch.equal(gpu.run(number, x, ids, weights, all_rows=False), expected)


def test_a_napping_thread_serves_requests(layers: list[native.ExpertLayer], run_layer: RunLayer) -> None:
    gpu = Gpu(idle_seconds=0.0)
    number = gpu.service.add_layer(layers[0])
    for replay in range(5):
        time.sleep(0.005)
        rows = inputs(1, replay)
        assert torch.equal(gpu.run(number, *rows), run_layer(layers[0], *rows))
    assert gpu.service.close()


def test_a_task_runs_in_the_calling_thread_and_as_a_host_function(
    layers: list[native.ExpertLayer], run_layer: RunLayer
) -> None:
    gpu = Gpu(serve=False)
    number = gpu.service.add_layer(layers[0])
    for replay in range(3):
        rows = inputs(4, replay)
        gpu.write(*rows)
        gpu.memory.out.fill_(torch.nan)
        if replay == 0:
            gpu.service.run(request_word(number, 4))
        else:
            function, task = gpu.service.host_task(request_word(number, 4))
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(task)
        assert torch.equal(gpu.memory.out[:4], run_layer(layers[0], *rows))
    assert gpu.service.host_task(7) == gpu.service.host_task(7)
    assert gpu.service.host_task(7) != gpu.service.host_task(8)


def test_a_closed_service_serves_nothing(layers: list[native.ExpertLayer]) -> None:
    gpu = Gpu()
    number = gpu.service.add_layer(layers[0])
    assert gpu.service.close()
    assert gpu.service.close()
    word = request_word(number, 1)
    gpu.request(word)
    time.sleep(0.01)
    assert int(gpu.memory.done[0]) == 0, "the thread has ended"


def test_sizes_that_do_not_fit_are_refused(layers: list[native.ExpertLayer], make_weights: MakeWeights) -> None:
    gpu = Gpu(serve=False)
    other = native.ExpertLayer(make_weights("Q4_0", 2, 32, 32))
    with pytest.raises(ValueError, match="has a hidden size of 64, got 32"):
        gpu.service.add_layer(other)
    for hidden, experts_per_token in ((0, K), (HIDDEN, 0)):
        with pytest.raises(ValueError, match="hidden and experts_per_token must be positive"):
            HandoffService(hidden, experts_per_token, MOST, gpu.memory, serve=False)
    for tokens in (0, 1 << 20):
        with pytest.raises(ValueError, match=f"max_tokens must be from 1 to 1048575, got {tokens}"):
            HandoffService(HIDDEN, K, tokens, gpu.memory, serve=False)
    with pytest.raises(ValueError, match="times must be positive"):
        HandoffService(HIDDEN, K, MOST, gpu.memory, serve=False, stuck_seconds=0)
    misaligned = gpu.memory._replace(input=gpu.memory.input[4:])
    with pytest.raises(ValueError, match="cache line of 64 bytes"):
        HandoffService(HIDDEN, K, MOST, misaligned, serve=False)
    for _ in range(1023):
        gpu.service.add_layer(layers[0])
    with pytest.raises(ValueError, match="at most 1023 layers"):
        gpu.service.add_layer(layers[0])


STUCK = """
import sys, time
import numpy as np, torch
from ktqueue.operators import native
from ktqueue.operators.native_handoff import HandoffMemory, HandoffService, request_word
from ktqueue.operators.packed import ExpertWeights, PackedExperts

native.set_threads(1)
size = 20000  # tokens: more than any machine computes in the fraction of a second that this process lives
quiet = [np.zeros(512 * 1024 * 4, np.uint8)] * 8
packed = [PackedExperts("F32", *shape, quiet) for shape in ((1024, 512), (1024, 512), (512, 1024))]
layer = native.ExpertLayer(ExpertWeights(*packed))
words = torch.zeros(256, dtype=torch.int32)
words = words[-words.data_ptr() % 128 // 4:]
input = torch.zeros(100 * size + 64 + 2048 * size, dtype=torch.uint8)
input[:64 * size].view(torch.int64).copy_(torch.arange(8 * size) % 8)
memory = HandoffMemory(input, torch.zeros(size, 512), words[:1], words[32:33])
service = HandoffService(512, 8, size, memory, serve=True, stuck_seconds=0.05)
word = request_word(service.add_layer(layer), size)
for _ in range(3):  # the first one hangs
    memory.done[0] = 0
    memory.request[0] = word
    end = time.monotonic() + 20
    while int(memory.done[0]) != word:
        assert time.monotonic() < end, "nobody answered"
        time.sleep(0.001)
for _ in range(2):
    assert "has not ended after 0.05" in service.take_error()
assert service.statistics.tasks == 0
print("leaving", service.close(0.1))
"""


def test_a_task_that_hangs_is_answered_and_the_process_can_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "leaving False\n"), ended.stderr


WITHOUT_A_POOL = """
import os, threading, time
import numpy as np, torch
from ktqueue.operators import native
from ktqueue.operators.native_handoff import HandoffMemory, HandoffService, request_word
from ktqueue.operators.packed import ExpertWeights, PackedExperts

native.set_threads(2)
quiet = PackedExperts("F32", 16, 16, [np.zeros(16 * 16 * 4, np.uint8)])
layer = native.ExpertLayer(ExpertWeights(quiet, quiet, quiet))  # so small that a token needs no other thread
words = torch.zeros(256, dtype=torch.int32)
words = words[-words.data_ptr() % 128 // 4:]
memory = HandoffMemory(torch.zeros(512, dtype=torch.uint8), torch.zeros(1, 16), words[:1], words[32:33])
service = HandoffService(16, 1, 1, memory, serve=True, stuck_seconds=0.5)
word = request_word(service.add_layer(layer), 1, predicts=True)
service.add_layer(layer)
probe = native.ReadProbe(1 << 22)
threading.Thread(target=probe.measure, kwargs={"rounds": 1 << 40, "repeats": 1}, daemon=True).start()  # forever
end, error, answered = time.monotonic() + 20, None, 0
while error is None:
    memory.done[0] = 0
    memory.request[0] = word
    while int(memory.done[0]) != word:
        assert time.monotonic() < end, "nobody answered"
        time.sleep(0)
    answered += 1
    error = service.take_error()
assert "has not ended after 0.5" in error, error
assert service.statistics.tasks == answered - 1, "the fetch after the last task hung, not a task"
print("reported", flush=True)
os._exit(0)  # the other thread is still running
"""


def test_a_fetch_that_hangs_is_answered_like_a_task_that_hangs() -> None:
    """Another thread occupies the pool."""
    ended = subprocess.run([sys.executable, "-c", WITHOUT_A_POOL], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "reported\n"), ended.stderr


def test_a_process_with_an_idle_service_can_exit() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import played_gpu as p; p.gpu = p.Gpu(); print('bye')"
    ended = subprocess.run([sys.executable, "-c", code, HELPERS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "bye\n"), ended.stderr

"""The hand-off's service with Python in the GPU's place: it writes request words and watches done words in the same
memory."""

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from played_gpu import EXPERTS, HIDDEN, MOST, Gpu, K, inputs

from ktqueue.operators import native
from ktqueue.operators.native_handoff import HandoffService, request_word

HELPERS = str(Path(__file__).parents[1] / "helpers")


@pytest.fixture
def gpu():
    one = Gpu()
    yield one
    assert one.service.close()


@pytest.fixture
def layers(make_weights):
    return [native.ExpertLayer(make_weights("Q4_0", EXPERTS, HIDDEN, 32, seed)) for seed in range(3)]


def test_equals_the_layer_replay_after_replay(gpu, layers, run_layer):
    """The same words again and again, as a captured graph has them, with other rows each time."""
    numbers = [gpu.service.add_layer(layer) for layer in layers]
    for replay in range(30):
        for number, layer in zip(numbers, layers, strict=True):
            given = inputs(1 + replay % 2, 10 * replay + number)
            assert torch.equal(gpu.run(number, *given), run_layer(layer, *given))
    assert gpu.service.statistics.tasks == 90


def test_one_layer_with_the_same_word_each_time(gpu, layers, run_layer):
    number = gpu.service.add_layer(layers[0])
    for replay in range(50):
        given = inputs(2, replay)
        assert torch.equal(gpu.run(number, *given), run_layer(layers[0], *given))


def test_counts_what_it_ran(gpu, layers):
    number = gpu.service.add_layer(layers[0])
    x, _, weights = inputs(2)
    gpu.run(number, x, torch.tensor([[0, 1, -1], [1, 5, 1]]), weights)
    statistics = gpu.service.statistics
    assert (statistics.tasks, statistics.failed, statistics.experts_used) == (1, 0, 3)
    assert statistics.bytes == 3 * sum(size for _, size in layers[0].ranges(0))
    assert statistics.busy_seconds > 0


def test_what_is_predicted_changes_nothing_and_is_counted(gpu, layers, run_layer):
    numbers = [gpu.service.add_layer(layer) for layer in layers]
    for replay in range(30):
        for number, layer in zip(numbers, layers, strict=True):
            given = inputs(2, 10 * replay + number)
            predicted = torch.tensor([[0, 3, 3], [-1, EXPERTS, 2**62]])
            word = request_word(number, 2, predicts=True)  # the last layer has none behind it
            gpu.write(*given)
            gpu.predict(predicted)
            gpu.request(word)
            gpu.wait(word)
            assert torch.equal(gpu.memory.out[:2], run_layer(layer, *given))
    used = [set(inputs(2, 10 * replay + number)[1].flatten().tolist()) for replay in range(30) for number in (1, 2)]
    statistics = gpu.service.statistics
    assert (statistics.predicted, statistics.predicted_used) == (2 * 60, sum(len(one & {0, 3}) for one in used))
    assert 0 < statistics.predicted_used < statistics.predicted


def test_a_prediction_is_for_the_next_task_alone(gpu, layers):
    """A step that ends early, and one that runs a layer twice: no use is counted for another task's prediction."""
    first, second = (gpu.service.add_layer(layer) for layer in layers[:2])
    given = inputs(2)
    for then in ([first, second], [second, second]):
        before = gpu.service.statistics.predicted
        gpu.predict(given[1])
        gpu.run(first, *given, predicts=True)
        for number in then:
            gpu.run(number, *given)
        assert gpu.service.statistics.predicted - before == (0 if then[0] == first else len(given[1].unique()))


def test_an_error_becomes_nan_and_is_told_once(gpu, layers, run_layer):
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
def test_a_word_that_means_nothing_is_answered(gpu, layers, word, message):
    gpu.service.add_layer(layers[0])
    gpu.request(word)
    gpu.wait(word)
    assert message in gpu.service.take_error()
    assert gpu.memory.out[0].isnan().all()


def test_no_expert_on_the_cpu(gpu, layers):
    number = gpu.service.add_layer(layers[0])
    x, ids, weights = inputs(2)
    assert gpu.run(number, x, torch.full_like(ids, -1), weights).eq(0).all()
    assert gpu.service.statistics.experts_used == 0


def test_wakes_from_its_naps(layers, run_layer):
    gpu = Gpu(idle_seconds=0.0)
    number = gpu.service.add_layer(layers[0])
    for replay in range(5):
        time.sleep(0.005)
        given = inputs(1, replay)
        assert torch.equal(gpu.run(number, *given), run_layer(layers[0], *given))
    assert gpu.service.close()


def test_runs_in_the_calling_thread_and_as_a_host_function(layers, run_layer):
    gpu = Gpu(serve=False)
    number = gpu.service.add_layer(layers[0])
    for replay in range(3):
        given = inputs(4, replay)
        gpu.write(*given)
        gpu.memory.out.fill_(torch.nan)
        if replay == 0:
            gpu.service.run(request_word(number, 4))
        else:
            function, task = gpu.service.host_task(request_word(number, 4))
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(task)
        assert torch.equal(gpu.memory.out[:4], run_layer(layers[0], *given))
    assert gpu.service.host_task(7) == gpu.service.host_task(7)
    assert gpu.service.host_task(7) != gpu.service.host_task(8)


def test_requests_at_the_close_are_answered(layers):
    gpu = Gpu()
    number = gpu.service.add_layer(layers[0])
    assert gpu.service.close()
    assert gpu.service.close()
    word = request_word(number, 1)
    gpu.request(word)
    time.sleep(0.01)
    assert int(gpu.memory.done[0]) == 0, "the thread has ended"


def test_refuses_what_does_not_fit(layers, make_weights):
    gpu = Gpu(serve=False)
    other = native.ExpertLayer(make_weights("Q4_0", 2, 32, 32))
    with pytest.raises(ValueError, match="has a hidden size of 64, got 32"):
        gpu.service.add_layer(other)
    for sizes in ((0, K, MOST), (HIDDEN, 0, MOST)):
        with pytest.raises(ValueError, match="hidden and experts_per_token must be positive"):
            HandoffService(*sizes, gpu.memory, serve=False)
    for tokens in (0, 1 << 21):
        with pytest.raises(ValueError, match=f"max_tokens must be from 1 to 2097151, got {tokens}"):
            HandoffService(HIDDEN, K, tokens, gpu.memory, serve=False)
    with pytest.raises(ValueError, match="times must be positive"):
        HandoffService(HIDDEN, K, MOST, gpu.memory, serve=False, stuck_seconds=0)
    crooked = gpu.memory._replace(input=gpu.memory.input[4:])
    with pytest.raises(ValueError, match="cache line of 64 bytes"):
        HandoffService(HIDDEN, K, MOST, crooked, serve=False)
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
size = 20000  # tokens: no machine is through with them in the fraction of a second that this process lives
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
for _ in range(3):  # the first hangs, the others come after it
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


def test_a_task_that_hangs_is_answered_and_does_not_keep_the_process():
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
threading.Thread(target=probe.measure, kwargs={"rounds": 1 << 40, "repeats": 1}, daemon=True).start()  # for ever
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
assert service.statistics.tasks == answered - 1, "not a task hung, but the fetch behind the last"
print("told", flush=True)
os._exit(0)  # the other thread is still at it
"""


def test_a_fetch_that_hangs_is_answered_as_a_task_that_hangs():
    """Another thread keeps the pool of threads for long."""
    ended = subprocess.run([sys.executable, "-c", WITHOUT_A_POOL], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "told\n"), ended.stderr


def test_an_idle_service_does_not_keep_the_process():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import played_gpu as p; p.gpu = p.Gpu(); print('bye')"
    ended = subprocess.run([sys.executable, "-c", code, HELPERS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "bye\n"), ended.stderr

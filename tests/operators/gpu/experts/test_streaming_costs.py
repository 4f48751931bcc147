"""StreamingCosts: what a step should take, and what is learned from steps."""

import pytest

from ktqueue.operators.gpu.copy_stream import joined
from ktqueue.operators.gpu.experts.streaming_costs import FIXED, StreamingCosts, fit


def costs(**changes: float) -> StreamingCosts:
    return StreamingCosts(**{"cpu_fixed": 0.002, "cpu_token": 1e-5, "copy": 0.008, **changes})


def test_streaming_everything_takes_what_the_copies_take_or_the_gpu():
    assert costs(row=1e-7).seconds(8192, 1) == 0.008
    assert costs(gpu_token=1e-6).seconds(16384, 1) == pytest.approx(0.016384)


def test_nothing_is_streamed_by_the_cpu_alone():
    one = costs(alone=0.5, row=1e-7, gpu_token=1e-6)
    assert one.seconds(1000, 0) == pytest.approx(0.001 + FIXED + 2e-4 + 0.006)


@pytest.mark.parametrize(("share", "seconds"), [(0.875, 0.0001 + 0.007), (0.25, 0.001 + FIXED + 2e-4 + 0.009)])
def test_a_split_ends_with_the_slower_side(share, seconds):
    """Rows that come back share the bus with the experts; the CPU waits for the GPU's first part and for the rows."""
    assert costs(row=1e-7, gpu_token=1e-6).seconds(1000, share) == pytest.approx(seconds)


def test_learns_what_a_machine_really_does():
    one, real = costs(row=1e-7), costs(cpu_fixed=0.004, cpu_token=2e-5, copy=0.016, gpu_token=4e-6)
    for _ in range(60):
        gpu = real.gpu(512) + 2 * 512e-7  # with the rows
        one.learn(512, 0.5, cpu=0.5 * real.cpu(512), copy=0.5 * real.copy, gpu=gpu)
    assert one.cpu(512) == pytest.approx(real.cpu(512), rel=0.01)
    assert one.copy == pytest.approx(real.copy, rel=0.01)
    assert one.gpu(512) == pytest.approx(real.gpu(512), rel=0.01)


def test_what_the_cpu_takes_alone_is_not_what_it_takes_beside_copies():
    one = costs(alone=0.5)
    one.learn(512, 0, cpu=0.5 * one.cpu(512), copy=0.0, gpu=0.0)
    assert one.cpu(512) == pytest.approx(costs().cpu(512))


def test_one_slow_step_is_forgotten():
    one = costs()
    one.learn(512, 0.5, cpu=1.0, copy=0.004, gpu=5.0)
    assert one.cpu(512) < 1.3 * costs().cpu(512)
    for _ in range(20):
        one.learn(512, 0.5, cpu=0.5 * costs().cpu(512), copy=0.004, gpu=1e-5)
    assert one.seconds(512, 0.5) == pytest.approx(costs().seconds(512, 0.5), rel=0.05)


def test_a_line_through_two_points():
    assert fit((10, 3.0), (20, 4.0)) == (pytest.approx(2.0), pytest.approx(0.1))
    assert fit((10, 1.0), (110, 101.0)) == (0.0, 1.0)
    assert fit((10, 3.0), (20, 2.0)) == (3.0, 0.0)
    assert fit((4, 3.0), (4, 3.0)) == (3.0, 0.0)


def test_ranges_that_touch_are_one():
    assert joined([(200, 10), (100, 50), (150, 20), (170, 10)]) == [(100, 80), (200, 10)]
    assert joined([]) == []

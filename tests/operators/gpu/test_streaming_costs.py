"""StreamingCosts: the split that ends on both sides at once, and what is learned from steps."""

import pytest

from ktqueue.operators.gpu.side_copies import joined
from ktqueue.operators.gpu.streaming_costs import StreamingCosts, fit


def costs(**changes: float) -> StreamingCosts:
    return StreamingCosts(**{"cpu_fixed": 0.002, "cpu_token": 1e-5, "copy": 0.008, **changes})


@pytest.mark.parametrize("tokens", [64, 512, 8192])
@pytest.mark.parametrize("gpu_token", [0.0, 5e-7])
def test_both_sides_end_at_once(tokens, gpu_token):
    one = costs(gpu_token=gpu_token)
    share = one.share(tokens)
    assert 0 < share < 1
    assert share * one.copy == pytest.approx(one.gpu(tokens) + (1 - share) * one.cpu(tokens))


def test_all_are_streamed_where_the_gpu_is_slower_than_the_copies():
    assert costs(gpu_token=2e-5).share(512) == 1.0


def test_it_pays_for_long_steps_alone():
    one = costs(cpu_fixed=0.0)
    assert one.pays(512) and one.pays(8192)
    assert not one.pays(8)


def test_it_does_not_pay_over_a_slow_bus():
    assert not costs(copy=1.0).pays(512)


def test_learns_what_a_machine_really_does():
    one, real = costs(), costs(cpu_fixed=0.004, cpu_token=2e-5, copy=0.016, gpu_token=4e-6)
    for _ in range(60):
        share = one.share(512)
        one.learn(512, share, cpu=(1 - share) * real.cpu(512), copy=share * real.copy, gpu=real.gpu(512))
    assert one.cpu(512) == pytest.approx(real.cpu(512), rel=0.01)
    assert one.copy == pytest.approx(real.copy, rel=0.01)
    assert one.share(512) == pytest.approx(real.share(512), abs=0.01)


def test_one_slow_step_is_forgotten():
    one = costs()
    before = one.share(512)
    one.learn(512, before, cpu=1.0, copy=0.004, gpu=5.0)
    assert one.share(512) < 0.9
    for _ in range(20):
        share = one.share(512)
        one.learn(512, share, cpu=(1 - share) * costs().cpu(512), copy=share * costs().copy, gpu=1e-5)
    assert one.share(512) == pytest.approx(before, abs=0.05)


def test_a_line_through_two_points():
    assert fit((10, 3.0), (20, 4.0)) == (pytest.approx(2.0), pytest.approx(0.1))
    assert fit((10, 1.0), (110, 101.0)) == (0.0, 1.0)
    assert fit((10, 3.0), (20, 2.0)) == (3.0, 0.0)
    assert fit((4, 3.0), (4, 3.0)) == (3.0, 0.0)


def test_ranges_that_touch_are_one():
    assert joined([(200, 10), (100, 50), (150, 20), (170, 10)]) == [(100, 80), (200, 10)]
    assert joined([]) == []

"""StreamingChoice finds the best share within few steps, on machines that fit the costs and on others. StreamingCosts
predict and learn."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktqueue.operators.gpu.experts.streaming_choice import (
    FIXED_SECONDS,
    MAX_TRIED_SHARES,
    RETRY_STEPS,
    SHARES,
    SOME_SHARES,
    StreamingChoice,
    StreamingCosts,
    fit_line,
)
from ktqueue.operators.gpu.experts.use_order import UseOrder

LAYERS = 48
Machine = Callable[[int, float], float]


def costs(**changes: Any) -> StreamingCosts:
    """Costs of an H200 and a fast CPU: Qwen3-30B-A3B, Q4_K_M, all experts on the CPU."""
    return StreamingCosts(**{"cpu_fixed": 0.003, "cpu_token": 1e-5, "copy": 0.0067, "row": 1.5e-7, **changes})


def queued(tokens: int, share: float) -> float:
    """A machine on which a split is far slower than predicted, because results wait for the copies."""
    return LAYERS * costs().seconds(tokens, share) if share in (0, 1) else 0.4 + 0.0001 * tokens


def run(choice: StreamingChoice, machine: Machine, tokens: int, steps: int) -> list[float]:
    """The shares of `steps` steps. The first step of each share is slow, and all times vary a little."""
    uneven = random.Random(tokens)
    shares: list[float] = []
    for _ in range(steps):
        share = choice.share(tokens)
        first = 0.2 if share not in shares else 0.0
        choice.learn(tokens, share, machine(tokens, share) * uneven.uniform(1, 1.03) + first)
        shares.append(share)
    return shares


@pytest.mark.parametrize("tokens", [64, 100, 512, 2048, 8192])
@pytest.mark.parametrize(
    "differs",
    [
        {},
        {"cpu_fixed": 0.006, "cpu_token": 3e-5, "gpu_token": 2e-7},
        {"cpu_fixed": 0.002, "cpu_token": 4e-6},
        {"copy": 0.014, "gpu_token": 5e-7},
        {"copy": 0.004, "row": 3e-7},
    ],
)
def test_the_best_share_is_found_within_few_steps(differs: dict[str, float], tokens: int) -> None:
    """The costs learn from each step too, as in StreamingSteps."""
    known, real = costs(), costs(**differs)
    choice = StreamingChoice(known, LAYERS)

    def machine(tokens: int, share: float) -> float:
        gpu = real.gpu(tokens) + 2 * real.rows(tokens, share) * (share < 1)
        cpu = real.cpu(tokens, share)
        known.learn(tokens, share, cpu=cpu, copy=share * real.copy, gpu=gpu if share else 0.0)
        return 0.02 + LAYERS * real.seconds(tokens, share)

    taken = [machine(tokens, share) for share in run(choice, machine, tokens, 80)]
    every = {share: machine(tokens, share) for share in SHARES}
    best, ends = min(every.values()), min(every[0], every[1])
    settled = sorted(taken[2 * MAX_TRIED_SHARES :])
    assert settled[len(settled) // 2] <= min(1.12 * best, 1.001 * ends)
    assert sum(seconds > 1.05 * ends for seconds in taken[2 * MAX_TRIED_SHARES :]) <= 4  # tried again now and then


def test_long_steps_on_a_slow_split_stream_everything_from_the_fifth_step_on() -> None:
    """These are times that were measured on an H200."""
    for tokens in (2048, 8192):
        shares = run(StreamingChoice(costs(), LAYERS), queued, tokens, 20)
        assert shares[4:] == [1.0] * 16


def test_steps_of_one_length_teach_nothing_about_another() -> None:
    choice = StreamingChoice(costs(), LAYERS)
    before = choice.share(512)
    assert 0 < before < 1
    run(choice, queued, 2048, 20)
    assert choice.share(512) == before and choice.share(2048) == choice.share(1025) == 1.0


def test_every_step_streams_if_zero_is_not_among_the_shares() -> None:
    slow = costs(copy=1.0)
    assert StreamingChoice(slow, LAYERS).share(64) == 0
    assert StreamingChoice(slow, LAYERS, shares=SOME_SHARES).share(64) == SHARES[1]


def test_measured_times_do_not_change_with_the_costs() -> None:
    machine_costs = costs()
    choice = StreamingChoice(machine_costs, LAYERS)
    run(choice, queued, 1024, 20)
    machine_costs.copy *= 3
    assert choice.share(1024) == 1.0


def test_an_untried_split_must_promise_much_more() -> None:
    machine_costs = costs()
    assert machine_costs.seconds(3000, 0.875) < 0.97 * machine_costs.seconds(3000, 1)
    assert run(StreamingChoice(machine_costs, LAYERS), queued, 3000, 20) == [1.0] * 20


def test_one_slow_step_does_not_exclude_a_share() -> None:
    choice = StreamingChoice(costs(), LAYERS)
    for seconds in (0.33, 9.0):
        choice.learn(8192, 1.0, seconds)
    assert choice.share(8192) == 1.0


def test_a_share_that_is_almost_as_good_is_tried_again() -> None:
    choice = StreamingChoice(costs(), LAYERS)
    split = choice.share(2048)
    for share, seconds in ((split, 0.36), (split, 0.36), (1.0, 0.33), (1.0, 0.33)):
        choice.learn(2048, share, seconds)

    def taken(split_takes: float, steps: int) -> list[float]:
        shares = []
        for _ in range(steps):
            shares.append(choice.share(2048))
            choice.learn(2048, shares[-1], split_takes if shares[-1] == split else 0.33)
        return shares

    assert taken(0.36, 2 * RETRY_STEPS).count(split) == 2
    assert taken(0.2, 3 * RETRY_STEPS)[-RETRY_STEPS // 2 :] == [split] * (RETRY_STEPS // 2)  # it has become faster


TRAINED = tuple((1 - share) ** 3 for share in SHARES)
"""Of all uses, what is left for the CPU: about that of a trained router."""


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_the_less_the_least_used_experts_are_used_the_more_of_them_the_cpu_has(tokens: int) -> None:
    alike, trained = costs(), costs()
    trained.left = TRAINED
    shares = [run(StreamingChoice(known, LAYERS), _as(known), tokens, 60)[-10:] for known in (alike, trained)]
    before, after = (sum(taken) / len(taken) for taken in shares)
    assert after < before - 0.1
    assert trained.seconds(tokens, after) < 0.9 * alike.seconds(tokens, before)


def _as(known: StreamingCosts) -> Machine:
    """A machine that is as the costs say."""
    return lambda tokens, share: LAYERS * known.seconds(tokens, share)


def test_splits_that_were_slow_are_tried_again_once_others_are_on_the_cpu() -> None:
    known = costs()
    choice = StreamingChoice(known, LAYERS)
    assert run(choice, queued, 2048, 40)[-1] == 1.0
    known.left = TRAINED
    choice.forget_splits()
    assert run(choice, _as(known), 2048, 40)[-1] < 0.9


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_a_text_of_another_kind_soon_costs_no_more_than_copying_everything(tokens: int) -> None:
    """The order of uses follows it slowly, and the choice within two steps. Each kind uses other experts."""
    random, absent = np.random.default_rng(tokens), np.ones((4, 128), bool)
    frequency = np.diff(np.linspace(0, 1, 129) ** 3)
    kinds = [np.stack([frequency[random.permutation(128)] for _ in absent]) for _ in range(2)]
    order, known, real = UseOrder([128] * 4, [8] * 4, absent), costs(), costs()
    order.start(1e6 * kinds[0])
    choice, version, relative = StreamingChoice(known, LAYERS), 0, []
    for text in (*20 * kinds[:1], *20 * kinds[1:]):
        order.improve(absent)
        if order.version != version:
            version = order.version
            choice.forget_splits()
        known.left = order.left
        share = choice.share(tokens)
        copied = (
            [text[layer, order.first(layer, 8 * level, absent)].sum() for layer in range(4)] for level in range(17)
        )
        real.left = tuple(1 - np.mean(parts) for parts in copied)
        choice.learn(tokens, share, LAYERS * real.seconds(tokens, share))
        relative.append(real.seconds(tokens, share) / real.seconds(tokens, 1))
        order.learn((8 * tokens * text).astype(np.int32))
    assert max(relative[5:20]) < 1
    assert sum(each > 1.05 for each in relative[20:]) <= 2


def slow_machine_costs(**changes: Any) -> StreamingCosts:
    return StreamingCosts(**{"cpu_fixed": 0.002, "cpu_token": 1e-5, "copy": 0.008, **changes})


def test_streaming_everything_takes_the_time_of_copies_or_gpu() -> None:
    assert slow_machine_costs(row=1e-7).seconds(8192, 1) == 0.008
    assert slow_machine_costs(gpu_token=1e-6).seconds(16384, 1) == pytest.approx(0.016384)


def test_streaming_nothing_takes_the_time_of_the_cpu_alone() -> None:
    machine_costs = slow_machine_costs(alone=0.5, row=1e-7, gpu_token=1e-6)
    assert machine_costs.seconds(1000, 0) == pytest.approx(0.001 + FIXED_SECONDS + 2e-4 + 0.006)


@pytest.mark.parametrize(("share", "seconds"), [(0.875, 0.007), (0.25, 0.001 + FIXED_SECONDS + 0.009)])
def test_a_split_ends_with_the_slower_side(share: float, seconds: float) -> None:
    """The rows share the bus with the experts. The CPU waits for the GPU's part and for the rows. Tokens without an
    expert there have none."""
    rows = 1e-4 * (1 - share**8) * (1 if share > 0.5 else 2)
    assert slow_machine_costs(row=1e-7, gpu_token=1e-6).seconds(1000, share) == pytest.approx(seconds + rows)


def test_costs_approach_the_real_machine() -> None:
    machine_costs, real = (
        slow_machine_costs(row=1e-7),
        slow_machine_costs(cpu_fixed=0.004, cpu_token=2e-5, copy=0.016, gpu_token=4e-6),
    )
    for _ in range(60):
        gpu = real.gpu(512) + 2 * machine_costs.rows(512, 0.5)
        machine_costs.learn(512, 0.5, cpu=real.cpu(512, 0.5), copy=0.5 * real.copy, gpu=gpu)
    assert machine_costs.cpu(512, 0) == pytest.approx(real.cpu(512, 0), rel=0.01)
    assert machine_costs.copy == pytest.approx(real.copy, rel=0.01)
    assert machine_costs.gpu(512) == pytest.approx(real.gpu(512), rel=0.01)


def test_cpu_times_without_copies_are_scaled() -> None:
    machine_costs = slow_machine_costs(alone=0.5)
    machine_costs.learn(512, 0, cpu=0.5 * machine_costs.cpu(512, 0), copy=0.0, gpu=0.0)
    assert machine_costs.cpu(512, 0) == pytest.approx(slow_machine_costs().cpu(512, 0))


def test_one_slow_step_is_forgotten() -> None:
    machine_costs = slow_machine_costs()
    machine_costs.learn(512, 0.5, cpu=1.0, copy=0.004, gpu=5.0)
    assert machine_costs.cpu(512, 0) < 1.3 * slow_machine_costs().cpu(512, 0)
    for _ in range(20):
        machine_costs.learn(512, 0.5, cpu=slow_machine_costs().cpu(512, 0.5), copy=0.004, gpu=1e-5)
    assert machine_costs.seconds(512, 0.5) == pytest.approx(slow_machine_costs().seconds(512, 0.5), rel=0.05)


def test_a_line_goes_through_two_points() -> None:
    assert fit_line((10, 3.0), (20, 4.0)) == pytest.approx((2.0, 0.1))
    assert fit_line((10, 1.0), (110, 101.0)) == (0.0, 1.0)
    assert fit_line((10, 3.0), (20, 2.0)) == (3.0, 0.0)
    assert fit_line((4, 3.0), (4, 3.0)) == (3.0, 0.0)

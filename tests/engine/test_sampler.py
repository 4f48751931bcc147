"""Tests of the sampler: its results against a plain reference, its distributions, and its noise."""

from typing import Any

import numpy as np
import pytest

from ktqueue.engine.noise import stream, uniform
from ktqueue.engine.sampler import Sampler, SamplingRows, Uniform, greedy

sample = Sampler().sample


def streams(seeds: Any, indices: Any) -> Any:
    return np.array([stream(int(seed), int(index)) for seed, index in zip(seeds, indices, strict=True)], np.uint64)


def make_rows(count: Any, **columns: Any) -> Any:
    def column(name: Any, default: Any, kind: Any) -> Any:
        return np.broadcast_to(np.array(columns.get(name, default), dtype=kind), count).copy()

    return SamplingRows(
        temperature=column("temperature", 1.0, np.float64),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float64),
        stream=streams(column("seed", 0, np.int64), column("index", 0, np.int64)),
        position=column("position", 0, np.int64),
    )


def test_threads_share_the_rows_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(3).normal(0.0, 3.0, (7, 200_000)).astype(np.float32)
    rows = make_rows(7, top_k=[0, 20, 0, 5, 0, 0, 50], top_p=[1.0, 0.9, 0.8, 1.0, 1.0, 0.95, 1.0], seed=range(7))
    threaded = Sampler(threads=3)
    expected = sample(logits, rows).tolist()
    assert expected == [sample(logits[[row]], rows.take(np.array([row])))[0] for row in range(7)]
    for _ in range(3):
        assert threaded.sample(logits, rows).tolist() == expected


def reference_kept(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Weights of a row after the filters, computed token by token in the order of the definition."""
    scaled = (logits - logits.max()) * np.float32(1.0 / temperature)
    weights = [float(w) for w in np.exp(scaled)]
    best = max(weights)
    weights = [w if w >= np.float32(min_p) * best else 0.0 for w in weights]
    if top_k:
        last = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [w if w >= last else 0.0 for w in weights]
    if top_p < 1.0:
        total, gone = sum(weights), 0.0
        last = best
        for w in sorted(weights, reverse=True):
            if gone >= top_p * total or w == 0.0:
                break
            last = w
            gone += w
        weights = [w if w >= last else 0.0 for w in weights]
    return weights


def reference_draw(weights: Any, noise: Any) -> Any:
    target, passed = noise * sum(weights), 0.0
    for token, weight in enumerate(weights):
        passed += weight
        if passed > target:
            return token
    raise AssertionError("no token")


@pytest.mark.parametrize("vocab", [5, 100, 3000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
def test_results_equal_the_reference(vocab: Any, scale: Any) -> None:
    noise = np.random.default_rng(vocab + int(10 * scale))
    for _ in range(8 if vocab < 1000 else 4):
        count = 24
        logits = (noise.normal(size=(count, vocab)) * scale).astype(np.float32)
        if scale == 3.0:
            logits = np.round(logits)  # many equal logits
        logits[noise.random(logits.shape) < 0.1] = -np.inf
        logits[:, 0] = 0.5
        rows = make_rows(
            count,
            temperature=noise.choice([0.05, 0.5, 0.8, 1.0, 1.7, 20.0], count),
            top_k=noise.choice([0, 0, 1, 2, 5, 50, 10_000], count),
            top_p=noise.choice([1.0, 1.0, 0.999, 0.95, 0.5, 1e-9], count),
            min_p=noise.choice([0.0, 0.0, 0.001, 0.1, 1.0], count),
            seed=noise.integers(-(2**63), 2**63 - 1, count),
            index=noise.integers(0, 5, count),
            position=noise.integers(0, 1000, count),
        )
        u = uniform(rows.stream, rows.position)
        found = sample(logits, rows)
        for row in range(count):
            kept = reference_kept(logits[row], rows.temperature[row], rows.top_k[row], rows.top_p[row], rows.min_p[row])
            assert found[row] == reference_draw(kept, u[row]), (row, rows.take(np.array([row])))


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99999])
def test_many_unlikely_tokens_hold_most_of_the_weight(top_p: Any) -> None:
    noise = np.random.default_rng(1)
    spread = noise.normal(size=3000).astype(np.float32) / 10
    logits = (np.full((200, 3000), -7.5, dtype=np.float32) + spread).astype(np.float32)
    logits[:, 1234] = 0.0
    rows = make_rows(200, top_p=top_p, position=np.arange(200))
    kept = reference_kept(logits[0], 1.0, 0, top_p, 0.0)
    drawn = [reference_draw(kept, u) for u in uniform(rows.stream, rows.position)]
    assert sample(logits, rows).tolist() == drawn
    assert len(set(drawn)) > 30


def constant_noise(number: float) -> Uniform:
    """Noise that is the same number for each row."""
    return lambda streams, _: np.full(len(streams), number)


@pytest.mark.parametrize(
    ("settings", "first"), [({"top_k": 3}, 70), ({"top_k": 2}, 130), ({"top_p": 0.7}, 130), ({"min_p": 0.5}, 130)]
)
def test_extreme_noise_never_chooses_a_filtered_token(settings: Any, first: Any) -> None:
    logits = np.full((4, 300), -40.0, dtype=np.float32)
    logits[:, [0, 299]] = -np.inf
    logits[:, [70, 130, 131]] = [1.0, 2.0, 1.5]
    for extreme, expected in ((0.0, first), (1.0 - 2.0**-53, 131)):
        sampler = Sampler(constant_noise(extreme))
        assert set(sampler.sample(logits, make_rows(4, **settings)).tolist()) == {expected}
    assert set(sampler.sample(logits, make_rows(4)).tolist()) <= {131, 298}
    assert set(Sampler(constant_noise(0.0)).sample(logits, make_rows(4)).tolist()) == {1}


def test_a_row_does_not_depend_on_the_others() -> None:
    noise = np.random.default_rng(3)
    logits = (noise.normal(size=(64, 777)) * 4).astype(np.float32)
    rows = make_rows(
        64,
        temperature=noise.choice([0.7, 1.0, 3.0], 64),
        top_k=noise.choice([0, 3, 400], 64),
        top_p=noise.choice([1.0, 0.9], 64),
        min_p=noise.choice([0.0, 0.05], 64),
        seed=np.arange(64),
    )
    together = sample(logits, rows)
    for row in range(64):
        assert sample(logits[row : row + 1], rows.take(np.array([row])))[0] == together[row]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_tokens_are_drawn_with_their_probabilities(settings: Any) -> None:
    """A chi-squared test of 40,000 draws with fixed seeds. A correct sampler passes the 99.9 % quantile."""
    logits = np.array([0.1, 2.0, -1.0, 1.5, 1.4, -3.0, 0.7, 0.0], dtype=np.float32)
    draws = 40_000
    rows = make_rows(draws, seed=77, position=np.arange(draws), **settings)
    counts = np.bincount(sample(np.tile(logits, (draws, 1)), rows), minlength=8)
    parameters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    expected = np.array(reference_kept(logits, **parameters))
    expected *= draws / expected.sum()
    assert (counts[expected == 0.0] == 0).all()
    kept = expected > 0.0
    statistic = (((counts - expected) ** 2)[kept] / expected[kept]).sum()
    quantiles = [10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3]  # chi-squared, 1 to 7 degrees of freedom
    assert statistic < quantiles[max(int(kept.sum()) - 2, 0)]


def test_noise_is_uniform_and_independent() -> None:
    steps = np.arange(50_000)
    zero = np.zeros_like(steps)
    every = [
        uniform(streams(zero + 1, zero), steps),  # positions of one choice
        uniform(streams(zero + 2, zero), steps),  # of another seed
        uniform(streams(zero + 1, zero + 1), steps),  # of another choice
        uniform(streams(steps, zero), zero),  # neighbouring seeds
        uniform(streams(zero + 1, steps), zero),  # choices
    ]
    for numbers in every:
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        counts = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((counts - 500) ** 2 / 500).sum() < 160  # chi-squared, 99 degrees, 99.99 %
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    for i, first in enumerate(every):
        for other in every[i + 1 :]:
            assert abs(np.corrcoef(first, other)[0, 1]) < 0.02


def test_noise_never_changes() -> None:
    """A journal may be older than this version: a resumed job must draw the tokens that the old version would draw."""
    found = uniform(streams([0, 1, -1, 2**63 - 1], [0, 0, 3, 127]), np.array([0, 1, 2, 4096]))
    assert found.tolist() == PINNED


PINNED = [0.13870941014555427, 0.42321144819582723, 0.8857738890608448, 0.1792350175977745]


def test_greedy_finds_rows_that_are_not_finite() -> None:
    logits = np.array(
        [[0, 2, 2], [-np.inf, -5, -np.inf], [np.nan, 1, 2], [1, np.inf, 0], [-np.inf] * 3, [1, 2, np.nan]],
        dtype=np.float32,
    )
    chosen, finite = greedy(logits)
    assert chosen[:2].tolist() == [1, 1]
    assert finite.tolist() == [True, True, False, False, False, False]


def test_extreme_logits_and_temperatures_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 0.0], [1e30, 1e30, -1e30], [1e-30, 0.0, -1e-30]], dtype=np.float32)
    rows = make_rows(3, temperature=[1e-5, 1.0, 100.0], top_p=[0.5, 0.9, 1.0])
    chosen = sample(logits, rows)
    assert chosen[0] == 0 and chosen[1] in (0, 1)

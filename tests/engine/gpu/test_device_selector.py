"""The device's selector chooses the same tokens, with the same log probabilities, as the host's.

The logits are CPU tensors here; tests/gpu repeats it on a GPU.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.detokenizer import Detokenizer
from ktqueue.engine.gpu.device_sampler import DrawnRows, draw_from_all, draw_from_few, weigh
from ktqueue.engine.gpu.device_selector import DeviceSelector
from ktqueue.engine.logit_edits import LogitEdits
from ktqueue.engine.noise import uniform
from ktqueue.engine.sampler import Sampler, SamplingRows
from ktqueue.engine.sequence import Request, Sequence
from ktqueue.engine.token_selector import HostSelector


def token_bytes(token_id: int) -> bytes:
    return str(token_id).encode()


def sequence(sampling: SamplingParams, vocab: int, generated: list[int], prompt: list[int]) -> Sequence:
    """A sequence that has generated these tokens."""
    ids = np.array(prompt, dtype=np.int32)
    request = Request(
        "x",
        ids,
        sampling,
        job_class=JobClass.INTERACTIVE,
        arrival=0.0,
        serial=0,
        seed=sampling.seed or 0,
        max_tokens=1000,
        end_ids=frozenset({vocab - 1}),
    )
    edits = LogitEdits(sampling, ids, request.end_ids, vocab) if LogitEdits.needed(sampling) else None
    made = Sequence(request, 0, Detokenizer(token_bytes, None), edits, 16)
    for token in generated:
        made.append(token)
    return made


def random_sequences(noise: np.random.Generator, count: int, vocab: int, **fixed: Any) -> list[Sequence]:
    """Sequences with a random mix of parameters."""
    made = []
    for _ in range(count):
        settings: dict[str, Any] = {
            "temperature": float(noise.choice([0.0, 0.05, 0.5, 0.8, 1.0, 1.7, 20.0])),
            "top_k": int(noise.choice([0, 0, 1, 2, 5, 50, 10_000])),
            "top_p": float(noise.choice([1.0, 1.0, 0.999, 0.95, 0.5, 1e-9])),
            "min_p": float(noise.choice([0.0, 0.0, 0.001, 0.1, 1.0])),
            "seed": int(noise.integers(-(2**63), 2**63 - 1)),
        }
        if noise.random() < 0.3:
            settings |= {
                "repetition_penalty": float(noise.choice([1.0, 1.3, 0.7])),
                "frequency_penalty": float(noise.choice([0.0, 0.5, -1.0])),
                "presence_penalty": float(noise.choice([0.0, 0.25, -2.0])),
                "min_tokens": int(noise.choice([0, 3, 100])),
                "logit_bias": {int(i): float(noise.normal()) for i in noise.integers(0, vocab, noise.integers(0, 5))},
                "allowed_token_ids": tuple(noise.integers(0, vocab - 1, noise.choice([0, 0, 1, 9])).tolist()),
            }
        if noise.random() < 0.3:
            settings["logprobs"] = int(noise.integers(0, 6))
        generated = noise.integers(0, vocab, noise.integers(0, 40)).tolist()
        prompt = noise.integers(0, vocab, noise.integers(1, 30)).tolist()
        made.append(sequence(SamplingParams(**settings | fixed), vocab, generated, prompt))
    return made


def random_logits(noise: np.random.Generator, rows: int, vocab: int, scale: float) -> np.ndarray:
    logits = (noise.normal(size=(rows, vocab)) * scale).astype(np.float32)
    if scale == 3.0:
        logits = np.round(logits)  # many equal logits
    logits[noise.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 0.5
    return logits


@pytest.mark.parametrize("candidates", [8, 1024])
@pytest.mark.parametrize("vocab", [5, 100, 3000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
def test_the_device_selects_the_same_tokens_as_the_host(vocab: Any, scale: Any, candidates: Any) -> None:
    noise = np.random.default_rng(vocab + int(10 * scale))
    host, device = HostSelector(token_bytes), DeviceSelector(token_bytes, "cpu", candidates=candidates)
    for _ in range(6):
        sequences = random_sequences(noise, 40, vocab)
        logits = random_logits(noise, 40, vocab, scale)
        logits[3, 1], logits[7, 2], logits[9] = np.nan, np.inf, -np.inf
        expected = host.select(torch.tensor(logits), range(40), sequences)
        found = device.select(torch.tensor(logits), range(40), sequences)
        assert found.finite == expected.finite and not all(found.finite)
        for row, fine in enumerate(expected.finite):
            if fine:
                assert found.token_ids[row] == expected.token_ids[row], (row, sequences[row].request.sampling)
        assert found.logprobs.keys() == expected.logprobs.keys()
        for row, logprobs in expected.logprobs.items():
            same_logprobs(found.logprobs[row], logprobs)


def same_logprobs(found: Any, expected: Any) -> None:
    """Assert equality, except for rounding and for the choice between equally likely tokens."""
    for entry, other in itertools.zip_longest((found.chosen, *found.top), (expected.chosen, *expected.top)):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-9)
    assert found.chosen.token_id == expected.chosen.token_id
    assert found.chosen.token_bytes == expected.chosen.token_bytes


def test_choices_may_share_a_row() -> None:
    noise = np.random.default_rng(5)
    logits = random_logits(noise, 3, 50, 0.5)
    sequences = random_sequences(noise, 6, 50, temperature=1.0, logprobs=2)
    rows = [0, 1, 1, 1, 2, 2]
    host, device = HostSelector(token_bytes), DeviceSelector(token_bytes, "cpu")
    expected = host.select(torch.tensor(logits), rows, sequences)
    found = device.select(torch.tensor(logits), rows, sequences)
    assert found.token_ids == expected.token_ids
    assert found.logprobs.keys() == expected.logprobs.keys() == set(range(6))


def test_the_same_call_may_be_made_again() -> None:
    """The engine repeats a call when memory runs out. Edits must not add up."""
    noise = np.random.default_rng(6)
    logits = torch.tensor(random_logits(noise, 20, 50, 0.5))
    sequences = random_sequences(noise, 20, 50, repetition_penalty=1.5, logit_bias={3: 0.7})
    device = DeviceSelector(token_bytes, "cpu")
    assert device.select(logits, range(20), sequences) == device.select(logits, range(20), sequences)


def drawn(logits: np.ndarray, rows: SamplingRows, candidates: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens drawn by the device's functions, and in which rows the candidates sufficed."""
    parameters = DrawnRows(
        inverse_temperature=torch.from_numpy((1.0 / rows.temperature).astype(np.float32)),
        top_k=torch.from_numpy(rows.top_k),
        top_p=torch.from_numpy(rows.top_p),
        min_p=torch.from_numpy(rows.min_p.astype(np.float32)),
        noise=torch.from_numpy(uniform(rows.stream, rows.position)),
    )
    weights = weigh(torch.from_numpy(logits), parameters)
    if ((rows.top_k == 0) & (rows.top_p == 1.0)).all():
        return draw_from_all(weights, parameters).numpy(), np.ones(len(logits), dtype=bool)
    found, enough = draw_from_few(weights, parameters, candidates)
    return found.numpy(), enough.numpy()


@pytest.mark.parametrize(
    "settings", [{}, {"min_p": 0.01}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.97}]
)
def test_a_thousand_rows(settings: Any) -> None:
    """With a large vocabulary. No draw of these seeds is near enough to a border for rounding to change it."""
    noise = np.random.default_rng(len(settings))
    count, vocab = 1000, 4001
    logits = (noise.normal(size=(count, vocab)) * 2.5).astype(np.float32)
    each = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    rows = SamplingRows(
        temperature=np.full(count, each["temperature"]),
        top_k=np.full(count, each["top_k"], dtype=np.int64),
        top_p=np.full(count, each["top_p"]),
        min_p=np.full(count, each["min_p"]),
        stream=noise.integers(0, 2**63, count).astype(np.uint64),
        position=np.arange(count),
    )
    expected = Sampler().sample(logits, rows)
    found, enough = drawn(logits, rows, 512)
    assert enough.mean() > 0.5
    assert (found[enough] == expected[enough]).all()
    if not enough.all():
        found, enough = drawn(logits, rows, vocab)
        assert enough.all() and (found == expected).all()


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"top_k": 4}, [3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0]),  # five tokens are as likely as the fourth
        ({"top_k": 6}, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]),  # more than the candidates
        ({"top_p": 0.9}, [0.0] * 8),  # needs nearly all
        ({"top_p": 0.5}, [0.0] * 8),  # reached by the fourth, and all are equally likely
        ({"top_k": 3, "top_p": 0.8}, [3.0] + [0.0] * 7),  # a share of the weight of all eight
        ({"top_k": 6, "top_p": 0.01}, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]),
    ],
)
def test_rows_with_too_few_candidates_are_reported(settings: Any, row: Any) -> None:
    logits = np.tile(np.array(row, dtype=np.float32), (200, 1))
    rows = SamplingRows(
        temperature=np.ones(200),
        top_k=np.full(200, settings.get("top_k", 0), dtype=np.int64),
        top_p=np.full(200, settings.get("top_p", 1.0)),
        min_p=np.zeros(200),
        stream=np.arange(200, dtype=np.uint64),
        position=np.arange(200),
    )
    _, enough = drawn(logits, rows, 4)
    assert not enough.any()
    found, enough = drawn(logits, rows, 8)
    assert enough.all() and (found == Sampler().sample(logits, rows)).all()


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"top_k": 3}, [3.0, 2.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ({"top_k": 4}, [3.0, 2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0]),
        ({"top_p": 0.9}, [9.0, 8.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0]),
        ({"top_k": 6}, [3.0, 2.0, 1.0, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf]),  # the other tokens have no weight
        ({"top_p": 0.99, "min_p": 0.2}, [1.0, 0.9, 0.8, -1.0, -1.0, -1.0, -1.0, -1.0]),
    ],
)
def test_rows_with_enough_candidates_are_drawn_from_them(settings: Any, row: Any) -> None:
    logits = np.tile(np.array(row, dtype=np.float32), (200, 1))
    rows = SamplingRows(
        temperature=np.ones(200),
        top_k=np.full(200, settings.get("top_k", 0), dtype=np.int64),
        top_p=np.full(200, settings.get("top_p", 1.0)),
        min_p=np.full(200, settings.get("min_p", 0.0)),
        stream=np.arange(200, dtype=np.uint64),
        position=np.arange(200),
    )
    found, enough = drawn(logits, rows, 5)
    assert enough.all()
    assert (found == Sampler().sample(logits, rows)).all()


@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2.0**-53])
def test_extreme_noise_never_chooses_a_filtered_token(extreme: Any) -> None:
    def noise(streams: Any, _: Any) -> Any:
        return np.full(len(streams), extreme)

    logits = np.full((5, 300), -40.0, dtype=np.float32)
    logits[:, [0, 299]] = -np.inf
    logits[:, [70, 130, 131]] = [1.0, 2.0, 1.5]
    cases: tuple[dict[str, Any], ...] = ({"top_k": 3}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}, {})
    sequences = [sequence(SamplingParams(temperature=1.0, seed=1, **case), 300, [], [1]) for case in cases]
    expected = HostSelector(token_bytes, noise=noise).select(torch.tensor(logits), range(5), sequences)
    found = DeviceSelector(token_bytes, "cpu", noise=noise).select(torch.tensor(logits), range(5), sequences)
    assert found.token_ids == expected.token_ids

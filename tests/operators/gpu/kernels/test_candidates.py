"""Draws from candidates: the kernel chooses the tokens of its twin, and finds the same rows in which they suffice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels.candidates import Filters, draw_from_candidates

from ..interpreted import by_kernel, by_twin, compiled_for_h200

ROWS = 60


def random_filters(seed: int) -> Filters:
    """Filters of all kinds, alone and together."""
    generator = torch.Generator().manual_seed(seed)

    def among(numbers: list[float], dtype: torch.dtype) -> torch.Tensor:
        chosen = torch.randint(len(numbers), (ROWS,), generator=generator)
        return torch.tensor(numbers, dtype=dtype)[chosen]

    return Filters(
        among([0, 0, 1, 2, 20, 60, 10_000], torch.int64),
        among([1.0, 1.0, 0.95, 0.5, 1e-9], torch.float64),
        among([0.0, 0.0, 0.01, 0.3, 1.0], torch.float32),
        torch.rand(ROWS, generator=generator, dtype=torch.float64),
    )


def random_weights(seed: int, vocab: int, scale: float) -> torch.Tensor:
    """Weights [ROWS, vocab] with 1 for the most likely token. With scale 1.0 many are equal, and some rows are NaN."""
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if scale == 1.0 else logits * scale
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    if scale == 1.0:
        weights[5], weights[6], weights[6, 2] = torch.nan, 0.0, 1.0
    return weights


def drawn(call: Any, seed: int, vocab: int, candidates: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    weights = random_weights(seed, vocab, scale)
    values, ids = weights.topk(min(candidates, vocab), dim=1)
    tokens, enough = call(draw_from_candidates, values, ids, weights, random_filters(seed))
    return tokens, enough


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
@pytest.mark.parametrize(("vocab", "candidates"), [(7, 1024), (300, 40), (300, 64), (5000, 50)])
def test_the_kernel_draws_the_tokens_of_its_twin(vocab: int, candidates: int, scale: float) -> None:
    tokens, enough = drawn(by_kernel, vocab + candidates, vocab, candidates, scale)
    expected, suffices = drawn(by_twin, vocab + candidates, vocab, candidates, scale)
    finite = torch.arange(ROWS) != (5 if scale == 1.0 else -1)
    assert torch.equal(enough[finite], suffices[finite])
    assert torch.equal(tokens[enough & finite], expected[enough & finite])
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert suffices.sum() > 5 and (candidates > vocab or not suffices.all())


@pytest.mark.parametrize("noise", [0.0, 1.0 - 2.0**-53])
def test_the_first_and_the_last_kept_token_can_be_drawn(noise: float) -> None:
    weights = torch.tensor([[0.1, 0.0, 1.0, 0.5, 0.05, 0.7, 0.01]])
    values, ids = weights.topk(6, dim=1)
    numbers = torch.tensor([4]), torch.tensor([1.0]).double(), torch.zeros(1), torch.tensor([noise]).double()
    for call in (by_kernel, by_twin):
        tokens, enough = call(draw_from_candidates, values, ids, weights, Filters(*numbers))
        assert (tokens.tolist(), enough.tolist()) == ([0 if noise == 0.0 else 5], [True])


@pytest.mark.compiled
def test_kernels_of_sampling_compile_for_an_h200(tmp_path: Path) -> None:
    assert set(compiled_for_h200("sampling", tmp_path)) == {"_draw_kernel", "_parts_kernel", "_greatest_kernel"}

"""Queries and keys of latent attention: the kernel writes what the functions that all devices share compute."""

from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.attention import latent_inputs
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.latent_shape import LatentShape

from ..interpreted import by_kernel
from ..kernels.comparing import DTYPES, assert_same

SHAPES: dict[str, dict[str, Any]] = {
    "interleaved": {"heads": 3, "plain": 16, "rotary": 8, "value": 16, "latent": 80, "interleaved": True},
    "in halves": {"heads": 18, "plain": 24, "rotary": 12, "value": 8, "latent": 40, "interleaved": False},
}
TOKENS = 5


def case(kind: str, dtype: torch.dtype, *, absorbs: bool, cache: torch.dtype | None = None) -> dict[str, Any]:
    """Arguments with strided rows, as products of several matrices leave them."""
    torch.manual_seed(0)
    shape = LatentShape(**SHAPES[kind], scaling=0.1, low_rank=0, epsilon=0.1)
    down = torch.randn(TOKENS, shape.heads * (shape.plain + shape.rotary) + shape.key).to(dtype)
    up = torch.randn(shape.heads, shape.plain + shape.value, shape.latent).to(dtype)
    angles = torch.rand(64, shape.rotary // 2) * 6
    loud = 400.0 if cache else 1.0
    return {
        "query": down[:, : -shape.key],
        "key": down[:, -shape.key :],
        "shape": shape,
        "norm": (torch.randn(shape.latent) * loud).to(dtype),
        "key_up": up[:, : shape.plain] if absorbs else None,
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "positions": torch.tensor([3, 0, 63, 10, 11]),
        "slot_mapping": torch.tensor([0, 5, 4, 11, 7]),
        "cache": torch.zeros(3, 4, 1, shape.key).to(cache or dtype),
    }


def assert_equals_twin(ours: dict[str, Any], twin: dict[str, Any]) -> None:
    query = by_kernel(latent_query_append, **ours)
    assert query.is_contiguous()
    expected = latent_query_append(**twin)
    if ours["key_up"] is None:
        assert_same(query, expected)
    else:  # sums of products have another order
        bound = 1e-5 if query.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(query.float(), expected.float(), rtol=bound, atol=bound * 4)
    assert_same(ours["cache"], twin["cache"])
    assert twin["cache"].view(12, -1).float().any(1).tolist() == [slot in {0, 4, 5, 7, 11} for slot in range(12)]


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SHAPES)
def test_the_kernel_equals_its_twin(kind: str, dtype: torch.dtype, absorbs: bool) -> None:
    assert_equals_twin(case(kind, dtype, absorbs=absorbs), case(kind, dtype, absorbs=absorbs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_are_absorbed_by_a_product_beside_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_inputs, "FEW_TOKENS", TOKENS - 1)
    assert_equals_twin(case("interleaved", dtype, absorbs=True), case("interleaved", dtype, absorbs=True))


def test_an_fp8_cache_saturates() -> None:
    ours, twin = (case("interleaved", torch.bfloat16, absorbs=True, cache=torch.float8_e4m3fn) for _ in range(2))
    assert_equals_twin(ours, twin)
    assert (ours["cache"].float().abs() == 448).any() and not ours["cache"].float().isnan().any()


def test_numbers_of_an_fp8_cache_are_divided_by_its_scale() -> None:
    options: Any = {"absorbs": True, "cache": torch.float8_e4m3fn}
    ours, twin = (case("in halves", torch.bfloat16, **options) | {"scale": 4.0} for _ in range(2))
    assert_equals_twin(ours, twin)
    wide = case("in halves", torch.bfloat16, absorbs=True) | {"norm": ours["norm"]}
    latent_query_append(**wide)
    assert wide["cache"].abs().max() > 600
    assert_same(ours["cache"], (wide["cache"].float() / 4).clamp(-448, 448).to(torch.float8_e4m3fn))


def test_a_step_may_have_no_tokens() -> None:
    arguments = case("interleaved", torch.float32, absorbs=True)
    for name in ("query", "key", "positions", "slot_mapping"):
        arguments[name] = arguments[name][:0]
    assert by_kernel(latent_query_append, **arguments).shape == (0, 3, 88)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="latent_query_append"):
        latent_query_append(**case("interleaved", torch.float32, absorbs=True) | {"norm": torch.ones(8)})

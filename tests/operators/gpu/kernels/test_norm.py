"""Residual sum and RMSNorm: the twin computes what the modules of transformers do, the kernel what the twin does."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from ktqueue.operators.gpu.kernels.norm import add_rms_norm, in_order

from ..interpreted import by_kernel, by_twin
from .comparing import DTYPES, assert_same, clones


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_norm(dtype: torch.dtype) -> None:
    norm = Qwen3MoeRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    residual, added = torch.randn(2, 5, 48).to(dtype)
    hidden = residual + added
    updated = residual.clone()
    copy = torch.empty(5, 48)
    normed = add_rms_norm(updated, norm.weight.data, 1e-5, added=added, copy=copy)
    assert torch.equal(updated, hidden)
    assert torch.equal(normed, norm(hidden).data)
    assert torch.equal(copy, normed.float())
    assert torch.equal(add_rms_norm(updated, norm.weight.data, 1e-5), normed)
    assert torch.equal(updated, hidden)


def test_a_layer_norm() -> None:
    norm = torch.nn.LayerNorm(48, eps=1e-5)
    norm.weight.data.normal_()
    norm.bias.data.normal_()
    residual = torch.randn(5, 48) + 3
    stacked = torch.stack([norm.weight.data, norm.bias.data])
    torch.testing.assert_close(add_rms_norm(residual, stacked, 1e-5), norm(residual).data)


def test_the_sum_is_rounded_once() -> None:
    residual, shared = torch.randn(2, 3, 48).bfloat16()
    added, partials, gate = torch.randn(3, 48), torch.randn(3, 4, 48), torch.randn(3, 1).bfloat16()
    total = residual.float() + added + partials.sum(1) + torch.sigmoid(gate.float()) * shared.float()
    options = {"added": added, "partials": partials, "shared": shared, "shared_gate": gate}
    normed = add_rms_norm(residual, torch.ones(48), 1e-6, **options)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(residual, total.bfloat16())


def test_a_shared_expert_without_a_gate_is_added_whole() -> None:
    residual, weight, shared = torch.randn(3, 32), torch.rand(32), torch.randn(3, 32)
    total = residual + shared
    add_rms_norm(residual, weight, 1e-6, shared=shared)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "slots"), [(1, 64, 2), (5, 100, 3), (0, 64, 2)])
def test_the_kernel_equals_its_twin(tokens: int, hidden: int, slots: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    residual, shared = torch.randn(2, tokens, hidden).to(dtype)
    pair = torch.randn(2, hidden).to(dtype)  # of a LayerNorm
    nothing: dict[str, Any] = dict.fromkeys(("added", "partials", "shared", "shared_gate", "copy"))
    everything = {
        "added": torch.randn(tokens, hidden),
        "partials": torch.randn(tokens, slots, hidden),
        "shared": shared,
        "shared_gate": torch.randn(tokens, 1).to(dtype),
        "copy": torch.zeros(tokens, hidden),
        "scale": 0.7,
    }
    rounded = {**everything, "partials": torch.randn(tokens, slots, hidden).bfloat16()}
    some = {**everything, "added_rows": torch.arange(tokens, dtype=torch.int32) % 2}
    some["added"] = torch.where(some["added_rows"][:, None] > 0, some["added"], torch.nan)  # old rows, perhaps
    for options, weight in itertools.product((nothing, everything, rounded, some), (pair[0], pair, pair[0].float())):
        ours, twin = clones({"residual": residual, **options}), clones({"residual": residual, **options})
        normed = by_kernel(add_rms_norm, weight=weight, epsilon=1e-6, **ours)
        assert_same(normed, add_rms_norm(weight=weight, epsilon=1e-6, **twin))
        assert_same(ours["residual"], twin["residual"])
        assert not normed.isnan().any()
        if options["copy"] is not None:
            assert_same(ours["copy"], normed.float())


def test_columns_are_in_the_order_of_warpgroups() -> None:
    x = torch.arange(64.0).bfloat16().view(1, 64)
    found = by_twin(in_order, x)[0].tolist()
    assert found[:16] == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
    assert found[16:20] == [4, 5, 12, 13] and found[32:34] == [32, 33] and sorted(found) == x[0].tolist()
    many = torch.randn(9, 288).bfloat16()
    twin, kernel = (run(in_order, many) for run in (by_twin, by_kernel))
    assert twin.equal(kernel)


@pytest.mark.parametrize("run", [by_twin, by_kernel])
@pytest.mark.parametrize("hidden", [64, 96])
def test_rows_are_also_written_in_order(run: Callable[..., torch.Tensor], hidden: int) -> None:
    residual, weight = torch.randn(5, hidden).bfloat16(), torch.randn(hidden).bfloat16()
    ordered = torch.full_like(residual, torch.nan)
    normed = run(add_rms_norm, residual, weight, 1e-6, ordered=ordered)
    assert ordered.equal(by_twin(in_order, normed))


@pytest.mark.parametrize(("columns", "dtype"), [(48, torch.bfloat16), (64, torch.float32)])
def test_only_whole_slabs_of_two_bytes_have_an_order(columns: int, dtype: torch.dtype) -> None:
    rows = torch.zeros(2, columns, dtype=dtype)
    with pytest.raises(ValueError, match="add_rms_norm"):
        by_kernel(add_rms_norm, rows, rows[0], 1e-6, ordered=rows.clone())

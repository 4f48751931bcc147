"""Residual sum and RMSNorm: the twin computes what the modules of transformers do, the kernel what the twin does."""

import itertools
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from ktqueue.operators.gpu.kernels.norm import add_rms_norm

from ..interpreted import by_kernel
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
    for options, weight in itertools.product((nothing, everything, rounded), (pair[0], pair, pair[0].float())):
        ours, twin = clones({"residual": residual, **options}), clones({"residual": residual, **options})
        normed = by_kernel(add_rms_norm, weight=weight, epsilon=1e-6, **ours)
        assert_same(normed, add_rms_norm(weight=weight, epsilon=1e-6, **twin))
        assert_same(ours["residual"], twin["residual"])
        if options["copy"] is not None:
            assert_same(ours["copy"], normed.float())

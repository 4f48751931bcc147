"""The kernels of the fused operators: interpreted, they equal the twins; compiled, an H200 takes them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels import linear, rope
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.gpu.kernels.router import route

from ..interpreted import by_kernel, compiled_for_h200

pytest.importorskip("triton")

DTYPES = (torch.float32, torch.bfloat16)
STEP = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
"""About two last bits, as part of a number."""


def same(ours: torch.Tensor, twin: torch.Tensor) -> None:
    """Equal but for the last bit or two: sums and exponentials differ in it."""
    assert ours.dtype == twin.dtype
    a, b = ours.float(), twin.float()
    torch.testing.assert_close(a, b, rtol=STEP[twin.dtype], atol=1e-5, equal_nan=True)
    if twin.dtype != torch.float32 and len(b):
        assert ((a == b) | b.isnan()).float().mean() > 0.995  # each rounding is where it belongs


def clones(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "slots"), [(1, 64, 2), (5, 100, 3), (0, 64, 2)])
def test_add_rms_norm(tokens: int, hidden: int, slots: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    residual, shared = torch.randn(2, tokens, hidden).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    nothing: dict[str, Any] = dict.fromkeys(("added", "partials", "shared", "shared_gate", "copy"))
    everything = {
        "added": torch.randn(tokens, hidden),
        "partials": torch.randn(tokens, slots, hidden),
        "shared": shared,
        "shared_gate": torch.randn(tokens, 1).to(dtype),
        "copy": torch.zeros(tokens, hidden),
    }
    for options in (nothing, everything):
        ours, twin = clones({"residual": residual, **options}), clones({"residual": residual, **options})
        normed = by_kernel(add_rms_norm, weight=weight, epsilon=1e-6, **ours)
        same(normed, add_rms_norm(weight=weight, epsilon=1e-6, **twin))
        same(ours["residual"], twin["residual"])
        if options["copy"] is not None:
            same(ours["copy"], normed.float())


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"norm": "head"},
        {"norm": "whole", "clip": 0.5, "head_dim": 12, "heads": 3, "kv_heads": 3},
        {"norm": "", "head_dim": 10, "heads": 5, "kv_heads": 3},
    ],
    ids=["head", "whole", "none"],
)
@pytest.mark.parametrize("few_tokens", [3, 2], ids=["a head", "several heads"])
def test_qk_norm_rope_append(
    qkv: Callable[..., dict[str, Any]],
    few_tokens: int,
    sizes: dict[str, Any],
    dtype: torch.dtype,
    cache: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "_FEW_TOKENS", few_tokens)
    ours, twin = (qkv(**sizes, dtype=dtype, cache=cache) for _ in range(2))
    padded = torch.zeros(ours["qkv"].shape[0], ours["qkv"].shape[1] + 3, dtype=dtype)
    padded[:, :-3] = ours["qkv"]
    query = by_kernel(qk_norm_rope_append, padded[:, :-3], **{name: x for name, x in ours.items() if name != "qkv"})
    same(query, qk_norm_rope_append(**twin))
    assert twin["values"].float().any()
    same(ours["keys"], twin["keys"])
    same(ours["values"], twin["values"])


def unusual(experts: int) -> torch.Tensor:
    """[9, experts] logits: random, tied, of both zeros, and such as have no softmax."""
    logits = torch.randn(9, experts)
    logits[1] = 0
    logits[2] = logits[2].round()
    logits[3, 1::2] = -0.0
    logits[3, ::2] = 0.0
    logits[4, 2:] = float("-inf")
    logits[5, 1] = float("nan")
    logits[6, 1] = -torch.tensor(float("nan"))
    logits[7, 2] = float("inf")
    logits[8] = float("-inf")
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (60, 4), (128, 8), (5, 5), (16, 16), (300, 1)])
def test_route(experts: int, chosen: int, dtype: torch.dtype) -> None:
    torch.manual_seed(experts)
    logits = unusual(experts).to(dtype)
    options = {
        "on_gpu": torch.where(torch.rand(experts) < 0.5, torch.arange(experts) * 64, -1),
        "live_tokens": torch.tensor([8], dtype=torch.int32),
        "counts": torch.ones(experts, dtype=torch.int32),
        "copies": (torch.zeros(9, chosen, dtype=torch.int64), torch.zeros(9, chosen)),
    }
    choice = torch.randn(logits.shape)
    scorings: list[dict[str, Any]] = [{}, {"choice": choice, "scale": 2.5}, {"sigmoid": True}]
    scorings.append({"choice": choice, "sigmoid": True, "scale": 0.5})
    for extras, scoring in itertools.product((options, dict.fromkeys(options)), scorings):
        for renormalise in (True, False):
            ours, twin = clones(extras), clones(extras)
            routing = by_kernel(route, logits, chosen, renormalise=renormalise, **ours, **scoring)
            expected = route(logits, chosen, renormalise=renormalise, **twin, **scoring)
            assert torch.equal(routing.ids, expected.ids)
            assert torch.equal(routing.cpu_ids, expected.cpu_ids)
            same(routing.weights, expected.weights)
            if ours["counts"] is not None:
                assert torch.equal(ours["counts"], twin["counts"])
                assert torch.equal(ours["copies"][0], routing.cpu_ids)
                same(ours["copies"][1], routing.weights)


def test_sigmoids_that_are_all_zero_weigh_nothing() -> None:
    routing = by_kernel(route, torch.full((1, 4), -200.0), 2, renormalise=True, sigmoid=True)
    assert routing.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped"])
def test_gated(activation: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for tokens, intermediate in ((2, 30), (1, 1100)):
        gate_up = (torch.randn(tokens, 2 * intermediate) * 3).to(dtype)
        ours = by_kernel(gated, activation, gate_up, alpha=1.702, limit=2.0)
        twin = gated(activation, gate_up.float(), alpha=1.702, limit=2.0)
        torch.testing.assert_close(ours.float(), twin, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns"), [(17, 100), (5, 2100)])
@pytest.mark.parametrize("programs", [1, 512])
def test_few_rows_linear(
    outputs: int, columns: int, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_PROGRAMS", programs)
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, columns).to(dtype), torch.randn(outputs).to(dtype)
    for tokens in (1, 3, 4):
        x = torch.randn(tokens, columns + 4).to(dtype)[:, :columns]
        for added in (None, bias):
            ours = by_kernel(few_rows_linear, x, weight, added)
            twin = x.float() @ weight.float().T + (0 if added is None else added.float())
            torch.testing.assert_close(ours.float(), twin, rtol=STEP[dtype], atol=1e-4)
        sums = by_kernel(few_rows_linear, x, weight, dtype=torch.float32)
        torch.testing.assert_close(sums, x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


def test_an_h200_takes_them(tmp_path: Path) -> None:
    """What the CPU has just written is read past the caches. (Triton drops a cache_modifier of ".cv" silently.)"""
    names = {"_add_rms_norm", "_few_rows_linear", "_gated", "_qk_norm_rope_append", "_route"}
    assert set(compiled_for_h200("between matrices", tmp_path)) == names | {"_add_rms_norm+volatile"}

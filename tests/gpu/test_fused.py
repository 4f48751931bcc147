"""On a GPU, the fused operators' kernels equal their twins, eager and in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.linear import FEW_ROWS, few_rows_linear
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.gpu.kernels.router import Routing, route
from ktqueue.operators.kv_cache import CacheScale
from ktqueue.workers.startup.gpu_memory import sum_exactly

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ROWS = (1, 64, 2500)
STEPS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}


@pytest.fixture(autouse=True)
def as_in_a_worker() -> None:
    sum_exactly()


def same(
    ours: torch.Tensor, twin: torch.Tensor, rounded: torch.dtype | None = None, steps: int = 1, exactly: float = 0.97
) -> None:
    """Equal but for a last bit here and there: within `steps` rounding steps of a row's largest, and more than the part
    `exactly` of the numbers with no difference.

    rounded: the type that numbers were rounded to before they were stored in a wider one.
    """
    rounded = rounded or twin.dtype
    assert ours.dtype == twin.dtype and ours.shape == twin.shape
    if not twin.is_floating_point():
        assert torch.equal(ours.cpu(), twin)
        return
    a, b = ours.cpu().float(), twin.float()
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(0), b.nan_to_num(0)
    assert ((a - b).abs() <= steps * STEPS[rounded] * b.abs().amax(-1, keepdim=True)).all()
    if rounded != torch.float32:
        assert (a == b).float().mean() > exactly


def on_gpu(x: Any) -> Any:
    if isinstance(x, CacheScale):
        return x
    if isinstance(x, tuple):
        return tuple(on_gpu(one) for one in x)
    return x.cuda() if isinstance(x, torch.Tensor) else x


def tensors(*results: Any) -> list[torch.Tensor]:
    """What an operator returned and what it wrote, flat."""
    flat: list[torch.Tensor] = []
    for x in results:
        if isinstance(x, torch.Tensor):
            flat.append(x)
        elif isinstance(x, (list, tuple)):
            flat += tensors(*x)
        elif isinstance(x, Routing):
            flat += [x.ids, x.weights]
    return flat


def check(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    written: tuple[str, ...] = (),
    *,
    copied: torch.dtype | None = None,
    steps: int = 1,
    exactly: float = 0.97,
) -> None:
    """The kernel equals the twin: eager, then replayed in a graph captured on other numbers. copied: the type to which
    numbers of `copy` were rounded; steps, exactly: see `same`."""
    twin = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    eager = {name: on_gpu(x) for name, x in arguments.items()}
    ours = tensors(call(**eager), [eager[name] for name in written])
    expected = tensors(call(**twin), [twin[name] for name in written])
    assert len(ours) == len(expected) > 0
    rounded = [None] * (len(expected) - len(written)) + [copied if name == "copy" else None for name in written]
    for one, other, dtype in zip(ours, expected, rounded, strict=True):
        same(one, other, dtype, steps, exactly)

    fixed = {name: on_gpu(x) for name, x in arguments.items()}
    floats = [x for x in fixed.values() if isinstance(x, torch.Tensor) and x.dtype in DTYPES]
    for x in floats:
        x.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(**fixed)
    for name, x in fixed.items():  # capturing ran nothing; the real numbers come now
        if isinstance(x, torch.Tensor):
            x.copy_(arguments[name])
    graph.replay()
    torch.cuda.synchronize()
    replayed = tensors(results, [fixed[name] for name in written])
    for one, other, dtype in zip(replayed, expected, rounded, strict=True):
        same(one, other, dtype, steps, exactly)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [2048, 2880, 4096, 8192])
@pytest.mark.parametrize("tokens", ROWS)
def test_add_rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    base = {"residual": torch.randn(tokens, hidden).to(dtype), "weight": torch.rand(hidden).to(dtype), "epsilon": 1e-6}
    check(add_rms_norm, base, ("residual",))
    some = base | {"added": torch.randn(tokens, hidden), "partials": torch.randn(tokens, 2, hidden)}
    check(add_rms_norm, some, ("residual",))
    shared = {"shared": torch.randn(tokens, hidden).to(dtype), "shared_gate": torch.randn(tokens, 1).to(dtype)}
    check(add_rms_norm, some | shared | {"copy": torch.zeros(tokens, hidden)}, ("residual", "copy"), copied=dtype)


@pytest.mark.parametrize(("dtype", "cache"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float8_e4m3fn)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norm", "clip"),
    [
        (32, 4, 128, "head", 0.0),
        (16, 16, 128, "whole", 8.0),
        (32, 8, 128, "", 0.0),
        (12, 3, 80, "head", 0.0),
        (8, 2, 96, "whole", 0.0),
        (8, 4, 64, "", 1.0),
        (4, 1, 256, "head", 0.0),
    ],
)
@pytest.mark.parametrize("tokens", ROWS)
def test_qk_norm_rope_append(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm: str,
    clip: float,
    dtype: torch.dtype,
    cache: torch.dtype,
) -> None:
    torch.manual_seed(tokens)
    pages = tokens // 16 + 2
    sizes = {"head": (head_dim, head_dim), "whole": (heads * head_dim, kv_heads * head_dim)}.get(norm)
    angles = torch.rand(4096, head_dim // 2) * 6
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    qkv[:, -head_dim:] *= 300  # the last head's values pass what fp8 holds
    arguments = {
        "qkv": qkv.to(dtype),
        "heads": heads,
        "kv_heads": kv_heads,
        "q_norm": torch.rand(sizes[0]).to(dtype) if sizes else None,
        "k_norm": torch.rand(sizes[1]).to(dtype) if sizes else None,
        "epsilon": 1e-6,
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "positions": torch.randint(4096, (tokens,)),
        "slot_mapping": torch.randperm(pages * 16)[:tokens],
        "keys": torch.zeros(pages, 16, kv_heads, head_dim).to(cache),
        "values": torch.zeros(pages, 16, kv_heads, head_dim).to(cache),
        "clip": clip,
        "scale": CacheScale(0.5, 4),  # which only float8 has
    }
    # A scale that differs in its last bit, or a fused multiply-add, rounds one number in thousands the other way. Each
    # of the two numbers behind a turned one, up to sqrt(2) of a row's largest, may so be a step off, which makes
    # sqrt(2) * sqrt(2) steps of their turned sum; and the sum itself is rounded.
    check(qk_norm_rope_append, arguments, ("keys", "values"), steps=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (60, 4), (8, 2), (512, 10), (16, 16)])
@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("renormalise", [True, False])
def test_route(tokens: int, experts: int, chosen: int, renormalise: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts)
    logits[tokens // 2] = logits[tokens // 2].round()
    if tokens > 4:
        logits[1] = 0
        logits[2, ::2] = -0.0
        logits[3, 1] = float("nan")
        logits[4, 1] = -torch.tensor(float("nan"))
        logits[5, 2] = float("inf")
        logits[6] = float("-inf")
        logits[7, 3:] = float("-inf")
    check(route, {"logits": logits.to(dtype), "experts_per_token": chosen, "renormalise": renormalise})
    options = {
        "on_gpu": torch.where(torch.rand(experts) < 0.5, torch.arange(experts) * 64, -1),
        "live_tokens": torch.tensor([max(tokens - 1, 1)], dtype=torch.int32),
        "counts": torch.ones(experts, dtype=torch.int32),
        "for_cpu": (torch.zeros(tokens, chosen, dtype=torch.int64), torch.zeros(tokens, chosen)),
    }
    routing = {"logits": logits.to(dtype), "experts_per_token": chosen, "renormalise": renormalise, **options}
    check(route, routing, ("counts", "for_cpu"))


def test_copies_may_lie_in_pinned_memory() -> None:
    torch.manual_seed(0)
    logits, residual = torch.randn(3, 128).cuda(), torch.randn(3, 2048).bfloat16().cuda()
    for_cpu = torch.zeros(3, 8, dtype=torch.int64).pin_memory(), torch.zeros(3, 8).pin_memory()
    copy, added = torch.zeros(3, 2048).pin_memory(), torch.randn(3, 2048).pin_memory()
    routing = route(logits, 8, renormalise=True, for_cpu=for_cpu)
    expected = residual.cpu().float() + added
    normed = add_rms_norm(residual, torch.ones(2048, device="cuda"), 1e-6, added=added, copy=copy)
    torch.cuda.synchronize()
    assert torch.equal(for_cpu[0], routing.ids.cpu())
    assert torch.equal(for_cpu[1], routing.weights.cpu())
    assert torch.equal(copy, normed.cpu().float())
    assert torch.equal(residual.cpu(), expected.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", ROWS)
def test_gated(tokens: int, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    check(gated, {"activation": activation, "gate_up": torch.randn(tokens, 2 * 1408).to(dtype)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "columns"), [(5120, 2048), (2048, 4096), (128, 2048), (1000, 2880), (7, 14336)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_few_rows_linear(tokens: int, outputs: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    weight = (torch.randn(outputs, columns) / columns**0.5).to(dtype)
    for bias in (None, torch.randn(outputs).to(dtype)):
        # More rows are torch's product: tensor cores cut sums of many terms off where ours rounds them.
        exactly = 0.97 if tokens <= FEW_ROWS else 0.5
        given = {"x": torch.randn(tokens, columns).to(dtype), "weight": weight, "bias": bias}
        check(few_rows_linear, given, exactly=exactly)
    x = torch.randn(tokens, columns).to(dtype)
    sums = few_rows_linear(x.cuda(), weight.cuda(), dtype=torch.float32)
    torch.testing.assert_close(sums.cpu(), x.float() @ weight.float().T, rtol=1e-3, atol=1e-3)

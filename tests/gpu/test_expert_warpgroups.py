"""On a GPU, products of many tokens by warpgroups equal their twin: every format and gate, lists of all lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_warpgroups, panel_layout
from ktqueue.operators.gpu.kernels.expert_pairs import MOST_READ_BY_EACH, ExpertPairs, sort_pairs
from ktqueue.operators.gpu.kernels.expert_warpgroups import NARROW, WIDE, WarpgroupKernel
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import SILU, GateFacts
from ktqueue.operators.packed import Bytes

from ..operators.gpu.kernels.panel_pools import GATES, make_pool, route
from .test_expert_products import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

BOUND = 1e-2
"""Relative norm of the error: weights are rounded to bfloat16."""
EXPERTS, SLOTS = 6, 3
TOKENS = (1, 60, 130, 320, 400, 700, 900)
"""An expert's pairs fill one block of columns, some, all of them, and several lists."""


def multiplied(kernel: WarpgroupKernel, *arguments: Any) -> torch.Tensor:
    """What `experts` returns if it chooses `kernel`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(expert_warpgroups, "kernel_for", lambda *_: kernel)
        return expert_warpgroups.experts(*arguments)


def assert_equals_the_twin(pairs: ExpertPairs, x: torch.Tensor, weights: torch.Tensor, gate: GateFacts = SILU) -> None:
    """Each pair is the twin's, and the same bits by the other kernel, in a second run and in a graph."""
    there, on_device, factors = on_gpu(pairs), x.cuda(), weights.cuda()
    arguments = there, there.offsets, on_device, factors, gate
    found = multiplied(NARROW, *arguments)
    assert multiplied(WIDE, *arguments).equal(found)
    torch.cuda.synchronize()
    expected = expert_warpgroups.experts(pairs, pairs.offsets, x, weights, gate)
    error = (found.cpu().double() - expected.double()).norm()
    assert error <= BOUND * expected.double().norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [multiplied(kernel, *arguments) for kernel in (NARROW, WIDE)]
    for one in again:
        one.fill_(torch.nan)  # what the graph does not write
    graph.replay()
    assert all(one.equal(found) for one in again)


@pytest.fixture(autouse=True)
def needs_warpgroups() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU has no warpgroups")


@pytest.mark.parametrize("quant", [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS])
def test_every_format_equals_the_twin(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """An expert is on the CPU, and a pair has no expert."""
    pool = make_pool(random_weights, quant, EXPERTS, 512, 512)
    assert expert_warpgroups.can_multiply(pool.record, torch.bfloat16, torch.device("cuda"))
    offsets = pool.offsets.clone()
    offsets[1] = -1
    for tokens in TOKENS:
        x, (ids, weights) = torch.randn(tokens, 512).bfloat16(), route(tokens, EXPERTS, SLOTS, tokens)
        ids[-1, 0] = -1
        assert_equals_the_twin(pool.pairs(ids, offsets), x, weights)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_gate_equals_the_twin(gate: GateFacts, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, ("Q4_K", "Q4_K", "Q6_K"), EXPERTS, 256, 512, biased=True, gate=gate)
    x, (ids, weights) = torch.randn(200, 256).bfloat16(), route(200, EXPERTS, SLOTS)
    assert_equals_the_twin(pool.pairs(ids), x, weights, gate)


def test_all_tokens_choose_one_expert(random_weights: Callable[..., Bytes]) -> None:
    """Most experts have no pairs, and one has many lists. Pairs are sorted block by block."""
    pool = make_pool(random_weights, ("Q4_K", "Q4_K", "Q6_K"), EXPERTS, 512, 256)
    tokens = MOST_READ_BY_EACH + 300
    ids, weights = torch.full((tokens, 1), 4), torch.rand(tokens, 1)
    assert_equals_the_twin(pool.pairs(ids), torch.randn(tokens, 512).bfloat16(), weights)


@pytest.mark.parametrize("experts", [5, 128, 384])
def test_many_pairs_are_sorted(experts: int) -> None:
    """Those of an expert stay in order. An expert is on the CPU, and some pairs have none."""
    ids = torch.randint(-1, experts, (3001, 8), device="cuda")
    offsets = torch.arange(experts, device="cuda")
    offsets[2] = -1
    lists = sort_pairs(ExpertPairs(ids, offsets, ids, ExpertRecord("Q8_0", "Q8_0", "Q8_0", 32, 32)))
    chosen = ids.flatten()
    totals = torch.bincount(chosen[chosen >= 0], minlength=experts)
    expected = chosen.argsort(stable=True)[int((chosen < 0).sum()) :]
    assert lists.sorted[: len(expected)].equal(expected.int())
    assert lists.starts.equal((totals.cumsum(0) - totals).int())
    totals[2] = 0
    assert lists.counts.equal(totals.int())


def test_other_gpu_work_does_not_change_a_bit(random_weights: Callable[..., Bytes]) -> None:
    """Two runs at once, on two streams."""
    pool = make_pool(random_weights, ("Q4_K", "Q4_K", "Q6_K"), EXPERTS, 512, 256)
    ids, weights = route(700, EXPERTS, SLOTS)
    pairs, x, weights = on_gpu(pool.pairs(ids)), torch.randn(700, 512).bfloat16().cuda(), weights.cuda()
    expected = expert_warpgroups.experts(pairs, pairs.offsets, x, weights, SILU)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [multiplied(kernel, pairs, pairs.offsets, x, weights, SILU) for kernel in (NARROW, WIDE)]
    torch.cuda.synchronize()
    assert all(one.equal(expected) for one in found)

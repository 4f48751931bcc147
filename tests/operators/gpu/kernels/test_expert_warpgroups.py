"""Products of many tokens by warpgroups: the twin against decoded experts, and machine code for an H200 without one."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels import expert_warpgroups
from ktqueue.operators.gpu.kernels.cuda_kernel import kept_code, machine_code
from ktqueue.operators.gpu.kernels.expert_matrices import ProductFacts, options
from ktqueue.operators.gpu.kernels.expert_pairs import MOST_READ_BY_EACH, ExpertPairs, sort_pairs
from ktqueue.operators.gpu.kernels.expert_warpgroups import NAME, NARROW, SOURCE, WIDE, WarpgroupKernel
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import SILU, GateFacts
from ktqueue.operators.packed import Bytes

from ..interpreted import by_kernel, by_twin, compiled_for_h200
from .panel_pools import GATES, make_pool, route
from .test_expert_matrices import QUANTS

KERNELS = NARROW, WIDE
BOUND = 2e-6
"""Relative error of float32 sums in another order."""


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_the_twin_equals_packed_experts(gate: GateFacts, random_weights: Callable[..., Bytes]) -> None:
    """Some pairs have no expert, and an expert is on the CPU. The weights of these pairs are NaN."""
    pool = make_pool(random_weights, ("Q4_K", "Q4_K", "Q6_K"), 5, 256, 256, biased=True)
    offsets, (ids, weights) = pool.offsets.clone(), route(12, 5, 3)
    offsets[1], ids[4, 0] = -1, -1
    x = torch.randn(12, 256, generator=torch.Generator().manual_seed(1))
    pairs = pool.pairs(ids, offsets)
    expected = products.experts(pairs, offsets, x, weights, gate, exact=True)
    weights[(ids < 0) | (ids == 1)] = torch.nan
    found = by_twin(expert_warpgroups.experts, pairs, offsets, x, weights, gate)
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize("experts", [3, 40])
def test_many_pairs_are_sorted_block_by_block(experts: int) -> None:
    """Those of an expert stay in order. Some pairs have no expert, one expert has none, and one is on the CPU."""
    tokens = MOST_READ_BY_EACH // 4 + 45
    ids = torch.randint(-1, experts, (tokens, 4), generator=torch.Generator().manual_seed(experts))
    ids[ids == 1] = 2
    offsets = torch.arange(experts)
    offsets[0] = -1
    record = ExpertRecord("Q8_0", "Q8_0", "Q8_0", 32, 32)
    lists = by_kernel(sort_pairs, ExpertPairs(torch.empty(0, dtype=torch.uint8), offsets, ids, record))
    chosen = ids.flatten()
    expected = chosen.argsort(stable=True)[(chosen < 0).sum() :]
    totals = torch.bincount(chosen[chosen >= 0], minlength=experts)
    assert lists.sorted[: len(expected)].equal(expected.int())
    assert lists.starts.equal((totals.cumsum(0) - totals).int())
    assert lists.counts.tolist() == [0, *totals[1:].tolist()]


def test_shapes_that_fit() -> None:
    for record, fits in (
        (ExpertRecord("Q4_K", "Q4_K", "Q6_K", 2048, 768), True),
        (ExpertRecord("Q4_K", "Q6_K", "Q6_K", 2048, 768), False),
        (ExpertRecord("Q4_K", "Q4_K", "F16", 2048, 768), False),
        (ExpertRecord("Q4_K", "Q4_K", "Q6_K", 2048, 1408), False),
    ):
        assert expert_warpgroups.fits(record) == fits
        assert not expert_warpgroups.can_multiply(record, torch.bfloat16, torch.device("cpu"))


@pytest.mark.compiled
def test_code_is_kept(compiler: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process would not compile it, unless a header has changed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source, header = tmp_path / "one.cu", tmp_path / "one.cuh"
    source.write_text('#include "one.cuh"\nextern "C" __global__ void one(int* x) { *x = NUMBER; }')
    found = []
    for number in (1, 1, 2):
        header.write_text(f"#define NUMBER {number}")
        found.append(kept_code(source, [], "90", compiler))
    assert found[0] == found[1] != found[2]
    assert len([*tmp_path.glob("cache/*/one.cubin")]) == 2
    next(path for path in tmp_path.glob("cache/*/one.cubin") if path.read_bytes() == found[2]).write_bytes(b"kept")
    assert kept_code(source, [], "90", compiler) == b"kept"
    source.write_text("no")
    with pytest.raises(RuntimeError, match=r"one\.cu does not compile:\n"):
        kept_code(source, [], "90", compiler)


@pytest.mark.compiled
@pytest.mark.parametrize("quant", QUANTS)
def test_every_format_compiles(quant: str, compiler: ctypes.CDLL) -> None:
    """For few pairs, whose code is short."""
    few = WarpgroupKernel((64,), takes_jobs=True)
    for facts in (ProductFacts(quant, 8, 256, 256, SILU), ProductFacts(quant, 8, 512, 256, None)):
        assert NAME.encode() in machine_code(SOURCE, options(few.constants(facts)), "90a", compiler)


@pytest.mark.compiled
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_gate_compiles(kernel: WarpgroupKernel, compiler: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    """SILU for all pairs, and the others for few. There are registers enough that no product waits for another."""
    assert SILU in GATES
    for gate in GATES:
        size = kernel if gate == SILU else WarpgroupKernel((64,), takes_jobs=True)
        facts = ProductFacts("Q4_K", 128, 512, 256, gate, True, gate.weighted_input)
        assert NAME.encode() in machine_code(SOURCE, options(size.constants(facts)), "90a", compiler)
    assert not caplog.records


@pytest.mark.compiled
def test_products_that_wait_are_noticed(compiler: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    """Seven widths need more registers than there are."""
    widths = 64, 128, 192, 240, 256, 272, 288
    known = WarpgroupKernel(widths, takes_jobs=True).constants(ProductFacts("Q8_0", 8, 256, 256, None))
    machine_code(SOURCE, options(known), "90a", compiler)
    (record,) = caplog.records
    assert record.getMessage().startswith("expert_warpgroups.cu is slower than it could be: ")


@pytest.mark.parametrize("quant", QUANTS)
def test_shared_memory_suffices(quant: str) -> None:
    """On Hopper, a program has up to 227 KiB, with what the source declares."""
    for kernel in KERNELS:
        for gate in (SILU, None):
            slots, needed = kernel.shared_bytes(ProductFacts(quant, 1024, 256, 256, gate))
            assert slots >= 3 and needed + (12 << 10) <= 227 << 10
    with pytest.raises(ValueError, match=r"^100000 experts of .* need more than 232448 bytes at once$"):
        WIDE.shared_bytes(ProductFacts(quant, 100_000, 256, 256, None))


@pytest.mark.parametrize(("tokens", "kernel"), [(99, NARROW), (100, WIDE)])
def test_the_wide_kernel_multiplies_100_pairs_of_an_expert(
    tokens: int, kernel: WarpgroupKernel, random_weights: Callable[..., Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And more, on average. Both products are by the same kernel."""
    pool = make_pool(random_weights, "Q8_0", 2, 256, 256)
    ids, weights = route(tokens, 2, 2)
    chosen: list[WarpgroupKernel] = []
    monkeypatch.setattr(expert_warpgroups, "_launch", lambda kernel, *_, **__: chosen.append(kernel))
    x = torch.zeros(tokens, 256).bfloat16()
    by_kernel(expert_warpgroups.experts, pool.pairs(ids), pool.offsets, x, weights, SILU)
    assert chosen == [kernel, kernel]


@pytest.mark.compiled
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    blocks = ["_count_blocks", "_add_blocks", "_place_pairs"]
    assert compiled_for_h200("warpgroups", tmp_path) == ["_sort_kernel", "_order_words", *blocks, "_order_words"]

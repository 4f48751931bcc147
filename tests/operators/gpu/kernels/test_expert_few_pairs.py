"""Products of few pairs: the kernels (interpreted) have the bits of those of expert_int8.py with the same tiles."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_few_pairs, expert_int8
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs
from ktqueue.operators.gpu.kernels.expert_tiles import DotTile, DotTiles
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import GateFacts
from ktqueue.operators.packed import Bytes

from ..interpreted import by_kernel, compiled_for_h200
from .matrices import BLOCKS, columns_of
from .panel_pools import GATES, Pool, make_pool, route

TILES_OF_INT8 = DotTiles(1, DotTile(16, 32), DotTile(8, 32))


def assert_same(pool: Pool, ids: torch.Tensor, weights: torch.Tensor, gate: GateFacts = native.SILU) -> None:
    """Each launch has the bits of expert_int8's, with a sum of the token's pairs and without it."""
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    assert_same_down(pool, ids, assert_same_gate_up(pool, ids, gate, of_input), of_output)


def assert_same_gate_up(pool: Pool, ids: torch.Tensor, gate: GateFacts, weights: torch.Tensor | None) -> Int8Rows:
    """Gate and up have the bits of expert_int8's, which are returned."""
    pairs = pool.pairs(ids)
    x = Int8Rows.quantise(torch.randn(len(ids), pool.record.hidden, generator=torch.Generator().manual_seed(1)))
    found = by_kernel(expert_few_pairs.gate_up, pairs, x, gate, weights)
    expected = by_kernel(expert_int8.gate_up, pairs, None, x, gate, weights, tiles=TILES_OF_INT8)
    computed = computed_pairs(pool, ids)
    assert computed.any()
    for part in ("codes", "scales", "sums"):
        assert torch.equal(getattr(found, part)[computed], getattr(expected, part)[computed])
    return expected


def assert_same_down(pool: Pool, ids: torch.Tensor, mid: Int8Rows, weights: torch.Tensor | None) -> None:
    """Down has the bits of expert_int8's, with a sum of the token's pairs and without it."""
    pairs, hidden = pool.pairs(ids), pool.record.hidden
    partials = by_kernel(expert_few_pairs.down, pairs, mid, weights)
    assert torch.equal(partials, by_kernel(expert_int8.down, pairs, None, mid, weights, tiles=TILES_OF_INT8))
    assert partials.flatten(0, 1)[~computed_pairs(pool, ids)].eq(0).all()
    before = torch.randn(len(ids), hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, theirs = before.clone(), before.clone()
    counters = torch.zeros(expert_int8.down_counters(len(ids), hidden), dtype=torch.int32)
    by_kernel(expert_few_pairs.down, pairs, mid, weights, added_to=ours, counters=counters)
    added = {"added_to": theirs, "counters": counters}
    by_kernel(expert_int8.down, pairs, None, mid, weights, tiles=TILES_OF_INT8, **added)
    assert not counters.any()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, before)


def computed_pairs(pool: Pool, ids: torch.Tensor) -> torch.Tensor:
    """Whether a pair has an expert that is on the GPU: [tokens * k] bool."""
    return ((ids >= 0) & (pool.offsets[ids.clamp(min=0)] >= 0)).flatten()


def of_int8(kernel: Callable[..., Any], pairs: ExpertPairs, *rest: Any) -> Any:
    """A kernel of expert_int8.py, whose pairs have their own programs."""
    return kernel(pairs, None, *rest)


@pytest.mark.parametrize("quant", BLOCKS)
def test_each_format(quant: str, random_weights: Callable[..., Bytes]) -> None:
    """The last superblock is not whole, and a tile has more slabs than the matrices. Down has always the same."""
    pool = make_pool(random_weights, (quant, quant, "Q4_0"), 2, columns_of(quant), 32)
    ids, weights = route(1, 2, 1)
    mid = assert_same_gate_up(pool, ids, native.SILU, None)
    if quant == "Q4_0":
        assert_same_down(pool, ids, mid, weights)


def test_more_slabs_than_are_requested_at_once(random_weights: Callable[..., Bytes]) -> None:
    """Of gate and up, then of down. Some pairs have no expert, or one that is not on the GPU."""
    ids, weights = torch.tensor([[0, 1, -1]]), torch.rand(1, 3)
    quants = "Q4_0", "Q8_0", "Q5_1"
    of_gate_up, of_down = (make_pool(random_weights, quants, 2, *s) for s in ((2048 + 64, 32), (64, 768 + 64)))
    of_gate_up.offsets[1] = of_down.offsets[1] = -1
    assert_same_gate_up(of_gate_up, ids, native.SILU, None)
    mid = Int8Rows.quantise(torch.randn(3, of_down.record.intermediate, generator=torch.Generator().manual_seed(1)))
    assert_same_down(of_down, ids, mid, weights)


def test_several_tokens(random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, ("Q4_0", "Q4_0", "Q6_K"), 3, 64, 256)
    assert_same(pool, *route(3, 3, 2))


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_each_activation(gate: GateFacts, random_weights: Callable[..., Bytes]) -> None:
    pool = make_pool(random_weights, ("MXFP4", "MXFP4", "Q4_0"), 2, 32, 32, biased=True)
    assert_same(pool, *route(1, 2, 2), gate)


def test_records_that_lie_side_by_side_are_found_without_a_table(random_weights: Callable[..., Bytes]) -> None:
    """Both pairs of kernels compute the same, though the table is wrong. Pairs without an expert are skipped."""
    pool = make_pool(random_weights, ("Q4_0", "Q8_0", "Q5_1"), 3, 96, 64)
    first = 256
    pairs = pool.pairs(torch.tensor([[2, -1, 1]]))
    behind = torch.cat([torch.zeros(first, dtype=torch.uint8), pool.bytes])
    even = pairs._replace(pool=behind, offsets=torch.zeros_like(pool.offsets), first=first)
    x = Int8Rows.quantise(torch.randn(1, 96, generator=torch.Generator().manual_seed(1)))
    for gate_up, down in (
        (expert_few_pairs.gate_up, expert_few_pairs.down),
        (partial(of_int8, expert_int8.gate_up), partial(of_int8, expert_int8.down)),
    ):
        expected, found = (by_kernel(gate_up, one, x, native.SILU, None) for one in (pairs, even))
        for part in ("codes", "scales", "sums"):
            assert torch.equal(getattr(found, part)[[0, 2]], getattr(expected, part)[[0, 2]])
        partials = [by_kernel(down, one, expected, torch.rand(1, 3).fill_(0.5)) for one in (pairs, even)]
        assert torch.equal(*partials) and partials[0][0, 1].eq(0).all() and partials[0][0, 0].any()


def test_few_pairs_take_them(random_weights: Callable[..., Bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up of one token, and down of several."""
    pool = make_pool(random_weights, ("Q4_0", "Q4_0", "Q8_0"), 32, 32, 32)
    launched: dict[str, list[int]] = {"gate_up": [], "down": []}

    def noting(name: str) -> Callable[..., Any]:
        kernel = getattr(expert_few_pairs, name)

        def noted(pairs: ExpertPairs, *rest: Any, **named: Any) -> Any:
            launched[name].append(pairs.ids.numel())
            return kernel(pairs, *rest, **named)

        return noted

    for name in launched:
        monkeypatch.setattr(expert_few_pairs, name, noting(name))
    for tokens, slots in ((1, 2), (1, 11), (1, 12), (2, 2), (4, 8), (3, 11)):
        ids, weights = route(tokens, 32, slots)
        by_kernel(
            products.experts, pool.pairs(ids), pool.offsets, torch.randn(tokens, 32).bfloat16(), weights, native.SILU
        )
    assert launched == {"gate_up": [2, 11], "down": [2, 11, 12, 4, 32]}


@pytest.mark.parametrize(
    ("quants", "fits"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), True),
        (("MXFP4", "MXFP4", "Q8_0"), True),
        (("Q4_K", "Q4_K", "Q5_K"), True),
        (("NVFP4", "NVFP4", "NVFP4"), False),
        (("Q6_K", "Q6_K", "Q6_K"), False),
        (("Q4_K", "IQ2_XXS", "Q4_K"), False),  # has the panels of IQ2_S
    ],
)
def test_formats_that_need_too_many_registers(quants: tuple[str, str, str], fits: bool) -> None:
    assert expert_few_pairs.fits(ExpertRecord(*quants, 2048, 768)) == fits


@pytest.mark.compiled
def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    """In every format, with the wait for the kernel before."""
    names = ["_gate_up_of_pair+waits", "_down_of_pair+waits"]
    assert compiled_for_h200("few pairs", tmp_path) == names * -(-len(BLOCKS) // 3)

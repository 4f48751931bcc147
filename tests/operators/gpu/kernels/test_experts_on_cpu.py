"""The kernel of int8 matrices, run on the CPU: it gives what decoded weights give. tests/gpu does so on a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import expert_matrices
from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_matrices import ProductFacts, constants
from ktqueue.operators.gpu.kernels.expert_pairs import SortedPairs
from ktqueue.operators.gpu.kernels.expert_tiles import MatrixTile
from ktqueue.operators.native import SILU
from ktqueue.operators.packed import Bytes

from ..on_cpu.emulated import EmulatedKernel
from .panel_pools import CLAMPED, WEIGHTED, make_pool, route

EXPERTS, SLOTS = 6, 3
pytestmark = pytest.mark.compiled


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launches of the kernel run it on the CPU, as on a GPU with a program on each multiprocessor."""

    class Launched:
        def __init__(self, facts: ProductFacts, tile: MatrixTile) -> None:
            folder = tmp_path / facts.quant / ("down" if facts.gate is None else "gate_up")
            folder.mkdir(parents=True)
            self._threads, known = 32 * tile.warps, constants(facts, tile)
            self._kernel = EmulatedKernel(expert_matrices.SOURCE, known, expert_matrices.NAME, folder)

        def launch(self, grid: tuple[int, int], arguments: list[torch.Tensor | int], *, early: bool) -> None:
            self._kernel.launch(grid, arguments, threads=self._threads)

    monkeypatch.setattr(expert_matrices, "_kernel", lambda facts, tile: (Launched(facts, tile), 1))


@pytest.mark.parametrize(
    ("quants", "hidden", "intermediate", "gate", "tokens", "tile", "further"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 512, 256, SILU, 13, MatrixTile(8, warps=4), 1),
        (("Q4_K", "Q4_K", "Q6_K"), 512, 256, SILU, 40, MatrixTile(24, warps=4, stages=3), -2),
        (("Q8_0", "Q8_0", "Q5_1"), 288, 96, CLAMPED, 7, MatrixTile(8, warps=2, has_runs=False), 0),
        (("MXFP4", "MXFP4", "Q2_K"), 288, 256, WEIGHTED, 13, MatrixTile(16, warps=2), 0),
        (("Q4_0", "Q4_0", "IQ3_S"), 320, 256, SILU, 5, MatrixTile(8, warps=4), 9),
    ],
)
def test_products(
    quants: tuple[str, str, str],
    hidden: int,
    intermediate: int,
    gate: native.GateFacts,
    tokens: int,
    tile: MatrixTile,
    further: int,
    random_weights: Callable[..., Bytes],
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a row's last superblock is short, an expert is absent, and an expert has more pairs than a tile.
    further: programs beyond the number of lists."""
    pool = make_pool(random_weights, quants, EXPERTS, hidden, intermediate, biased=True, gate=gate)
    offsets = pool.offsets.clone()
    offsets[1] = -1
    x, (ids, weights) = torch.randn(tokens, hidden), route(tokens, EXPERTS, SLOTS, tokens)
    ids[-1, 0] = -1
    pairs, rows = pool.pairs(ids, offsets), Int8Rows.quantise(x)
    lists = SortedPairs.of(ids, offsets)
    known = SimpleNamespace(multi_processor_count=further + int((lists.counts / tile.pairs).ceil().sum()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    mid = expert_matrices.gate_up(pairs, lists, rows, gate, of_input, tile)
    got = expert_matrices.down(pairs, lists, mid, of_output, tile)
    computed = ((ids >= 0) & (offsets[ids.clamp(min=0)] >= 0)).flatten()
    exact, partials = torch.zeros(*ids.shape, intermediate), torch.empty(*ids.shape, hidden)
    products.gate_up_twin(pairs, rows.floats(), gate, exact, of_input)
    wanted = Int8Rows.quantise(exact.view(-1, intermediate))
    torch.testing.assert_close(
        mid.scales[computed], wanted.scales[computed], rtol=1e-4, atol=1e-6 * float(wanted.scales[computed].max())
    )
    assert (mid.codes.int() - wanted.codes.int())[computed].abs().max() <= 1
    assert (mid.codes != wanted.codes)[computed].float().mean() < 1e-2
    mid = Int8Rows(*(part[computed] for part in (mid.codes, mid.scales, mid.sums)))
    between = torch.zeros(ids.numel(), intermediate)
    between[computed] = mid.floats()
    products.down_twin(pairs, between, of_output, partials)
    assert (got - partials).norm() <= 2e-6 * partials.norm()
    assert got.flatten(0, 1)[~computed].eq(0).all()

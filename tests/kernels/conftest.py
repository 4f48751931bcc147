"""Random packed weights for expert layers, their decoded values, and the threads of the kernels."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from kernel_types import Exact, MakeWeights, RandomWeights, RunLayer
from stored_blocks import values_of

from ktqueue.operators import native
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts


@pytest.fixture(autouse=True)
def tiles_where_they_are_faster(batch_invariant_kernels: None) -> None:
    """Use AMX tiles, as a process does before a worker asks for batch invariance."""
    native.set_batch_invariant(False)


@pytest.fixture
def batch_invariant(tiles_where_they_are_faster: None) -> Iterator[None]:
    """A token gets the same bits in every batch."""
    native.set_batch_invariant(True)
    yield
    native.set_batch_invariant(False)


@pytest.fixture
def make_weights(random_weights: RandomWeights) -> MakeWeights:
    """make_weights(quant, experts, hidden, intermediate, seed=0, biased=False). quant: a format, or three for gate, up
    and down."""

    def make(
        quant: str | Sequence[str], experts: int, hidden: int, intermediate: int, seed: int = 0, biased: bool = False
    ) -> ExpertWeights:
        seeds = itertools.count(1000 * seed)
        gate, up, down = (quant,) * 3 if isinstance(quant, str) else quant

        def matrices(kind: str, rows: int, columns: int) -> PackedExperts:
            data = [random_weights(kind, rows * columns, next(seeds)) for _ in range(experts)]
            biases = np.random.default_rng(next(seeds)).normal(size=(experts, rows)).astype(np.float32)
            return PackedExperts(kind, rows, columns, data, biases if biased else None)

        return ExpertWeights(
            matrices(gate, intermediate, hidden),
            matrices(up, intermediate, hidden),
            matrices(down, hidden, intermediate),
        )

    return make


@functools.lru_cache(64)
def _decoded(quant: str, stored: bytes) -> torch.Tensor:
    """Decode weights once for all the steps of a test: this takes longer than the kernels and their twin."""
    return torch.from_numpy(values_of(quant, np.frombuffer(stored, np.uint8)).astype(np.float64))


@pytest.fixture
def exact() -> Exact:
    """The values of packed weights, decoded by others, in float64."""

    def dequantize(quant: str, data: Bytes, count: int) -> torch.Tensor:
        values = _decoded(quant, data.tobytes())
        assert len(values) == count
        return values

    return dequantize


@pytest.fixture
def run_layer() -> RunLayer:
    """run_layer(layer, x, ids, weights) -> [tokens, hidden]."""

    def run(layer: native.ExpertLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        layer.forward(x.numpy(), ids.numpy(), weights.numpy(), out.numpy())
        return out

    return run


@pytest.fixture(
    params=[
        pytest.param(isa, marks=[] if isa in native.isas() else pytest.mark.skip(reason=f"this CPU has no {isa}"))
        for isa in native.ISAS
    ]
)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set in turn. Skips those that this CPU lacks."""
    return str(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads in the kernels' pool on any machine; one thread afterwards."""
    native.set_threads(2, torch_threads=1)
    yield
    native.set_threads(1)

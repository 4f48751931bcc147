"""Random packed weights of every format, and layers made of them."""

from collections.abc import Callable, Iterator

import gguf
import numpy as np
import pytest
import torch

from ktqueue.operators import native
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

HALF_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # offsets in a block
SCALE = {"Q4_0": 0.02, "Q8_0": 0.001, "Q4_K": 0.0005, "Q5_K": 0.0003, "Q6_K": 0.00003}  # weights of about 0.1


def _pack(quant: str, count: int, random: np.random.Generator) -> Bytes:
    if quant == "F32":
        return random.normal(scale=0.1, size=count).astype("<f4").view(np.uint8)
    if quant == "F16":
        return random.normal(scale=0.1, size=count).astype("<f2").view(np.uint8)
    if quant == "BF16":
        return (random.normal(scale=0.1, size=count).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    blocks = random.integers(0, 256, (count // weights, size), dtype=np.uint8)
    for offset in HALF_SCALES[quant]:
        scales = (random.uniform(0.5, 2.0, len(blocks)) * SCALE[quant]).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


@pytest.fixture
def pack() -> Callable[..., Bytes]:
    """pack(quant, count, seed=0): random weights in that format; every bit pattern of the quants comes up."""
    return lambda quant, count, seed=0: _pack(quant, count, np.random.default_rng(seed))


@pytest.fixture
def make_weights() -> Callable[..., ExpertWeights]:
    """make_weights(quant, experts, hidden, intermediate, seed=0); `quant` may be a triple for gate, up, down."""

    def make(quant, experts: int, hidden: int, intermediate: int, seed: int = 0) -> ExpertWeights:
        random = np.random.default_rng(seed)
        gate, up, down = (quant,) * 3 if isinstance(quant, str) else quant

        def matrices(kind: str, rows: int, columns: int) -> PackedExperts:
            return PackedExperts(kind, rows, columns, [_pack(kind, rows * columns, random) for _ in range(experts)])

        return ExpertWeights(
            matrices(gate, intermediate, hidden),
            matrices(up, intermediate, hidden),
            matrices(down, hidden, intermediate),
        )

    return make


@pytest.fixture
def exact() -> Callable[[str, Bytes, int], torch.Tensor]:
    """gguf's own decoding, in float64: what the weights mean."""

    def dequantize(quant: str, data: Bytes, count: int) -> torch.Tensor:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).reshape(-1)
        assert len(values) == count
        return torch.from_numpy(values.astype(np.float64))

    return dequantize


@pytest.fixture
def run_layer() -> Callable[..., torch.Tensor]:
    """run_layer(layer, x, ids, weights) -> [tokens, hidden]."""

    def run(layer: native.ExpertLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, torch.nan)
        layer.forward(x.numpy(), ids.numpy(), weights.numpy(), out.numpy())
        return out

    return run


@pytest.fixture(params=["scalar", "avx2"])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this machine has."""
    if request.param == "avx2" and native.isa() != "avx2":
        pytest.skip("this CPU has no AVX2, or KTQUEUE_ISA forbids it")
    return str(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads in the kernels' pool whatever the machine; back to one afterwards."""
    native.set_threads(2, torch_threads=1)
    yield
    native.set_threads(1)

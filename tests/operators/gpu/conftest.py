"""GpuDecoder with a model's own weights, on each device; steps of any shape over a random cache and what the reference
attends for them; inputs of the fused operators; an interpreter of kernels that rounds as a GPU does."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.operators import native, reference
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.dense import DEFAULT_DENSE
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


@pytest.fixture(scope="module", autouse=True)
def shared_cpus() -> None:
    """torch and the kernels on CPUs of their own, as in a worker: else their threads wait for each other."""
    native.set_threads()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test on each device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


@pytest.fixture
def make_decoder(given_weights: Callable[..., Any], device: str) -> Iterator[Callable[..., GpuDecoder]]:
    """make_decoder(model, quant, activations=..., dense=..., **GpuSettings fields) -> the prepared operator.

    Steps are of at most 128 tokens; nothing streams unless that is asked for.
    """
    made: list[GpuDecoder] = []

    def make(
        model: Any,
        quant: str = "F32",
        *,
        activations: str = "float32",
        dense: str = DEFAULT_DENSE,
        **settings: Any,
    ) -> GpuDecoder:
        decoder = GpuDecoder.from_module(model, activations=activations, dense=dense)
        made.append(decoder)
        decoder.device = device
        weights = given_weights(model, quant)
        decoder.load(weights)
        assert weights.left <= {"lm_head.weight"}  # tied
        decoder.prepare_device(GpuSettings(**{"max_tokens": 128, "expert_streaming": "off", **settings}))
        return decoder

    yield make
    for one in made:
        one.close()


def random_cache(
    *, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, pages: int = 24, device: str = "cpu"
) -> KVCache:
    """Two layers of noise, the same numbers for each type up to rounding."""
    layout = KVLayout(layers=2, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    kv = KVCache(layout, pages, device)
    noise = torch.Generator().manual_seed(7)
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=noise).to(dtype))
    return kv


def make_step(kv: KVCache, chunks: list[int], contexts: list[int]) -> StepContext:
    """Rows of `chunks` tokens that see `contexts` keys, their pages drawn at random; the slots are not made."""
    size = kv.layout.page_size
    counts = [-(-context // size) for context in contexts]
    drawn = torch.randperm(kv.pages, generator=torch.Generator().manual_seed(len(chunks)))
    table = torch.zeros(len(chunks), max(counts) + 1, dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = drawn[used : used + count]
        used += count
    assert used <= kv.pages
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.zeros(sum(chunks), dtype=torch.int64)
    return StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, slots, kv)


def random_query(step: StepContext, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, head_dim] of noise."""
    shape = (len(step.slot_mapping), heads, step.kv.layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def expected(step: StepContext, query: torch.Tensor, layer: int, scaling: float, window: int) -> torch.Tensor:
    """What the reference attends, in float32."""
    return reference.paged_attention(
        query.float().transpose(0, 1),
        step.kv.keys[layer],
        step.kv.values[layer],
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=scaling,
        sliding_window=window or None,
    )


@pytest.fixture
def steps() -> type:
    """The functions above, by name."""

    class Steps:
        cache: Callable[..., KVCache] = staticmethod(random_cache)
        make: Callable[..., StepContext] = staticmethod(make_step)
        query: Callable[..., torch.Tensor] = staticmethod(random_query)
        expected: Callable[..., torch.Tensor] = staticmethod(expected)

    return Steps


TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of `data` (numpy, of the triton type `source`) as the type `target`: to the nearest, ties to even. What does
    not fit float8_e4m3fn is NaN, whether or not torch saturates: kernels must do so themselves."""
    bits = torch.from_numpy(np.ascontiguousarray(data).view(UNSIGNED[data.dtype.itemsize]))
    numbers = bits.view(TORCH_TYPES[source.name])
    result = numbers.to(TORCH_TYPES[target.name])
    if result.dtype == torch.float8_e4m3fn:
        result = numbers.float().where(numbers.float().abs() <= 448, float("nan")).to(result.dtype)
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[result.element_size()]
    return result.view(unsigned).numpy().reshape(data.shape)


@pytest.fixture(autouse=True)
def _interpreter_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter cuts bf16 off and loses a carry in fp8; a GPU does not, so neither do the tests. Nor does a
    GPU warn of what gives NaN."""
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", _rounded)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _interpreter_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bf16 as integers, and bounds of ranges are arrays of one element, of
    which numpy 2.4 makes no index any more."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    dot, patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def exact_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        operands = (
            interpreter.TensorHandle((one.data.astype(np.uint32) << 16).view(np.float32), language.float32)
            if one.dtype.scalar == language.bfloat16
            else one
            for one in (a, b)
        )
        return dot(self, *operands, *rest)

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


def qkv_case(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tokens: int = 3,
    norm: str = "head",
    clip: float = 0.0,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> dict[str, Any]:
    """Arguments of qk_norm_rope_append. norm: "head", "whole" or ""; scale of the values: some pass 448 in fp8."""
    random = torch.Generator().manual_seed(tokens * head_dim)
    page_size, pages, positions = 4, 2 + tokens // 4, 64

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * scale).to(dtype)

    weights = {"head": (head_dim, head_dim), "whole": (heads * head_dim, kv_heads * head_dim)}.get(norm)
    angles = torch.rand(positions, head_dim // 2, generator=random) * 6
    shape = (pages, page_size, kv_heads, head_dim)
    return {
        "qkv": normal(tokens, (heads + 2 * kv_heads) * head_dim, scale=300.0),
        "heads": heads,
        "kv_heads": kv_heads,
        "q_norm": normal(weights[0]) if weights else None,
        "k_norm": normal(weights[1], scale=300.0) if weights else None,
        "epsilon": 1e-6,
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "positions": torch.randint(positions, (tokens,), generator=random),
        "slot_mapping": torch.randperm(pages * page_size, generator=random)[:tokens],
        "keys": torch.zeros(shape).to(cache or dtype),
        "values": torch.zeros(shape).to(cache or dtype),
        "clip": clip,
    }


@pytest.fixture
def qkv() -> Callable[..., dict[str, Any]]:
    """qkv(**sizes) -> arguments of qk_norm_rope_append: see qkv_case."""
    return qkv_case

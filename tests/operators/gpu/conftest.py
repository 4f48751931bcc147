"""GpuDecoder with a model's own weights, on each device; arguments of qk_norm_rope_append; a Triton interpreter that
rounds as a GPU does."""

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.dense import DEFAULT_DENSE
from ktqueue.operators.gpu.kernels import decoded_experts, panel_layout
from ktqueue.operators.gpu.settings import GpuSettings, Trials

from .faster_interpreter import speed_up
from .ptx import run_instructions


@pytest.fixture(scope="session")
def compiler() -> ctypes.CDLL:
    """NVRTC, from where `make compiled` puts it."""
    (folder,) = Path(sys.prefix, "nvrtc").glob("nvidia/*/lib")
    (parts,), (library,) = folder.glob("libnvrtc-builtins.so.*"), folder.glob("libnvrtc.so.*")
    ctypes.CDLL(str(parts), mode=ctypes.RTLD_GLOBAL)  # the other one does not look beside itself in every release
    return ctypes.CDLL(str(library))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test on each device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


@pytest.fixture
def decoded_pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives the tokens of each product with experts that were decoded before."""
    tokens: list[int] = []
    compute = decoded_experts.experts

    def noted(pairs: Any, *rest: Any) -> torch.Tensor:
        tokens.append(len(pairs.ids))
        return compute(pairs, *rest)

    monkeypatch.setattr(decoded_experts, "experts", noted)
    return tokens


@pytest.fixture
def make_decoder(given_weights: Callable[..., Any], device: str) -> Iterator[Callable[..., GpuDecoder]]:
    """make_decoder(model, quant, activations=, dense=, trials=, **GpuSettings fields) -> the prepared operator.

    Steps are of at most 128 tokens; nothing streams unless that is asked for.
    """
    made: list[GpuDecoder] = []

    def make(
        model: Any,
        quant: str = "F32",
        *,
        activations: str = "float32",
        dense: str = DEFAULT_DENSE,
        trials: Trials | None = None,
        **settings: Any,
    ) -> GpuDecoder:
        decoder = GpuDecoder.from_module(model, activations=activations, dense=dense)
        decoder.trials = trials or Trials()
        made.append(decoder)
        decoder.device = device
        weights = given_weights(model, quant)
        decoder.load(weights)
        assert weights.left <= {"lm_head.weight"}  # tied
        decoder.prepare_device(GpuSettings(**{"max_tokens": 128, "expert_streaming": "off", **settings}))
        return decoder

    yield make
    for decoder in made:
        decoder.close()


TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert `data` (numpy, of the triton type `source`) to the type `target`: to the nearest, ties to even.

    Numbers too large for float8_e4m3fn become NaN even if torch saturates them: kernels must saturate themselves.
    """
    bits = torch.from_numpy(np.ascontiguousarray(data).view(UNSIGNED[data.dtype.itemsize]))
    numbers = bits.view(TORCH_TYPES[source.name])
    result = numbers.to(TORCH_TYPES[target.name])
    if result.dtype == torch.float8_e4m3fn:
        result = numbers.float().where(numbers.float().abs() <= 448, float("nan")).to(result.dtype)
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[result.element_size()]
    return result.view(unsigned).numpy().reshape(data.shape)


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """Let numpy compute NaN without a warning, as a GPU does."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _decoded_panels() -> Iterator[None]:
    """Decode equal panels once: twins decode experts again in each step."""
    decode = panel_layout.dequantize

    @functools.lru_cache(500)
    def decoded(stored: bytes, shape: torch.Size, quant: str, columns: int) -> torch.Tensor:
        return decode(torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(shape), quant, columns)

    def decode_once(panels: torch.Tensor, quant: str, columns: int) -> torch.Tensor:
        if panels.is_cuda or not 0 < panels.numel() < 1 << 17:
            return decode(panels, quant, columns)
        return decoded(panels.numpy().tobytes(), panels.shape, quant, columns)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(panel_layout, "dequantize", decode_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    """Make Triton's interpreter compute what a GPU does, and mend what makes it fail or slow.

    It truncates bf16, loses a carry in fp8, and multiplies the bits of bf16 as integers. Its bounds of ranges are
    arrays of one element, which numpy 2.4 no longer accepts as an index. It replaces the functions of the language
    again for each call of a device function, which took half of a kernel's time: here they are replaced once.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    dot = interpreter.InterpreterBuilder.create_dot

    def exact_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        operands = (
            interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), language.float32)
            if operand.dtype.scalar == language.bfloat16
            else operand
            for operand in (a, b)
        )
        return dot(self, *operands, *rest)

    def device_function() -> None:
        """Its globals name both modules of the language, as the interpreter looks them up."""

    with pytest.MonkeyPatch.context() as patched:
        speed_up(patched, interpreter, language)
        run_instructions(patched, interpreter, language)
        patched.setattr(interpreter, "_convert_float", _rounded)
        patched.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)
        functions = {"tl": language, "core": language.core}
        replaced = interpreter._patch_lang(FunctionType(device_function.__code__, functions))
        replaced.set_attr(language.core.tensor, "__index__", lambda self: int(self.handle.data.item()))
        patched.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        yield
        replaced.restore()


def qkv_case(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tokens: int = 3,
    norm: str = "head",
    rotary: int | None = None,
    clip: float = 0.0,
    norm_after_rotary: bool = False,
    values: bool = True,
    float_norms: bool = False,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> dict[str, Any]:
    """Arguments of qk_norm_rope_append. norm: "head", "whole" or ""; rotary: columns of a head that are rotated, by
    default all; not values: they are made of the keys, and the tables have further columns. Some values are above 448,
    the most of fp8."""
    random = torch.Generator().manual_seed(tokens * head_dim)
    page_size, pages, positions = 4, 2 + tokens // 4, 64

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * scale).to(dtype)

    weights = {"head": (head_dim, head_dim), "whole": (heads * head_dim, kv_heads * head_dim)}.get(norm)
    pairs = (head_dim if rotary is None else rotary) // 2
    angles = torch.rand(positions, pairs + (0 if values else 3), generator=random) * 6
    shape = (pages, page_size, kv_heads, head_dim)
    return {
        "qkv": normal(tokens, (heads + (1 + values) * kv_heads) * head_dim, scale=300.0),
        "heads": heads,
        "kv_heads": kv_heads,
        "q_norm": normal(weights[0]).to(torch.float32 if float_norms else dtype) if weights else None,
        "k_norm": normal(weights[1], scale=300.0).to(torch.float32 if float_norms else dtype) if weights else None,
        "epsilon": 1e-6,
        "v_norm": None if values else normal(head_dim, scale=300.0),
        "cosine": angles.cos()[:, :pairs],
        "sine": angles.sin()[:, :pairs],
        "positions": torch.randint(positions, (tokens,), generator=random),
        "slot_mapping": torch.randperm(pages * page_size, generator=random)[:tokens],
        "keys": torch.zeros(shape).to(cache or dtype),
        "values": torch.zeros(shape).to(cache or dtype),
        "clip": clip,
        "norm_after_rotary": norm_after_rotary,
    }


@pytest.fixture
def qkv() -> Callable[..., dict[str, Any]]:
    """qkv(**sizes) -> arguments of qk_norm_rope_append: see qkv_case."""
    return qkv_case

"""Random matrices in each layout of quantised folders, with the values that the layouts' own programs give them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The numbers of float4_e2m1 by their codes."""


@dataclass(frozen=True)
class Scheme:
    """A layout: what config.json says of it, and a function of rows, columns and a generator that makes a matrix.

    quant: the format in which experts are read. make: returns the tensors by their last name, and the values.
    """

    config: dict[str, Any]
    quant: str
    make: Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]
    ignored: tuple[str, ...] = field(default=("lm_head",))


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned codes [rows, columns] as int32 [rows, words], the first code in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    shifted = padded.view(len(codes), -1, per_word) << (torch.arange(per_word) * bits)
    return (shifted.sum(-1) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def _scales(*shape: int, noise: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(shape, generator=noise) * 0.02 + 0.01).to(dtype)


def _spread(scales: torch.Tensor, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return by_row.repeat_interleave(block[1], 1)[:, :columns]


def fp8(
    name: str, shape: str, dtype: torch.dtype = torch.float32
) -> Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]:
    """Matrices in float8_e4m3fn with scales called `name`; `shape`: number, rows or blocks (of 128 x 128)."""

    def make(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        weight = (torch.randn(rows, columns, generator=noise) * 8).to(torch.float8_e4m3fn)
        block = {"number": (rows, columns), "rows": (1, columns), "blocks": (128, 128)}[shape]
        scales = _scales(-(-rows // block[0]), -(-columns // block[1]), noise=noise, dtype=dtype)
        stored = scales.reshape(()) if shape == "number" else scales
        return {"weight": weight, name: stored}, weight.float() * _spread(scales, rows, columns, block)

    return make


def int8(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Matrices of signed bytes, with a scale for each row."""
    weight = torch.randint(-128, 128, (rows, columns), generator=noise, dtype=torch.int8)
    scales = _scales(rows, 1, noise=noise, dtype=torch.bfloat16) / 16
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales.float()


def packed(
    bits: int, group: int, *, zeros: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]:
    """compressed-tensors' pack-quantized."""

    def make(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 1 << bits, (rows, columns), generator=noise)
        scales = _scales(rows, columns // group, noise=noise, dtype=dtype) * 8 / (1 << bits)
        shape = torch.tensor([rows, columns])
        parts = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": shape}
        zero = torch.full(scales.shape, 1 << bits - 1)
        if zeros:
            zero = torch.randint(0, 1 << bits, scales.shape, generator=noise)
            parts["weight_zero_point"] = words(zero.T, bits).T.contiguous()
        of_columns = [values.repeat_interleave(group, 1) for values in (scales.float(), zero.float())]
        return parts, (codes - of_columns[1]) * of_columns[0]

    return make


def gptq(
    bits: int, group: int, *, sym: bool, stored_less: int = 1
) -> Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]:
    """GPTQ. Zero points are stored less `stored_less`."""

    def make(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 1 << bits, (columns, rows), generator=noise)
        scales = _scales(columns // group, rows, noise=noise, dtype=torch.float16) * 8 / (1 << bits)
        least = stored_less if bits == 4 else 128
        zero = torch.randint(least, (1 << bits) - 1 + stored_less, scales.shape, generator=noise)
        if sym:
            zero = torch.full(scales.shape, 1 << bits - 1)
        order = torch.arange(columns, dtype=torch.int32) // group
        parts = {"qweight": words(codes.T, bits).T.contiguous(), "qzeros": words(zero - stored_less, bits)}
        values = scales.float()[order] * (codes - zero[order])
        return parts | {"scales": scales, "g_idx": order}, values.T.contiguous()

    return make


def awq(group: int) -> Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]:
    """AWQ, version gemm."""

    def in_order(codes: torch.Tensor) -> torch.Tensor:
        return codes.view(len(codes), -1, 8)[..., AWQ_ORDER].reshape(len(codes), -1)

    def make(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 16, (columns, rows), generator=noise)
        scales = _scales(columns // group, rows, noise=noise, dtype=torch.float16)
        zero = torch.randint(0, 16, scales.shape, generator=noise)
        parts = {"qweight": words(in_order(codes), 4), "qzeros": words(in_order(zero), 4), "scales": scales}
        order = torch.arange(columns) // group
        return parts, (scales.float()[order] * (codes - zero[order])).T.contiguous()

    return make


def nvfp4(*, modelopt: bool) -> Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]:
    """NVFP4: a scale for 16 columns, and one for the matrix, which compressed-tensors divides by."""
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")

    def make(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 16, (rows, columns), generator=noise, dtype=torch.uint8)
        scales = (torch.rand(rows, columns // 16, generator=noise) * 400).to(torch.float8_e4m3fn)
        # Each matrix has another one, and its quotients are not products with its reciprocal.
        whole = torch.rand((), generator=noise) * 3e-5 if modelopt else 33_333 * (1 + torch.rand(1, generator=noise))
        parts = {names[0]: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, names[1]: whole}
        factors = scales.float() * whole if modelopt else scales.float() / whole
        return parts, FLOAT4[codes.int()] * factors.repeat_interleave(16, 1)

    return make


def mxfp4(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors' MXFP4: an exponent for 32 columns."""
    codes = torch.randint(0, 16, (rows, columns), generator=noise, dtype=torch.uint8)
    exponents = torch.randint(118, 123, (rows, columns // 32), generator=noise, dtype=torch.uint8)
    values = FLOAT4[codes.int()] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": exponents}, values


def quark_mxfp4(rows: int, columns: int, noise: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Quark's MXFP4: the same parts by other names."""
    parts, values = mxfp4(rows, columns, noise)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, values


def compressed(layout: str, kind: str, bits: int, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
_FLOAT = compressed("float-quantized", "float", 8)
_QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
QUARK_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
SCHEMES = {
    "fp8 blocks": Scheme(_FP8, "FP8", fp8("weight_scale_inv", "blocks")),
    "fp8 blocks, bf16 scales": Scheme(_FP8, "FP8", fp8("weight_scale_inv", "blocks", torch.bfloat16)),
    "fp8 number": Scheme({"quant_method": "fp8"}, "FP8", fp8("weight_scale_inv", "number")),
    "modelopt fp8": Scheme({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8", fp8("weight_scale", "number")),
    "fbgemm": Scheme({"quant_method": "fbgemm_fp8"}, "FP8", fp8("weight_scale", "rows")),
    "compressed fp8": Scheme(_FLOAT, "FP8", fp8("weight_scale", "rows", torch.bfloat16)),
    "compressed fp8 blocks": Scheme(
        compressed("float-quantized", "float", 8, block_structure=[128, 128]), "FP8", fp8("weight_scale", "blocks")
    ),
    "compressed int8": Scheme(compressed("int-quantized", "int", 8), "Q8_0", int8),
    "compressed int4": Scheme(compressed("pack-quantized", "int", 4), "Q4_0", packed(4, 32)),
    "compressed int4 channels": Scheme(compressed("pack-quantized", "int", 4), "Q4_0", packed(4, 128)),
    "compressed int4 zeros": Scheme(compressed("pack-quantized", "int", 4), "UINT4", packed(4, 64, zeros=True)),
    "compressed int4 float16": Scheme(
        compressed("pack-quantized", "int", 4), "Q4_0", packed(4, 64, dtype=torch.float16)
    ),
    "compressed packed int8": Scheme(compressed("pack-quantized", "int", 8), "Q8_0", packed(8, 64)),
    "gptq": Scheme(_GPTQ, "Q4_0", gptq(4, 64, sym=True)),
    "gptq zeros": Scheme({**_GPTQ, "sym": False}, "UINT4", gptq(4, 64, sym=False)),
    "gptq v2": Scheme(
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, "UINT4", gptq(4, 64, sym=False, stored_less=0)
    ),
    "gptq int8": Scheme({**_GPTQ, "bits": 8}, "Q8_0", gptq(8, 64, sym=True)),
    "compressed nvfp4": Scheme(compressed("nvfp4-pack-quantized", "float", 4), "FP4", nvfp4(modelopt=False)),
    "compressed mxfp4": Scheme(compressed("mxfp4-pack-quantized", "float", 4), "MXFP4", mxfp4),
    "modelopt nvfp4": Scheme({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "FP4", nvfp4(modelopt=True)),
    "quark fp8": Scheme(
        {"quant_method": "quark", "global_quant_config": {"weight": _QUARK_FP8}}, "FP8", fp8("weight_scale", "number")
    ),
    "quark mxfp4": Scheme(
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK_MXFP4}, "layer_quant_config": {}},
        "MXFP4",
        quark_mxfp4,
    ),
    "auto-round": Scheme(_AUTO_ROUND, "Q4_0", gptq(4, 64, sym=True)),
    "auto-round awq": Scheme({**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, "UINT4", awq(32)),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "version": "gemm"}, "UINT4", awq(32)),
}
"""Each layout that is read, by a name of the tests'."""

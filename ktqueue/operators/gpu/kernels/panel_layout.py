"""Weights packed as the CPU's kernels read them: sizes of matrices and experts, and how the bytes are decoded.

csrc/formats/panel_layout.h describes the layout: *panels* of 16 rows, each a run of *superblocks* of up to eight
*slabs* of 32 columns. Plain torch decodes it here on any device: the twin of formats.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

PANEL_ROWS = 16
SLAB = 32
"""Columns of a slab."""
SLABS = 8
"""Slabs of a whole superblock."""
FLOATS = ("F32", "F16", "BF16")
"""Formats without codes: a panel is a plain run of slabs, with zeros in columns after the last of the matrix."""
FLOAT_PRODUCTS = (*FLOATS, "FP8")
"""Formats that are only multiplied by floats, since their codes are not whole numbers."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ3_XXS_VALUES = (-31, -26, -22, -18, -14, -10, -6, -2, 2, 6, 10, 14, 18, 22, 26, 31)
IQ2_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)

_SAME_PANELS = {"IQ2_XXS": "IQ2_S", "IQ2_XS": "IQ2_S", "IQ1_S": "IQ1_M", "FP4": "NVFP4"}
"""The format that stands for all which have the same panels, by format."""

# Bytes of the planes and scales of one slab, and of what is stored once per superblock.
_BYTES: dict[str, tuple[int, int]] = {
    "F32": (2048, 0),
    "F16": (1024, 0),
    "BF16": (1024, 0),
    "Q8_0": (512 + 32, 0),
    "Q4_0": (256 + 32, 0),
    "IQ4_NL": (256 + 32, 0),
    "MXFP4": (256 + 16, 0),
    "Q4_K": (256 + 32, 64),
    "Q5_K": (256 + 64 + 32, 64),
    "Q6_K": (256 + 128 + 32, 32),
    "IQ4_XS": (256 + 16, 32),
    "Q3_K": (128 + 64 + 32, 32),
    "Q2_K": (128 + 32, 64),
    "IQ3_XXS": (256 + 16, 32),
    "IQ3_S": (256 + 16, 32),
    "IQ2_S": (128 + 64 + 16, 32),
    "IQ1_M": (128 + 8 + 16, 32),
    "NVFP4": (256 + 32, 128),
    "Q4_1": (256 + 64, 0),
    "Q5_1": (256 + 64 + 64, 0),
    "UINT4": (256 + 32 + 16, 0),
    "FP8": (512 + 16, 0),
}


def panel_format(quant: str) -> str:
    """Return the format that kernels decode panels of `quant` as."""
    return _SAME_PANELS.get(quant, quant)


@cache
def superblock_bytes(quant: str, slabs: int = SLABS) -> int:
    """Bytes of a superblock with `slabs` slabs. Raises ValueError for an unknown quant."""
    if panel_format(quant) not in _BYTES:
        raise ValueError(f"quant must be one of {', '.join((*_BYTES, *_SAME_PANELS))}, got {quant}")
    slab, once = _BYTES[panel_format(quant)]
    return -(-(slabs * slab + once) // 64) * 64


@cache
def panel_bytes(quant: str, columns: int) -> int:
    """Bytes of a panel with `columns` columns, a multiple of 64. Raises ValueError for an unknown quant."""
    whole, rest = divmod(-(-columns // SLAB), SLABS)
    return whole * superblock_bytes(quant) + (superblock_bytes(quant, rest) if rest else 0)


def panel_count(rows: int) -> int:
    """Panels of a matrix with `rows` rows."""
    return -(-rows // PANEL_ROWS)


def constants(quant: str, columns: int, prefix: str = "") -> dict[str, Any]:
    """Return the constants of a matrix that kernels are compiled for. Their names begin with `prefix`."""
    return {
        f"{prefix}FORMAT": panel_format(quant),
        f"{prefix}SUPERBLOCK_BYTES": superblock_bytes(quant),
        f"{prefix}PANEL_BYTES": panel_bytes(quant, columns),
    }


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """The bytes of one expert: panel 0 of gate, panel 0 of up, panel 1 of gate and so on, then the panels of down.

    gate, up, down: the formats of these matrices, [intermediate, hidden] twice and [hidden, intermediate]. A record
    begins at a multiple of 64 bytes. Raises ValueError for an unknown format.
    """

    gate: str
    up: str
    down: str
    hidden: int
    intermediate: int

    def __post_init__(self) -> None:
        for quant in (self.gate, self.up, self.down):
            superblock_bytes(quant)
            if quant not in FLOATS and (self.hidden % 32 or self.intermediate % 32):
                raise ValueError(f"{quant} needs multiples of 32, got {self.hidden} and {self.intermediate}")

    @property
    def gate_panel_bytes(self) -> int:
        """Bytes of a panel of gate."""
        return panel_bytes(self.gate, self.hidden)

    @property
    def up_panel_bytes(self) -> int:
        """Bytes of a panel of up."""
        return panel_bytes(self.up, self.hidden)

    @property
    def down_panel_bytes(self) -> int:
        """Bytes of a panel of down."""
        return panel_bytes(self.down, self.intermediate)

    @property
    def down_start(self) -> int:
        """Byte of the record where down begins."""
        return panel_count(self.intermediate) * (self.gate_panel_bytes + self.up_panel_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of the record."""
        return self.down_start + panel_count(self.hidden) * self.down_panel_bytes


def dequantize(panels: torch.Tensor, quant: str, columns: int) -> torch.Tensor:
    """Decode panels [count, bytes] uint8 -> [count * 16, columns] float32, with the operations of GGUF's own code.

    Raises ValueError if a panel with `columns` columns has another number of bytes.
    """
    if panels.shape[1] != panel_bytes(quant, columns):
        raise ValueError(f"a panel of {columns} columns of {quant} has {panel_bytes(quant, columns)} bytes")
    count = len(panels)
    slabs = -(-columns // SLAB)
    if quant in FLOATS:
        rows = _floats(panels.contiguous(), quant)
    else:
        parts, start = [], 0
        for number, block_slabs in ((slabs // SLABS, SLABS), (1, slabs % SLABS)):
            if number and block_slabs:
                size = superblock_bytes(quant, block_slabs)
                blocks = panels[:, start : start + number * size].reshape(count * number, size)
                start += number * size
                decoded = _blocks(blocks, panel_format(quant), block_slabs).view(
                    count, number, PANEL_ROWS, block_slabs * SLAB
                )
                parts.append(decoded.transpose(1, 2))
        rows = torch.cat([part.flatten(2) for part in parts], dim=2)
    return rows.reshape(count * PANEL_ROWS, -1)[:, :columns]


def _floats(panels: torch.Tensor, quant: str) -> torch.Tensor:
    """Decode panels of floats: [count, 16, columns] float32."""
    if quant == "BF16":  # columns 2i and 2i + 1 of a row are neighbours
        pairs = panels.view(torch.bfloat16).view(len(panels), -1, PANEL_ROWS, 2)
        return pairs.transpose(1, 2).flatten(2).float()
    values = panels.view(torch.float32 if quant == "F32" else torch.float16)
    return values.view(len(panels), -1, PANEL_ROWS).transpose(1, 2).float()


def _blocks(blocks: torch.Tensor, quant: str, slabs: int) -> torch.Tensor:
    """Decode superblocks: blocks [count, bytes] -> [count, 16, slabs * 32] float32."""
    end = 0

    def take(size: int) -> torch.Tensor:
        nonlocal end
        end += size
        return blocks[:, end - size : end].contiguous()

    def codes(plane: Callable[[torch.Tensor, int], torch.Tensor], size: int) -> torch.Tensor:
        return plane(take(size * slabs), slabs).int()

    def scales(per_slab: int, dtype: torch.dtype) -> torch.Tensor:  # [count, 16, columns], repeated for its columns
        entries = take(per_slab * slabs * PANEL_ROWS * dtype.itemsize).view(dtype).view(len(blocks), -1, PANEL_ROWS)
        return entries.transpose(1, 2).repeat_interleave(SLAB // per_slab, dim=2)

    def shared() -> torch.Tensor:
        return take(2 * PANEL_ROWS).view(torch.float16).float()[:, :, None]

    if quant == "Q8_0":
        code = codes(_bytes, 512) - 128
        return scales(1, torch.float16).float() * code
    if quant in ("Q4_0", "IQ4_NL"):
        code = codes(_nibbles, 256)
        code = code - 8 if quant == "Q4_0" else _lookup(IQ4_VALUES, code)
        return scales(1, torch.float16).float() * code
    if quant in ("Q4_1", "Q5_1", "UINT4"):
        code = codes(_nibbles, 256)
        if quant == "Q5_1":
            code |= codes(_bits, 64) << 4
        scale = scales(1, torch.float16).float()
        if quant == "UINT4":
            return scale * (code - scales(1, torch.uint8).int())
        return scale * code + scales(1, torch.float16).float()
    if quant == "FP8":
        fours = blocks.view(len(blocks), slabs // 4, 4 * 512 + 64)  # codes of four slabs, then their scale
        numbers = _bytes(fours[:, :, :-64].reshape(len(blocks), -1), slabs).contiguous().view(torch.float8_e4m3fn)
        scale = fours[:, :, -64:].contiguous().view(torch.float32).transpose(1, 2)
        return numbers.float() * scale.repeat_interleave(4 * SLAB, dim=2)
    if quant == "NVFP4":
        code = _lookup(MXFP4_VALUES, codes(_nibbles, 256))
        scale = scales(2, torch.uint8).contiguous().view(torch.float8_e4m3fn).double() / 2
        d, r = take(8 * PANEL_ROWS).view(torch.float32).double().view(-1, 2, PANEL_ROWS, 1).unbind(1)
        return (scale * (d + r)).float() * code  # rounded once, as one multiplication and addition does
    if quant == "IQ3_XXS":
        code = _lookup(IQ3_XXS_VALUES, codes(_nibbles, 256))
        scale = scales(1, torch.uint8)
        return shared() * 0.5 * scale * code
    if quant == "IQ3_S":
        code = 2 * codes(_nibbles, 256) - 15
        scale = scales(1, torch.uint8)
        return shared() * scale * code
    if quant in ("IQ2_S", "IQ1_M"):
        code = codes(_pairs, 128)
        if quant == "IQ2_S":
            code = _lookup(IQ2_VALUES, code | codes(_bits, 64) << 2)
        else:
            code = 8 * code + 2 * codes(_deltas, 8) - 9
        both = scales(1, torch.uint8)
        second = torch.arange(both.shape[2], device=both.device) % SLAB >= SLAB // 2
        scale = torch.where(second, both >> 4, both & 15) + 0.5
        return shared() * 0.25 * scale * code
    if quant == "MXFP4":
        code = _lookup(MXFP4_VALUES, codes(_nibbles, 256))
        return torch.exp2(scales(1, torch.uint8).float() - 128) * code
    if quant == "IQ4_XS":
        code = _lookup(IQ4_VALUES, codes(_nibbles, 256))
        scale = scales(1, torch.int8)
        return shared() * scale * code
    if quant in ("Q6_K", "Q3_K"):
        if quant == "Q6_K":
            code = codes(_nibbles, 256)
            code = (code | codes(_pairs, 128) << 4) - 32
        else:
            code = codes(_pairs, 128)
            code = (code | codes(_bits, 64) << 2) - 4
        scale = scales(2, torch.int8)
        return shared() * scale * code
    if quant == "Q2_K":
        code = codes(_pairs, 128)
        both = scales(2, torch.uint8)
        scale, minimum = both & 15, both >> 4
    else:
        code = codes(_nibbles, 256)
        if quant == "Q5_K":
            code |= codes(_bits, 64) << 4
        scale, minimum = scales(1, torch.uint8), scales(1, torch.uint8)
    return shared() * scale * code - shared() * minimum


def _lookup(values: tuple[int, ...], code: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=code.device)[code.long()]


def _bytes(plane: torch.Tensor, slabs: int) -> torch.Tensor:
    """This and the next four decode a plane [count, bytes] to its codes [count, 16, slabs * 32]."""
    return plane.view(-1, slabs * 8, PANEL_ROWS, 4).transpose(1, 2).flatten(2)


def _nibbles(plane: torch.Tensor, slabs: int) -> torch.Tensor:
    words = plane.view(-1, slabs * 4, PANEL_ROWS, 4)
    return torch.stack((words & 15, words >> 4), dim=3).transpose(1, 2).flatten(2)


def _pairs(plane: torch.Tensor, slabs: int) -> torch.Tensor:
    words = plane.view(-1, slabs * 2, PANEL_ROWS, 4)
    return torch.stack([words >> shift & 3 for shift in (0, 2, 4, 6)], dim=3).transpose(1, 2).flatten(2)


def _bits(plane: torch.Tensor, slabs: int) -> torch.Tensor:
    bits = torch.stack([plane >> shift & 1 for shift in range(8)], dim=2)
    return bits.view(-1, slabs * 8, PANEL_ROWS, 4).transpose(1, 2).flatten(2)


def _deltas(plane: torch.Tensor, slabs: int) -> torch.Tensor:
    rows = torch.stack([plane >> shift & 1 for shift in range(8)], dim=2).view(-1, slabs * 4, PANEL_ROWS)
    return rows.transpose(1, 2).repeat_interleave(8, dim=2)

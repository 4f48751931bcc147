"""Kernels of one matrix in packed panels: times a few rows, and some of its rows decoded (a door to triton).

The first is linear.py's for panels: a program has 16 rows of weights, asks for all of them at once, and adds up
in float32 what the weights are exactly. Two matrices, which may differ in format, can be the parts of one product: q
and k beside v, say. The second makes what torch multiplies by, or looks up embeddings. Each is one launch,
no host sync, capturable in a CUDA graph.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ktqueue.operators.gpu.kernels import dots, formats
from ktqueue.operators.gpu.kernels.panel_layout import (
    PANEL_ROWS,
    SLAB,
    SLABS,
    panel_bytes,
    panel_count,
    superblock_bytes,
)
from ktqueue.operators.gpu.kernels.panel_matrix import Panels

_FEWEST_SLABS, _MOST_SLABS = 32, 128
"""That a program has on the way at a time, of each of its rows: 1,024 columns to 4,096."""
_SLABS_OF_ALL = 1 << 14
"""That all programs together have on the way at a time: eight a warp, so about 15 warps a multiprocessor."""


def _slabs_at_once(panels: int, slabs: int) -> int:
    """Of each of `panels` programs: many at once where there are few programs."""
    most = max(min(_SLABS_OF_ALL // panels, _MOST_SLABS), _FEWEST_SLABS)
    return min(1 << (slabs - 1).bit_length(), 1 << (most.bit_length() - 1))


@triton.jit
def _floats(words, i: tl.constexpr, DTYPE: tl.constexpr):
    """Number i of the four of 16 bits that an int64 has, as float32."""
    half = words.to(tl.int32) if i < 2 else (words >> 32).to(tl.int32)
    if tl.bfloat16 == DTYPE:
        return (half << 16 if i % 2 == 0 else half & -65536).to(tl.float32, bitcast=True)
    half = half if i % 2 == 0 else half >> 16
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _code(word, magic, i: tl.constexpr, WIDE: tl.constexpr, OFFSET: tl.constexpr):
    """Code i of the four of `word` as float32: WIDE, of eight bits, less OFFSET; else plus 128, which is one
    instruction: the code as the top of a mantissa, below the bytes of `magic`."""
    if WIDE:
        return formats.number(word, 8 * i, 8, OFFSET)
    zero = word & 0
    return dots.permute(word, zero + magic, zero + (0x7044 + 256 * i)).to(tl.float32, bitcast=True)


@triton.jit
def _eight(
    product,  # [S, 16]
    total,  # [S, 1]
    at,  # pointers [S, 1] of eight columns of x, four in an int64
    inside,
    even,  # codes of the first four columns, int32 [S, 16], and of the others
    odd,
    magic,
    DTYPE: tl.constexpr,
    S: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """`product` plus codes times x; `total`, which those that are not WIDE need, plus x."""
    first = tl.load(at, mask=inside, other=0)
    second = tl.load(at + 1, mask=inside, other=0)
    for i in tl.static_range(4):
        a = _floats(first, i, DTYPE)
        b = _floats(second, i, DTYPE)
        product = tl.fma(_code(even, magic, i, WIDE, OFFSET), tl.broadcast_to(a, (S, 16)), product)
        product = tl.fma(_code(odd, magic, i, WIDE, OFFSET), tl.broadcast_to(b, (S, 16)), product)
        if not WIDE:
            total += a + b
    return product, total


@triton.jit
def _few_rows(
    packed,
    program,  # which panel
    x,
    bias,  # of this part, or None
    out,  # of this part
    x_stride,
    out_stride,
    magic,  # 0x43000000, which the compiler must not know: it would load it anew for every use
    ROWS: tl.constexpr,
    SLAB_COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    S: tl.constexpr,
):
    """The 16 outputs of a panel, of all tokens."""
    HALVES: tl.constexpr = dots.halves(FORMAT)
    MINIMUMS: tl.constexpr = dots.minimums(FORMAT)
    SIGNED: tl.constexpr = dots.signed(FORMAT)
    WIDE: tl.constexpr = SIGNED or FORMAT == "Q8_0"
    OFFSET: tl.constexpr = 128 if SIGNED else dots.offset(FORMAT)
    row = tl.arange(0, 16)[None, :]
    base = packed + program.to(tl.int64) * PANEL_BYTES
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((S, 16), tl.float32),)
    for step in tl.static_range((SLAB_COUNT + S - 1) // S):
        slab = step * S + tl.arange(0, S)[:, None]
        inside = slab < SLAB_COUNT
        slab = tl.minimum(slab, SLAB_COUNT - 1)
        within = slab % 8
        panel = slab // 8 * SUPERBLOCK_BYTES + row * 0
        slabs = 8 if SLAB_COUNT % 8 == 0 else tl.minimum(SLAB_COUNT - slab // 8 * 8, 8)
        words = x.to(tl.pointer_type(tl.int64)) + slab * 8
        for half in tl.static_range(2):
            if half == 0 or HALVES:
                scale, minimum = formats.scales(base, panel, within, 2 * half, row, slabs, FORMAT)
                products = ()
                totals = ()
                for _ in tl.static_range(TOKENS):
                    products = products + (tl.zeros((S, 16), tl.float32),)
                    totals = totals + (tl.zeros((S, 1), tl.float32),)
            for j in tl.static_range(2):
                even, odd = dots.lines(base, panel, within, row, slabs, 2 * half + j, FORMAT)
                if SIGNED:
                    even, odd = even ^ -0x7F7F7F80, odd ^ -0x7F7F7F80
                added = ()
                added_totals = ()
                for t in tl.static_range(TOKENS):
                    at = words + t * x_stride // 4 + 4 * half + 2 * j
                    product, total = _eight(
                        products[t], totals[t], at, inside, even, odd, magic, x.dtype.element_ty, S, WIDE, OFFSET
                    )
                    added = added + (product,)
                    added_totals = added_totals + (total,)
                products = added
                totals = added_totals
            if half == 1 or HALVES:
                added = ()
                for t in tl.static_range(TOKENS):
                    product = products[t] if WIDE else products[t] - (128.0 + OFFSET) * totals[t]
                    value = sums[t] + scale * product
                    added = added + (value - minimum * totals[t] if MINIMUMS else value,)
                sums = added
    n = program * 16 + tl.arange(0, 16)
    for t in tl.static_range(TOKENS):
        value = tl.sum(sums[t], 0)
        if bias is not None:
            value += tl.load(bias + n, mask=n < ROWS, other=0.0).to(tl.float32)
        tl.store(out + t * out_stride + n, value.to(out.dtype.element_ty), mask=n < ROWS)


@triton.jit(do_not_specialize=["magic"])
def _few_rows_kernel(
    packed,
    second_packed,
    x,
    bias,
    out,
    x_stride,
    out_stride,
    magic,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    SECOND_ROWS: tl.constexpr,  # 0: there is no second part
    SECOND_FORMAT: tl.constexpr,
    SECOND_SUPERBLOCK_BYTES: tl.constexpr,
    SECOND_PANEL_BYTES: tl.constexpr,
    SLAB_COUNT: tl.constexpr,
    TOKENS: tl.constexpr,
    S: tl.constexpr,
):
    """One program for a panel."""
    program = tl.program_id(0)
    panels: tl.constexpr = (ROWS + 15) // 16
    if SECOND_ROWS == 0 or program < panels:
        _few_rows(
            packed, program, x, bias, out, x_stride, out_stride, magic,
            ROWS, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES, PANEL_BYTES, TOKENS, S,
        )  # fmt: skip
    else:
        _few_rows(
            second_packed, program - panels, x, bias + ROWS if bias is not None else None, out + ROWS, x_stride,
            out_stride, magic,
            SECOND_ROWS, SLAB_COUNT, SECOND_FORMAT, SECOND_SUPERBLOCK_BYTES, SECOND_PANEL_BYTES, TOKENS, S,
        )  # fmt: skip


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, columns] of 16 bits, or a copy: as it can be read four columns at a time. A GPU faults where a word of
    8 bytes does not begin at a multiple of 8, and what is contiguous may begin anywhere."""
    side_by_side = x.stride(1) == 1 and (len(x) == 1 or x.stride(0) % 4 == 0)
    return x if side_by_side and x.data_ptr() % 8 == 0 else x.clone(memory_format=torch.contiguous_format)


def few_rows(parts: Sequence[Panels], x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See panel_matrix.multiply_few; one part or two."""
    x = _in_words(x)
    tokens, columns = x.shape
    first, other = parts[0], parts[-1]
    slabs, panels = columns // SLAB, sum(panel_count(part.rows) for part in parts)
    at_once = _slabs_at_once(panels, slabs)
    _few_rows_kernel[(panels,)](
        first.packed,
        other.packed,
        x,
        bias,
        out,
        x.stride(0),
        out.stride(0),
        0x43000000,
        ROWS=first.rows,
        FORMAT=first.quant,
        SUPERBLOCK_BYTES=superblock_bytes(first.quant),
        PANEL_BYTES=panel_bytes(first.quant, columns),
        SECOND_ROWS=other.rows if len(parts) > 1 else 0,
        SECOND_FORMAT=other.quant,
        SECOND_SUPERBLOCK_BYTES=superblock_bytes(other.quant),
        SECOND_PANEL_BYTES=panel_bytes(other.quant, columns),
        SLAB_COUNT=slabs,
        TOKENS=tokens,
        S=at_once,
        num_warps=max(1, at_once * PANEL_ROWS // 128),
    )


@triton.jit
def _two_parts(codes, more, scale, minimum, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Parts PART and PART + 4 side by side."""
    first = formats.part(codes, more, scale, minimum, PART, FORMAT)
    return tl.join(first, formats.part(codes, more, scale, minimum, PART + 4, FORMAT))


@triton.jit(do_not_specialize=["first", "count"])
def _decode_kernel(
    packed,
    ids,  # [count] int64, of LOOKUP
    out,  # [count, COLUMNS]
    first,
    count,
    LOOKUP: tl.constexpr,
    SLAB_COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    N: tl.constexpr,
):
    """One program for a superblock of N rows."""
    r = tl.program_id(0) * N + tl.arange(0, N)
    block = tl.program_id(1)
    live = r < count
    number = tl.load(ids + r, mask=live, other=0) if LOOKUP else tl.where(live, first + r, first).to(tl.int64)
    panel = (number // 16 * PANEL_BYTES + block * SUPERBLOCK_BYTES)[None, :]
    row = (number % 16).to(tl.int32)[None, :]
    word = tl.arange(0, 32)[:, None]
    slabs = tl.minimum(SLAB_COUNT - block * 8, 8)
    slab = tl.minimum(word // 4, slabs - 1)
    codes, more = formats.planes(packed, panel, slab, word, row, slabs, FORMAT)
    scale, minimum = formats.scales(packed, panel, slab, word, row, slabs, FORMAT)
    # Part i has the columns 8w + i of each word: its lowest bit is to be the last dimension.
    even = tl.join(
        _two_parts(codes, more, scale, minimum, 0, FORMAT), _two_parts(codes, more, scale, minimum, 2, FORMAT)
    )
    odd = tl.join(
        _two_parts(codes, more, scale, minimum, 1, FORMAT), _two_parts(codes, more, scale, minimum, 3, FORMAT)
    )
    values = tl.reshape(tl.join(even, odd), (32, N, 8)).to(out.dtype.element_ty)
    column = block * 256 + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    at = out + r.to(tl.int64)[None, :, None] * (SLAB_COUNT * 32) + column
    tl.store(at, values, mask=live[None, :, None] & (column < SLAB_COUNT * 32))


def decode(part: Panels, out: torch.Tensor, *, first: int = 0, ids: torch.Tensor | None = None) -> None:
    """See Panels.decode."""
    count, columns = out.shape
    rows = 16
    _decode_kernel[(triton.cdiv(count, rows), triton.cdiv(columns, SLAB * SLABS))](
        part.packed,
        out if ids is None else ids,
        out,
        first,
        count,
        LOOKUP=ids is not None,
        SLAB_COUNT=columns // SLAB,
        FORMAT=part.quant,
        SUPERBLOCK_BYTES=superblock_bytes(part.quant),
        PANEL_BYTES=panel_bytes(part.quant, columns),
        N=rows,
    )

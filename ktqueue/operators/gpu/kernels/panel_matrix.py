"""A matrix in GPU memory, in the panels of the CPU's kernels (csrc/formats/panel_layout.h): pack, decode, multiply.

For a few rows, a program has 16 rows of weights and requests all of them at once, as linear.py does. It decodes the
weights exactly and adds up in float32. Two matrices of different formats can be parts of one product: q and k next to
v, for example. For more rows, torch multiplies with decoded weights. Knows no layer. No host sync: everything
but packing can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import dots, formats, panel_layout
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm, weighted
from ktqueue.operators.gpu.kernels.operation import launch_options, runs_kernel, tl, triton, wait_for_previous
from ktqueue.operators.gpu.kernels.panel_layout import PANEL_ROWS, SLAB, SLABS
from ktqueue.operators.packed import PackedMatrix

_FEWEST_SLABS, _MOST_SLABS = 32, 128
"""Slabs of a step of a program, of each of its rows: 1,024 to 4,096 columns."""
_FAST_SLABS = 64
"""Where steps of so many are whole, none has more: two that are requested at once are faster than one of 128."""
_SLABS_OF_ALL = 1 << 14
"""Slabs that all programs together have in flight at a time: eight per warp, so about 15 warps per multiprocessor."""
_AHEAD_TOKENS = 2
"""Tokens up to which a program requests two steps of weights before it multiplies the first. Others need registers."""
_AHEAD_PANELS = 1 << 12
"""Panels from which it does so for one token only: with fewer registers, more programs run at once."""


def _slabs_at_once(panels: int, slabs: int) -> int:
    """Slabs in flight of each of `panels` programs: many if there are few programs."""
    most = _FAST_SLABS if slabs % _FAST_SLABS == 0 else _MOST_SLABS
    most = max(min(_SLABS_OF_ALL // panels, most), _FEWEST_SLABS)
    return min(1 << (slabs - 1).bit_length(), 1 << (most.bit_length() - 1))


@triton.jit
def _floats(words, i: tl.constexpr, DTYPE: tl.constexpr):
    """Number i of the four 16-bit numbers in an int64, as float32."""
    half = words.to(tl.int32) if i < 2 else (words >> 32).to(tl.int32)
    if tl.bfloat16 == DTYPE:
        return (half << 16 if i % 2 == 0 else half & -65536).to(tl.float32, bitcast=True)
    half = half if i % 2 == 0 else half >> 16
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _code(word, magic, i: tl.constexpr, WIDE: tl.constexpr, OFFSET: tl.constexpr):
    """Code i of the four in `word`, as float32. WIDE: the code has eight bits, and OFFSET is subtracted.

    Otherwise 128 is added, which is one instruction: the code becomes the top of a mantissa, below the bytes of
    `magic`.
    """
    if WIDE:
        return formats.number(word, 8 * i, 8, OFFSET)
    zero = word & 0
    return dots.permute(word, zero + magic, zero + (0x7044 + 256 * i)).to(tl.float32, bitcast=True)


@triton.jit
def _eight_columns(
    product,  # [S, 16]
    total,  # [S, 1]
    columns,  # pointers [S, 1] to eight columns of x, four in an int64
    inside,
    even,  # codes of the first four columns, int32 [S, 16]
    odd,  # codes of the other four
    magic,
    DTYPE: tl.constexpr,
    S: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Add codes times x to `product`, and x to `total`, which codes that are not WIDE need."""
    first = tl.load(columns, mask=inside, other=0)
    second = tl.load(columns + 1, mask=inside, other=0)
    for i in tl.static_range(4):
        a = _floats(first, i, DTYPE)
        b = _floats(second, i, DTYPE)
        product = tl.fma(_code(even, magic, i, WIDE, OFFSET), tl.broadcast_to(a, (S, 16)), product)
        product = tl.fma(_code(odd, magic, i, WIDE, OFFSET), tl.broadcast_to(b, (S, 16)), product)
        if not WIDE:
            total += a + b
    return product, total


@triton.jit
def _wait_for_rows(
    x, norm, factors, normed, x_stride, epsilon,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Wait for x. With a norm, all rows are normed, to a place of the program's own in `normed`, which is returned."""
    wait_for_previous(WAITS)
    rows = x
    if norm is not None:
        column = tl.arange(0, BLOCK)
        rows = normed + tl.program_id(0).to(tl.int64) * (TOKENS * COLUMNS)
        for t in tl.static_range(TOKENS):
            row = tl.load(x + t * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
            row *= tl.rsqrt(tl.sum(row * row, axis=0) / COLUMNS + epsilon)
            row = weighted(row, factors.to(tl.float32), x.dtype.element_ty, norm.dtype.element_ty != tl.float32)
            tl.store(rows + t * COLUMNS + column, row, mask=column < COLUMNS)
        tl.debug_barrier()  # other threads of this program read them
    return rows


@triton.jit
def _few_rows_panel(
    matrix,  # pointer of its first panel
    panel,  # its number
    x,
    bias,  # of this part, or None
    out,  # of this part
    norm,
    normed,
    epsilon,
    x_stride,
    out_stride,
    magic,  # 0x43000000. If the compiler knew the value, it would load it again for every use
    ROWS: tl.constexpr,
    SLAB_COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    S: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Compute the 16 outputs of a panel for all tokens. ADDS: the rounded outputs are added to what is in `out`.
    AHEAD: steps of S slabs whose weights are requested before those of the first are multiplied. More than 1: the first
    ones also before x is ready."""
    HALVES: tl.constexpr = dots.halves(FORMAT)
    MINIMUMS: tl.constexpr = dots.minimums(FORMAT)
    SIGNED: tl.constexpr = dots.signed(FORMAT)
    WIDE: tl.constexpr = SIGNED or FORMAT == "Q8_0"
    OFFSET: tl.constexpr = 128 if SIGNED else dots.offset(FORMAT)
    row = tl.arange(0, 16)[None, :]
    base = matrix + panel.to(tl.int64) * PANEL_BYTES
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((S, 16), tl.float32),)
    STEPS: tl.constexpr = (SLAB_COUNT + S - 1) // S
    factors = None
    if norm is not None:
        column = tl.arange(0, BLOCK)
        factors = tl.load(norm + column, mask=column < SLAB_COUNT * 32, other=0.0)
        stride = SLAB_COUNT * 32
    else:
        stride = x_stride
    if AHEAD == 1:
        x = _wait_for_rows(x, norm, factors, normed, x_stride, epsilon, TOKENS, SLAB_COUNT * 32, BLOCK, WAITS)
    tiles = ()
    for step in tl.static_range(STEPS):
        if step % AHEAD == 0:
            tiles = ()
            for ahead in tl.static_range(min(AHEAD, STEPS - step)):
                slab = tl.minimum((step + ahead) * S + tl.arange(0, S)[:, None], SLAB_COUNT - 1)
                tiles = tiles + (dots.stored_tile(base, row * 0, slab, row, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES),)
        if AHEAD > 1 and step == 0:  # while weights arrive, which no kernel of a step writes
            x = _wait_for_rows(x, norm, factors, normed, x_stride, epsilon, TOKENS, SLAB_COUNT * 32, BLOCK, WAITS)
        slab = step * S + tl.arange(0, S)[:, None]
        inside = slab < SLAB_COUNT
        slab = tl.minimum(slab, SLAB_COUNT - 1)
        words = x.to(tl.pointer_type(tl.int64)) + slab * 8
        for half in tl.static_range(2):
            if half == 0 or HALVES:
                scale, minimum = dots.scales_of_tile(tiles[step % AHEAD], half, FORMAT)
                products = ()
                totals = ()
                for _ in tl.static_range(TOKENS):
                    products = products + (tl.zeros((S, 16), tl.float32),)
                    totals = totals + (tl.zeros((S, 1), tl.float32),)
            for j in tl.static_range(2):
                even, odd = dots.lines_of_tile(tiles[step % AHEAD], row, 2 * half + j, FORMAT)
                if SIGNED:
                    even, odd = even ^ -0x7F7F7F80, odd ^ -0x7F7F7F80
                added = ()
                added_totals = ()
                for t in tl.static_range(TOKENS):
                    columns = words + t * stride // 4 + 4 * half + 2 * j
                    product, total = _eight_columns(
                        products[t], totals[t], columns, inside, even, odd, magic, x.dtype.element_ty, S, WIDE, OFFSET
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
    n = panel * 16 + tl.arange(0, 16)
    for t in tl.static_range(TOKENS):
        value = tl.sum(sums[t], 0)
        if bias is not None:
            value += tl.load(bias + n, mask=n < ROWS, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty)
        if ADDS:
            before = tl.load(out + t * out_stride + n, mask=n < ROWS, other=0.0).to(tl.float32)
            value = (before + value.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + t * out_stride + n, value, mask=n < ROWS)


@triton.jit(do_not_specialize=["magic"])
def _few_rows_kernel(
    matrix, second_matrix, x, bias, out, norm, normed, epsilon, x_stride, out_stride, magic,
    ROWS: tl.constexpr, FORMAT: tl.constexpr, SUPERBLOCK_BYTES: tl.constexpr, PANEL_BYTES: tl.constexpr,
    SECOND_ROWS: tl.constexpr, SECOND_FORMAT: tl.constexpr, SECOND_SUPERBLOCK_BYTES: tl.constexpr,
    SECOND_PANEL_BYTES: tl.constexpr, SLAB_COUNT: tl.constexpr, TOKENS: tl.constexpr, S: tl.constexpr,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One program per panel. SECOND_ROWS 0: there is no second part. norm: weights of an RMSNorm of x, or None. Each
    program norms all rows, to a place of its own in `normed` [programs, TOKENS, columns]: BLOCK columns at once."""
    program = tl.program_id(0)
    panels: tl.constexpr = (ROWS + 15) // 16
    if SECOND_ROWS == 0 or program < panels:
        _few_rows_panel(
            matrix, program, x, bias, out, norm, normed, epsilon, x_stride, out_stride, magic,
            ROWS, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES, PANEL_BYTES, TOKENS, S, ADDS, BLOCK, AHEAD, WAITS,
        )  # fmt: skip
    else:
        _few_rows_panel(
            second_matrix, program - panels, x, bias + ROWS if bias is not None else None, out + ROWS, norm, normed,
            epsilon, x_stride, out_stride, magic,
            SECOND_ROWS, SLAB_COUNT, SECOND_FORMAT, SECOND_SUPERBLOCK_BYTES, SECOND_PANEL_BYTES, TOKENS, S, ADDS,
            BLOCK, AHEAD, WAITS,
        )  # fmt: skip


def in_words(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, columns] of 16 bits, or a copy of it, that can be read four columns at a time.

    A GPU faults on a word of 8 bytes that does not begin at a multiple of 8, and contiguous tensors may begin anywhere.
    """
    side_by_side = x.stride(1) == 1 and (len(x) == 1 or x.stride(0) % 4 == 0)
    return x if side_by_side and x.data_ptr() % 8 == 0 else x.clone(memory_format=torch.contiguous_format)


def _launch_few_rows(
    parts: "Sequence[PanelMatrix]",
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool,
    norm: RmsNorm | None,
) -> None:
    """Launch `multiply_few` for one part or two."""
    x = in_words(x)
    tokens, columns = x.shape
    first, second = parts[0], parts[-1]
    slabs, panels = columns // SLAB, sum(panel_layout.panel_count(part.rows) for part in parts)
    at_once = _slabs_at_once(panels, slabs)
    _few_rows_kernel[(panels,)](
        first.panels, second.panels, x, bias, out, norm and norm.weight,
        x.new_empty(panels * tokens * columns) if norm else None, norm.epsilon if norm else 0.0,
        x.stride(0), out.stride(0), 0x43000000,
        ROWS=first.rows,
        **panel_layout.constants(first.quant, columns),
        SECOND_ROWS=second.rows if len(parts) > 1 else 0,
        **panel_layout.constants(second.quant, columns, "SECOND_"),
        SLAB_COUNT=slabs,
        TOKENS=tokens,
        S=at_once,
        ADDS=adds,
        BLOCK=triton.next_power_of_2(columns) if norm else 0,
        AHEAD=2 if tokens == 1 or (tokens <= _AHEAD_TOKENS and panels < _AHEAD_PANELS) else 1,
        **launch_options(),
        num_warps=max(1, at_once * PANEL_ROWS // 128),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "count"])
def _decode_kernel(
    matrix, ids, out, first, count,
    LOOKUP: tl.constexpr, SLAB_COUNT: tl.constexpr, FORMAT: tl.constexpr, SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program for a superblock of N rows. LOOKUP: rows are those of `ids`, not those from `first` on."""
    r = tl.program_id(0) * N + tl.arange(0, N)
    block = tl.program_id(1)
    live = r < count
    number = tl.load(ids + r, mask=live, other=0) if LOOKUP else tl.where(live, first + r, first).to(tl.int64)
    panel = (number // 16 * PANEL_BYTES + block * SUPERBLOCK_BYTES)[None, :]
    row = (number % 16).to(tl.int32)[None, :]
    word = tl.arange(0, 32)[:, None]
    slabs = tl.minimum(SLAB_COUNT - block * 8, 8)
    slab = tl.minimum(word // 4, slabs - 1)
    values = formats.decoded(matrix, panel, slab, word, row, slabs, FORMAT, False).to(out.dtype.element_ty)
    column = block * 256 + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    target = out + r.to(tl.int64)[None, :, None] * (SLAB_COUNT * 32) + column
    tl.store(target, values, mask=live[None, :, None] & (column < SLAB_COUNT * 32))


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """Rows of a matrix in GPU memory. panels: [bytes] uint8, of a block format, one after the other."""

    panels: torch.Tensor
    quant: str
    rows: int
    columns: int

    @classmethod
    def pack(cls, matrix: PackedMatrix, device: str) -> "PanelMatrix":
        """Pack the matrix with the CPU's kernels and copy it. Raises ValueError for a scale that is not finite."""
        linear = native.Linear(matrix.quant, matrix.rows, matrix.columns, matrix.data)
        return cls(native.host_bytes(*linear.range).to(device, copy=True), matrix.quant, matrix.rows, matrix.columns)

    def decode(self, out: torch.Tensor, *, first: int = 0, ids: torch.Tensor | None = None) -> None:
        """Decode rows to `out` [count, columns] of any float type: from `first` on, or those of `ids` [count] int64."""
        if runs_kernel(out):
            count, columns = out.shape
            rows = 16
            _decode_kernel[(triton.cdiv(count, rows), triton.cdiv(columns, SLAB * SLABS))](
                self.panels, out if ids is None else ids, out, first, count,
                LOOKUP=ids is not None,
                SLAB_COUNT=columns // SLAB,
                **panel_layout.constants(self.quant, columns),
                N=rows,
            )  # fmt: skip
            return
        panels = self.panels.view(panel_layout.panel_count(self.rows), -1)
        numbers = torch.arange(first, first + len(out)) if ids is None else ids
        used, place = np.unique(numbers.numpy() // PANEL_ROWS, return_inverse=True)
        decoded = panel_layout.dequantize(panels[torch.from_numpy(used)], self.quant, self.columns)
        out.copy_(decoded[torch.from_numpy(place) * PANEL_ROWS + numbers % PANEL_ROWS])


def multiply_few(
    parts: Sequence[PanelMatrix],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool = False,
    norm: RmsNorm | None = None,
) -> None:
    """Write x [tokens, columns] times all `parts` transposed, plus bias [rows of all], to out [tokens, rows of all].

    For a few tokens of 16 bits. Weights are not rounded; sums are float32. adds: the rounded product is added to `out`.
    norm: x is normed first, rounded as by add_rms_norm.
    """
    row = 0
    if runs_kernel(out):
        for i in range(0, len(parts), 2):
            rows = sum(part.rows for part in parts[i : i + 2])
            part_bias = None if bias is None else bias[row : row + rows]
            _launch_few_rows(parts[i : i + 2], x, part_bias, out[:, row : row + rows], adds=adds, norm=norm)
            row += rows
        return
    x = x if norm is None else add_rms_norm(x, *norm)
    weights = torch.empty(out.shape[1], x.shape[1])
    for part in parts:
        part.decode(weights[row : row + part.rows])
        row += part.rows
    product = torch.nn.functional.linear(x.float(), weights, None if bias is None else bias.float())
    if adds:
        out.add_(product.to(out.dtype))
    else:
        out.copy_(product)

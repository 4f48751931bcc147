"""Integer dot products of packed weights with int8 activations, for Triton kernels: four weights per instruction.

A tile is [S, N]: S slabs of 32 columns by N rows. For each row of a slab the packed planes hold the words of eight
lines: line l has the codes of columns 4l .. 4l + 3, one byte each once unpacked (csrc/formats/panel_layout.h). That is
one operand of dp4a; the other is the codes of the same columns of x. A thread has whole slabs of its rows, so it
decodes scales once for 32 weights. Codes are unsigned, or signed if they come from a table. The contribution of an
offset or a minimum comes from the sum of x's codes (expert_int8.Int8Rows).
"""

from ktqueue.operators.gpu.kernels import formats
from ktqueue.operators.gpu.kernels.operation import tl, triton


@triton.constexpr_function
def halves(quant):
    """Whether each half of a slab has its own scale."""
    return quant in ("Q6_K", "Q3_K", "Q2_K", "IQ2_S", "IQ1_M", "NVFP4")


@triton.constexpr_function
def minimums(quant):
    """Whether a minimum is subtracted from scale times code."""
    return quant in ("Q4_K", "Q5_K", "Q2_K", "Q4_1", "Q5_1", "UINT4")


@triton.constexpr_function
def signed(quant):
    """Whether `lines` returns signed bytes, from a table or made as one."""
    return quant in ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "IQ3_XXS", "IQ2_S")


@triton.constexpr_function
def offset(quant):
    """The number to subtract from an unsigned code."""
    return {"Q8_0": 128, "Q4_0": 8, "Q6_K": 32, "Q3_K": 4, "IQ3_S": 15, "IQ1_M": 9}.get(quant, 0)


@triton.jit
def _dot(codes, x, total, SIGNED: tl.constexpr):
    """Return total + the four bytes of `codes` times the four signed bytes of `x`, int32."""
    if SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, total], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def permute(low, high, selector):
    """Choose bytes: byte i of the result is number (nibble i of `selector`, 0 .. 7) of those in `low` and `high`."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _look_up(word, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """Look up the eight nibbles of `word` in a table of 16 bytes: the low nibbles, and the high ones."""
    index = word & 0x77777777
    upper = 0x32103210 | ((word >> 1) & 0x44444444)
    zero = word & 0
    first = permute(permute(zero + T0, zero + T1, index), permute(zero + T2, zero + T3, index), upper)
    index = index >> 16
    second = permute(permute(zero + T0, zero + T1, index), permute(zero + T2, zero + T3, index), upper >> 16)
    return permute(first, second, zero + 0x6420), permute(first, second, zero + 0x7531)


@triton.jit
def _bits(byte, row):
    """The lowest bit of each byte, of one line of a plane of bits that has been loaded."""
    return formats.spread(byte.to(tl.int32) >> (row % 2 * 4))


@triton.jit
def _signed_magnitudes(pairs, negative):
    """Make the bytes 0, 1 and 2 the values 8, 25 and 43 of IQ2, negative where a byte of `negative` is 1."""
    magnitudes = 0x08080808 + 17 * pairs + ((pairs >> 1) & 0x01010101)
    return (magnitudes ^ (negative * 255)) + negative  # no magnitude is 0, so no byte overflows


@triton.jit
def stored_lines(base, panel, slab, row, slabs, J: tl.constexpr, FORMAT: tl.constexpr):
    """Load what `read_lines` makes lines 2J and 2J + 1 of each slab of, three tensors [S, N].

    base: scalar uint8 pointer; panel: byte offset of the slab's superblock [S, N]; slab: its number in the superblock
    [S, 1]; row: [1, N] 0..15; slabs: how many slabs the superblock has.
    """
    if FORMAT == "Q8_0":
        index = panel // 4 + slab * 128 + J * 32 + row
        first, second = formats.words(base, index), formats.words(base, index + 16)
        third = second
    elif (FORMAT == "Q2_K") or (FORMAT == "Q3_K") or (FORMAT == "IQ2_S") or (FORMAT == "IQ1_M"):
        first = formats.words(base, panel // 4 + slab * 32 + J // 2 * 16 + row)
        second, third = first, first
        if (FORMAT == "Q3_K") or (FORMAT == "IQ2_S"):
            byte = base + panel + 128 * slabs + slab * 64 + J * 16 + row // 2
            second, third = tl.load(byte), tl.load(byte + 8)
        elif FORMAT == "IQ1_M":
            second = formats.row_bit(base, panel, slab, J, row, 128 * slabs)
    else:
        first = formats.words(base, panel // 4 + slab * 64 + J * 16 + row)
        second, third = first, first
        if (FORMAT == "Q5_K") or (FORMAT == "Q5_1"):
            byte = base + panel + 256 * slabs + slab * 64 + J * 16 + row // 2
            second, third = tl.load(byte), tl.load(byte + 8)
        elif FORMAT == "Q6_K":
            second = formats.words(base, (panel + 256 * slabs) // 4 + slab * 32 + J // 2 * 16 + row)
    return first, second, third


@triton.jit
def read_lines(first, second, third, row, J: tl.constexpr, FORMAT: tl.constexpr):
    """Lines 2J and 2J + 1 of each slab, int32 [S, N] of four codes each. The first arguments: from `stored_lines`."""
    if FORMAT == "Q8_0":
        return first, second
    if (FORMAT == "Q2_K") or (FORMAT == "Q3_K") or (FORMAT == "IQ2_S") or (FORMAT == "IQ1_M"):
        pairs = first >> (J % 2 * 4)
        even, odd = pairs & 0x03030303, (pairs >> 2) & 0x03030303
        if FORMAT == "Q3_K":
            even, odd = even | (_bits(second, row) << 2), odd | (_bits(third, row) << 2)
        elif FORMAT == "IQ2_S":
            even = _signed_magnitudes(even, _bits(second, row))
            odd = _signed_magnitudes(odd, _bits(third, row))
        elif FORMAT == "IQ1_M":
            delta = second * 0x02020202
            even, odd = (even << 3) + delta, (odd << 3) + delta
        return even, odd
    if (FORMAT == "IQ4_NL") or (FORMAT == "IQ4_XS"):
        return _look_up(first, -0x4052677F, -0x09152231, 0x26190D01, 0x71594535)
    if FORMAT == "IQ3_XXS":
        return _look_up(first, -0x1115191F, -0x0105090E, 0x0E0A0602, 0x1F1A1612)
    if (FORMAT == "MXFP4") or (FORMAT == "NVFP4"):
        return _look_up(first, 0x03020100, 0x0C080604, -0x02010100, -0x0B070504)
    even, odd = first & 0x0F0F0F0F, (first >> 4) & 0x0F0F0F0F
    if FORMAT == "IQ3_S":
        even, odd = even << 1, odd << 1
    elif (FORMAT == "Q5_K") or (FORMAT == "Q5_1"):
        even, odd = even | (_bits(second, row) << 4), odd | (_bits(third, row) << 4)
    elif FORMAT == "Q6_K":
        if J % 2 == 0:
            even, odd = even | ((second << 4) & 0x30303030), odd | ((second << 2) & 0x30303030)
        else:
            even, odd = even | (second & 0x30303030), odd | ((second >> 2) & 0x30303030)
    return even, odd


@triton.jit
def lines(base, panel, slab, row, slabs, J: tl.constexpr, FORMAT: tl.constexpr):
    """Load lines 2J and 2J + 1 of each slab: see `stored_lines` and `read_lines`."""
    first, second, third = stored_lines(base, panel, slab, row, slabs, J, FORMAT)
    return read_lines(first, second, third, row, J, FORMAT)


@triton.jit
def _times_row(
    lines,  # a tuple of eight tensors [S, N]
    scale,
    minimum,
    second_scale,  # of the second half of each slab; not used if both have one scale
    second_minimum,
    x_slab,  # [S, 1] which slab of x
    inside,
    codes,
    scales,
    code_sums,
    FORMAT: tl.constexpr,
):
    """Multiply a tile by the slabs of one row of x: float32 [S, N]."""
    HALVES: tl.constexpr = halves(FORMAT)
    MINIMUMS: tl.constexpr = minimums(FORMAT)
    SIGNED: tl.constexpr = signed(FORMAT)
    OFFSET: tl.constexpr = offset(FORMAT)
    zero = lines[0] & 0
    words = codes.to(tl.pointer_type(tl.int64)) + x_slab * 4
    x01, x23, x45, x67 = tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    x_scale = tl.load(scales + x_slab, mask=inside, other=0.0)
    both = tl.load(code_sums + x_slab)
    first_sum = (both << 16) >> 16
    second_sum = (both - first_sum) >> 16
    if HALVES:
        total, second = zero - OFFSET * first_sum, zero - OFFSET * second_sum
    else:
        total = zero - OFFSET * (first_sum + second_sum)
    total = _dot(lines[0], x01.to(tl.int32), total, SIGNED)
    total = _dot(lines[1], (x01 >> 32).to(tl.int32), total, SIGNED)
    total = _dot(lines[2], x23.to(tl.int32), total, SIGNED)
    total = _dot(lines[3], (x23 >> 32).to(tl.int32), total, SIGNED)
    if not HALVES:
        second = total
    second = _dot(lines[4], x45.to(tl.int32), second, SIGNED)
    second = _dot(lines[5], (x45 >> 32).to(tl.int32), second, SIGNED)
    second = _dot(lines[6], x67.to(tl.int32), second, SIGNED)
    second = _dot(lines[7], (x67 >> 32).to(tl.int32), second, SIGNED)
    if HALVES:
        value = scale * total.to(tl.float32) + second_scale * second.to(tl.float32)
        if MINIMUMS:
            value -= minimum * first_sum.to(tl.float32) + second_minimum * second_sum.to(tl.float32)
    else:
        value = scale * second.to(tl.float32)
        if MINIMUMS:
            value -= minimum * (first_sum + second_sum).to(tl.float32)
    return value * x_scale


@triton.jit
def stored_tile(
    base, panels, slab, row, SLAB_COUNT: tl.constexpr, FORMAT: tl.constexpr, SUPERBLOCK_BYTES: tl.constexpr
):
    """Load a tile that is multiplied later: 20 tensors, for `times_tile`. Arguments as in `add_products`."""
    block = slab // 8
    within = slab % 8
    panel = panels + block * SUPERBLOCK_BYTES
    if SLAB_COUNT % 8 == 0:
        slabs: tl.constexpr = 8
    else:
        slabs = tl.minimum(SLAB_COUNT - block * 8, 8)
    a0, a1, a2 = stored_lines(base, panel, within, row, slabs, 0, FORMAT)
    b0, b1, b2 = stored_lines(base, panel, within, row, slabs, 1, FORMAT)
    c0, c1, c2 = stored_lines(base, panel, within, row, slabs, 2, FORMAT)
    d0, d1, d2 = stored_lines(base, panel, within, row, slabs, 3, FORMAT)
    e0, e1, e2, e3 = formats.stored_scales(base, panel, within, 0, row, slabs, FORMAT)
    f0, f1, f2, f3 = e0, e1, e2, e3
    if halves(FORMAT):
        f0, f1, f2, f3 = formats.stored_scales(base, panel, within, 2, row, slabs, FORMAT)
    return a0, a1, a2, b0, b1, b2, c0, c1, c2, d0, d1, d2, e0, e1, e2, e3, f0, f1, f2, f3


@triton.jit
def lines_of_tile(tile, row, J: tl.constexpr, FORMAT: tl.constexpr):
    """Lines 2J and 2J + 1 of each slab of a tile from `stored_tile`: see `read_lines`."""
    return read_lines(tile[3 * J], tile[3 * J + 1], tile[3 * J + 2], row, J, FORMAT)


@triton.jit
def scales_of_tile(tile, HALF: tl.constexpr, FORMAT: tl.constexpr):
    """Scale and minimum of each slab's first or second half, of a tile from `stored_tile`."""
    first: tl.constexpr = 12 + 4 * HALF
    return formats.read_scales(tile[first], tile[first + 1], tile[first + 2], tile[first + 3], FORMAT)


@triton.jit
def times_tile(tile, row, x_slab, inside, codes, scales, code_sums, FORMAT: tl.constexpr):
    """Multiply a tile from `stored_tile` by the slabs x_slab [S, 1] of x: float32 [S, N]."""
    line0, line1 = lines_of_tile(tile, row, 0, FORMAT)
    line2, line3 = lines_of_tile(tile, row, 1, FORMAT)
    line4, line5 = lines_of_tile(tile, row, 2, FORMAT)
    line6, line7 = lines_of_tile(tile, row, 3, FORMAT)
    scale, minimum = scales_of_tile(tile, 0, FORMAT)
    second_scale, second_minimum = scale, minimum
    if halves(FORMAT):
        second_scale, second_minimum = scales_of_tile(tile, 1, FORMAT)
    whole = (line0, line1, line2, line3, line4, line5, line6, line7)
    return _times_row(
        whole, scale, minimum, second_scale, second_minimum, x_slab, inside, codes, scales, code_sums, FORMAT
    )


@triton.jit
def add_products(
    sums,  # a tuple of M tensors [S, N] float32
    x_rows,  # a tuple of M scalars: rows of x
    count,  # how many of them are wanted
    codes,  # pointer of x's codes
    scales,
    code_sums,
    base,
    panels,  # [1, N] byte offsets
    slab,  # [S, 1] its number in the whole row, below SLAB_COUNT
    inside,  # [S, 1] whether the row has this slab; others are multiplied with zero
    row,  # [1, N] 0..15
    M: tl.constexpr,
    SKIPS: tl.constexpr,  # whether rows from `count` on are left out; otherwise they are computed like the others
    SLAB_COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
):
    """Add the products of the tile with M rows of x to `sums`. The order of each sum depends on its own row alone."""
    block = slab // 8
    within = slab % 8
    panel = panels + block * SUPERBLOCK_BYTES
    if SLAB_COUNT % 8 == 0:
        slabs: tl.constexpr = 8
    else:
        slabs = tl.minimum(SLAB_COUNT - block * 8, 8)
    line0, line1 = lines(base, panel, within, row, slabs, 0, FORMAT)
    line2, line3 = lines(base, panel, within, row, slabs, 1, FORMAT)
    line4, line5 = lines(base, panel, within, row, slabs, 2, FORMAT)
    line6, line7 = lines(base, panel, within, row, slabs, 3, FORMAT)
    scale, minimum = formats.scales(base, panel, within, 0, row, slabs, FORMAT)
    second_scale, second_minimum = scale, minimum
    if halves(FORMAT):
        second_scale, second_minimum = formats.scales(base, panel, within, 2, row, slabs, FORMAT)
    tile = (line0, line1, line2, line3, line4, line5, line6, line7)
    result = ()
    for m in tl.static_range(M):
        x_slab = x_rows[m] * SLAB_COUNT + slab
        added = sums[m]
        if SKIPS and m > 0:
            if m < count:
                added += _times_row(
                    tile, scale, minimum, second_scale, second_minimum, x_slab, inside, codes, scales, code_sums, FORMAT
                )
        else:
            added += _times_row(
                tile, scale, minimum, second_scale, second_minimum, x_slab, inside, codes, scales, code_sums, FORMAT
            )
        result = result + (added,)
    return result

"""What the bytes of packed weights mean, for Triton kernels: csrc/formats/panel_layout.h, one superblock at a time.

A superblock of 256 columns is a tile of 32 *words* by N rows. Word w = 4 * slab + j of a row stands for its columns
8w .. 8w + 7; *part* i of the tile, [32, N], holds column 8w + i of each word. So in every format the eight parts come
from the same words by constant shifts. A product over 256 columns is the sum of eight products: each part times its
columns of x. A shorter superblock reads its last slab in place of the missing ones, and the caller multiplies these
with zeros. The torch twin is panel_layout.py.
"""

from ktqueue.operators.gpu.kernels.operation import INTERPRETED, tl, triton


@triton.jit
def number(word, FIRST: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Return bits FIRST .. FIRST + BITS - 1 of a word (at most 8 bits) minus OFFSET, as an exact float32.

    The bits stay in place, in the mantissa of a number from 2^23 on. That takes a logical operation and a multiply-add;
    a shift, a mask and a conversion from integer would be three instructions, at half the speed or less.
    """
    low: tl.constexpr = FIRST if FIRST + BITS <= 23 else FIRST - 16
    if low != FIRST:
        word = word >> 16
    mask: tl.constexpr = ((1 << BITS) - 1) << low
    # Written separately, "and" and "or" with constants become two instructions.
    bits = tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [word, mask, 0x4B000000], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.fma(bits.to(tl.float32, bitcast=True), 2.0**-low, -(2.0 ** (23 - low)) - OFFSET)


@triton.jit
def _unsigned(byte):
    return number(byte.to(tl.int32), 0, 8, 0)


@triton.jit
def _signed(byte):
    return number(byte.to(tl.int32) ^ 128, 0, 8, 128)


@triton.jit
def spread(bits):
    """Spread the lowest four bits: bit i becomes the lowest bit of byte i."""
    return ((bits & 15) * 0x00204081) & 0x01010101


@triton.jit
def words(base, index):
    """Load int32 number `index` from `base`, a pointer to bytes."""
    return tl.load(base.to(tl.pointer_type(tl.int32)) + index)


@triton.jit
def _halves(base, index):
    """Load float16 number `index` from `base`, a pointer to bytes, as float32."""
    return tl.load(base.to(tl.pointer_type(tl.float16)) + index).to(tl.float32)


@triton.jit
def _e4m3(bits):
    """Return numbers of E4M3, whose bits are those of a float32 with an exponent that is smaller by 120."""
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _pair_words(base, panel, slab, word, row, start):
    """Load lines 2j and 2j + 1 of a plane of bit pairs: the lowest four bits of each byte.

    Words of odd j need a shift that words of even j do not. Masked loads express that without a tensor of shifts: the
    compiler loads directly into the registers of a product if everything else is loads, constants and arithmetic.
    """
    group = word % 4
    source = base.to(tl.pointer_type(tl.int32)) + ((panel + start) // 4 + (slab * 2 + group // 2) * 16 + row)
    even = tl.load(source, mask=group % 2 == 0, other=0)
    odd = tl.load(source, mask=group % 2 == 1, other=0)
    return (even & 0x0F0F0F0F) | ((odd >> 4) & 0x0F0F0F0F)


@triton.jit
def _bit_bytes(base, panel, slab, word, row, start):
    """Load the bits of lines 2j (the lowest four) and 2j + 1 of a plane of bits. Bit i belongs to part i."""
    byte = panel + start + slab * 64 + word % 4 * 16 + row // 2
    even, odd = tl.load(base + byte).to(tl.int32), tl.load(base + byte + 8).to(tl.int32)
    shift = row % 2 * 4
    return ((even >> shift) & 15) | (((odd >> shift) & 15) << 4)


@triton.jit
def row_bit(base, panel, slab, word, row, start):
    """Load the bit that a plane of deltas has for each word: 0 or 1."""
    byte = panel + start + slab * 8 + word % 4 * 2 + row // 8
    return (tl.load(base + byte).to(tl.int32) >> (row % 8)) & 1


@triton.jit
def planes(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr):
    """Load the codes of a superblock, two int32 [32, N], for `part`.

    base: scalar uint8 pointer; panel: byte offsets [1, N] of the superblock in each row's panel; row: [1, N] 0..15;
    word: [32, 1]; slab: [32, 1], the slab of each word; slabs: how many slabs this superblock has.
    """
    index = panel // 4 + (slab * 4 + word % 4) * 16 + row
    if FORMAT == "Q8_0":
        index = panel // 4 + (slab * 8 + word % 4 * 2) * 16 + row
        first, second = words(base, index), words(base, index + 16)
    elif FORMAT == "FP8":
        index = panel // 4 + slab // 4 * 528 + (slab % 4 * 8 + word % 4 * 2) * 16 + row
        first, second = words(base, index), words(base, index + 16)
    elif (FORMAT == "Q5_K") or (FORMAT == "Q5_1"):
        first, second = words(base, index), _bit_bytes(base, panel, slab, word, row, 256 * slabs)
    elif FORMAT == "Q6_K":
        first, second = words(base, index), _pair_words(base, panel, slab, word, row, 256 * slabs)
    elif FORMAT == "IQ1_M":
        first = _pair_words(base, panel, slab, word, row, 0)
        second = row_bit(base, panel, slab, word, row, 128 * slabs)
    elif (FORMAT == "Q3_K") or (FORMAT == "IQ2_S"):
        first = _pair_words(base, panel, slab, word, row, 0)
        second = _bit_bytes(base, panel, slab, word, row, 128 * slabs)
    elif FORMAT == "Q2_K":
        first = _pair_words(base, panel, slab, word, row, 0)
        second = first
    else:
        first = words(base, index)
        second = first
    return first, second


@triton.jit
def _further_scales(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr):
    """Load the scales of formats that have no scale of scales in bytes, float32 [32, N]."""
    half = word % 4 // 2
    if FORMAT == "Q2_K":
        start = panel + 128 * slabs
        both = tl.load(base + start + slab * 32 + half * 16 + row).to(tl.int32)
        shared = (start + 32 * slabs) // 2 + row
        scale = number(both, 0, 4, 0) * _halves(base, shared)
        minimum = number(both, 4, 4, 0) * _halves(base, shared + 16)
    elif FORMAT == "IQ4_XS":
        start = panel + 256 * slabs
        scale = _signed(tl.load(base + start + slab * 16 + row))
        scale *= _halves(base, (start + 16 * slabs) // 2 + row)
        minimum = tl.zeros_like(scale)
    elif (FORMAT == "IQ3_XXS") or (FORMAT == "IQ3_S"):
        start = panel + 256 * slabs
        scale = _unsigned(tl.load(base + start + slab * 16 + row))
        scale *= _halves(base, (start + 16 * slabs) // 2 + row) * (1.0 if FORMAT == "IQ3_S" else 0.5)
        minimum = tl.zeros_like(scale)
    elif (FORMAT == "IQ2_S") or (FORMAT == "IQ1_M"):
        start = panel + (192 if FORMAT == "IQ2_S" else 136) * slabs
        both = tl.load(base + start + slab * 16 + row).to(tl.int32)
        scale = number(both >> (4 * half), 0, 4, 0) + 0.5
        scale *= _halves(base, (start + 16 * slabs) // 2 + row) * 0.25
        minimum = tl.zeros_like(scale)
    elif (FORMAT == "Q4_1") or (FORMAT == "Q5_1"):
        start = (panel + (256 + 64 * (FORMAT == "Q5_1")) * slabs) // 2
        scale = _halves(base, start + slab * 16 + row)
        minimum = -_halves(base, start + (slabs + slab) * 16 + row)
    elif FORMAT == "UINT4":
        start = panel + 256 * slabs
        scale = _halves(base, start // 2 + slab * 16 + row)
        minimum = scale * _unsigned(tl.load(base + start + 32 * slabs + slab * 16 + row))
    elif FORMAT == "FP8":
        index = panel // 4 + slab // 4 * 528 + 512 + row
        scale = tl.load(base.to(tl.pointer_type(tl.float32)) + index)
        minimum = tl.zeros_like(scale)
    elif FORMAT == "NVFP4":
        start = panel + 256 * slabs
        scale = _e4m3(tl.load(base + start + slab * 32 + half * 16 + row).to(tl.int32) << 20) * 0.5
        factors = base.to(tl.pointer_type(tl.float32)) + (start + 32 * slabs) // 4 + row
        factor, rest = tl.load(factors), tl.load(factors + 16)
        if INTERPRETED:  # whose fma rounds twice
            scale = (scale.to(tl.float64) * (factor.to(tl.float64) + rest.to(tl.float64))).to(tl.float32)
        else:
            scale = tl.fma(scale, factor, scale * rest)
        minimum = tl.zeros_like(scale)
    elif FORMAT == "MXFP4":
        exponent = tl.load(base + panel + 256 * slabs + slab * 16 + row).to(tl.int32)
        # 2^(e - 128) as the bits of a float, which is denormal if e < 2.
        bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        minimum = tl.zeros_like(scale)
    else:
        start = panel + (512 if FORMAT == "Q8_0" else 256) * slabs
        scale = _halves(base, start // 2 + slab * 16 + row)
        minimum = tl.zeros_like(scale)
    return scale, minimum


@triton.jit
def stored_scales(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr):
    """Load what `read_scales` makes scales of: those of each word, and those of the superblock."""
    half = word % 4 // 2
    halves = base.to(tl.pointer_type(tl.float16))
    if (FORMAT == "Q4_K") or (FORMAT == "Q5_K"):
        start = panel + (256 + 64 * (FORMAT == "Q5_K")) * slabs
        scale = tl.load(base + start + slab * 16 + row)
        minimum = tl.load(base + start + (slabs + slab) * 16 + row)
        shared = (start + 32 * slabs) // 2 + row
        of_scale, of_minimum = tl.load(halves + shared), tl.load(halves + shared + 16)
    elif (FORMAT == "Q6_K") or (FORMAT == "Q3_K"):
        start = panel + (384 if FORMAT == "Q6_K" else 192) * slabs
        scale = tl.load(base + start + slab * 32 + half * 16 + row)
        of_scale = tl.load(halves + (start + 32 * slabs) // 2 + row)
        minimum, of_minimum = scale, of_scale
    else:
        scale, minimum = _further_scales(base, panel, slab, word, row, slabs, FORMAT)
        of_scale, of_minimum = scale, minimum
    return scale, minimum, of_scale, of_minimum


@triton.jit
def read_scales(scale, minimum, of_scale, of_minimum, FORMAT: tl.constexpr):
    """Scale and minimum of each word, float32, with the same operations as GGUF's own dequantisation."""
    if (FORMAT == "Q4_K") or (FORMAT == "Q5_K"):
        scale = _unsigned(scale) * of_scale.to(tl.float32)
        minimum = _unsigned(minimum) * of_minimum.to(tl.float32)
    elif (FORMAT == "Q6_K") or (FORMAT == "Q3_K"):
        scale = _signed(scale) * of_scale.to(tl.float32)
        minimum = tl.zeros_like(scale)
    return scale, minimum


@triton.jit
def scales(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr):
    """Load scale and minimum of each word, float32 [32, N]."""
    scale, minimum, of_scale, of_minimum = stored_scales(base, panel, slab, word, row, slabs, FORMAT)
    return read_scales(scale, minimum, of_scale, of_minimum, FORMAT)


@triton.jit
def _iq4_value(code):
    """Look up the table of IQ4_NL and IQ4_XS. Each value plus 127 is a byte of two 64-bit constants."""
    table = tl.where(code < 8, 0x75695C4E3E2C1700, -0x0F273B4B5A677380)
    return ((table >> (8 * (code & 7)).to(tl.int64)) & 255).to(tl.float32) - 127.0


@triton.jit
def part(first, second, scale, minimum, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Decode part number PART of the weights, float32 [32, N]."""
    byte: tl.constexpr = 8 * (PART % 4)
    odd: tl.constexpr = PART // 4  # of the two lines
    nibble: tl.constexpr = byte + 4 * odd
    if FORMAT == "Q8_0":
        return scale * number(first if odd == 0 else second, byte, 8, 128)
    if FORMAT == "Q4_0":
        return scale * number(first, nibble, 4, 8)
    if FORMAT == "FP8":
        return scale * _e4m3((((first if odd == 0 else second) << (24 - byte)) >> 4) & -0x78100000)
    if (FORMAT == "Q4_K") or (FORMAT == "Q4_1") or (FORMAT == "UINT4"):
        return scale * number(first, nibble, 4, 0) - minimum
    if FORMAT == "Q2_K":
        return scale * number(first, byte + 2 * odd, 2, 0) - minimum
    if (FORMAT == "Q5_K") or (FORMAT == "Q5_1"):
        codes = ((first >> (4 * odd)) & 0x0F0F0F0F) | (spread(second >> (4 * odd)) << 4)
        return scale * number(codes, byte, 5, 0) - minimum
    if FORMAT == "Q6_K":
        codes = ((first >> (4 * odd)) & 0x0F0F0F0F) | (((second >> (2 * odd)) & 0x03030303) << 4)
        return scale * number(codes, byte, 6, 32)
    if FORMAT == "Q3_K":
        codes = ((first >> (2 * odd)) & 0x03030303) | (spread(second >> (4 * odd)) << 2)
        return scale * number(codes, byte, 3, 4)
    if FORMAT == "IQ2_S":
        magnitude = (first >> (byte + 2 * odd)) & 3  # 0, 1 and 2 are 8, 25 and 43
        value = (8 + 17 * magnitude + (magnitude >> 1)).to(tl.float32)
        return scale * tl.where((second >> (4 * odd + PART % 4)) & 1 == 1, -value, value)
    if FORMAT == "IQ1_M":
        return scale * (8 * ((first >> (byte + 2 * odd)) & 3) + 2 * second - 9).to(tl.float32)
    if FORMAT == "IQ3_S":
        return scale * (2.0 * number(first, nibble, 4, 0) - 15.0)
    code = (first >> nibble) & 15
    if FORMAT == "IQ3_XXS":  # 4 apart, but for the first and the last, which are 5 from their neighbours
        return scale * (4 * code - 30 + (code == 15).to(tl.int32) - (code == 0).to(tl.int32)).to(tl.float32)
    if (FORMAT == "MXFP4") or (FORMAT == "NVFP4"):
        # E2M1: take its exponent and mantissa as those of a float32, correct the bias (126 less), and double.
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return scale * (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38)
    return scale * _iq4_value(code)


@triton.jit
def float_part(base, panel, slab, word, row, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Load part number PART of weights that are stored as floats, float32 [32, N]."""
    column = slab * 32 + word % 4 * 8 + PART
    if FORMAT == "F32":
        return tl.load(base.to(tl.pointer_type(tl.float32)) + panel // 4 + column * 16 + row)
    if FORMAT == "F16":
        return _halves(base, panel // 2 + column * 16 + row)
    index = panel // 2 + (column // 2 * 16 + row) * 2 + PART % 2
    return tl.load(base.to(tl.pointer_type(tl.bfloat16)) + index).to(tl.float32)


@triton.jit
def _two_parts(
    base, panel, slab, word, row, first, second, scale, minimum, PART: tl.constexpr, FORMAT: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):  # fmt: skip
    """Decode parts PART and PART + 4, side by side."""
    if IS_FLOAT:
        low = float_part(base, panel, slab, word, row, PART, FORMAT)
        high = float_part(base, panel, slab, word, row, PART + 4, FORMAT)
    else:
        low = part(first, second, scale, minimum, PART, FORMAT)
        high = part(first, second, scale, minimum, PART + 4, FORMAT)
    return tl.join(low, high)


@triton.jit
def decoded(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Decode a superblock, float32 [32, N, 8]: columns 8w .. 8w + 7 of each row. Arguments as in `planes`."""
    first, second, scale, minimum = slab, slab, slab, slab  # not used of floats
    if not IS_FLOAT:
        first, second = planes(base, panel, slab, word, row, slabs, FORMAT)
        scale, minimum = scales(base, panel, slab, word, row, slabs, FORMAT)
    # The lowest bit of a part's number must become the last dimension.
    even = tl.join(
        _two_parts(base, panel, slab, word, row, first, second, scale, minimum, 0, FORMAT, IS_FLOAT),
        _two_parts(base, panel, slab, word, row, first, second, scale, minimum, 2, FORMAT, IS_FLOAT),
    )
    odd = tl.join(
        _two_parts(base, panel, slab, word, row, first, second, scale, minimum, 1, FORMAT, IS_FLOAT),
        _two_parts(base, panel, slab, word, row, first, second, scale, minimum, 3, FORMAT, IS_FLOAT),
    )
    return tl.reshape(tl.join(even, odd), (32, row.shape[1], 8))

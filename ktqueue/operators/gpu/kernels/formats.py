"""What the bytes of packed weights mean, for Triton kernels: the layout of csrc/formats/panel_layout.h, a superblock at
a time.

A superblock of 256 columns is seen as a tile of 32 *words* by N rows. Word w = 4 * slab + j of a row stands for its
columns 8w .. 8w + 7; *part* i of the tile, [32, N], holds column 8w + i of each. So whatever the format, the eight
parts come out of the same words by constant shifts, and a product over 256 columns is the sum of the products of eight
parts with the columns of x that they hold. A shorter superblock reads its last slab for those it lacks: the caller
multiplies these with zeros. Twin: panel_layout.py.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def number(word, AT: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Bits AT .. AT + BITS - 1 of a word (at most 8) as a float32, less OFFSET, exactly.

    They stay where they are, in the mantissa of a number from 2^23 on: a logical operation and a multiply-add, where a
    shift, a mask and a conversion from integer are three, at half the speed or less.
    """
    low: tl.constexpr = AT if AT + BITS <= 23 else AT - 16
    if low != AT:
        word = word >> 16
    mask: tl.constexpr = ((1 << BITS) - 1) << low
    if INTERPRETED:
        bits = (word & mask) | 0x4B000000
    else:  # said apart, "and" and "or" with constants become two instructions
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
    """The lowest four bits: bit i as the lowest of byte i."""
    return ((bits & 15) * 0x00204081) & 0x01010101


@triton.jit
def _words(base, at):
    return tl.load(base.to(tl.pointer_type(tl.int32)) + at)


@triton.jit
def _halves(base, at):
    return tl.load(base.to(tl.pointer_type(tl.float16)) + at).to(tl.float32)


@triton.jit
def _pair_words(base, panel, slab, word, row, start):
    """Lines 2j and 2j + 1 of a plane of bit pairs: in the lowest four bits of each byte.

    Words of odd j need a shift that those of even j do not. Loads that are masked say so without a tensor of shifts:
    the compiler loads right into the registers of a product where all else is loads, constants and arithmetic.
    """
    group = word % 4
    at = base.to(tl.pointer_type(tl.int32)) + ((panel + start) // 4 + (slab * 2 + group // 2) * 16 + row)
    even = tl.load(at, mask=group % 2 == 0, other=0)
    odd = tl.load(at, mask=group % 2 == 1, other=0)
    return (even & 0x0F0F0F0F) | ((odd >> 4) & 0x0F0F0F0F)


@triton.jit
def _bit_bytes(base, panel, slab, word, row, start):
    """Bits of lines 2j (the lowest four) and 2j + 1 of a plane of bits: bit i is that of part i."""
    at = panel + start + slab * 64 + word % 4 * 16 + row // 2
    even, odd = tl.load(base + at).to(tl.int32), tl.load(base + at + 8).to(tl.int32)
    shift = row % 2 * 4
    return ((even >> shift) & 15) | (((odd >> shift) & 15) << 4)


@triton.jit
def planes(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr):
    """The codes of a superblock, two int32 [32, N]: see `part`.

    base: scalar uint8 pointer; panel: byte offsets [1, N] of the superblock in each row's panel; row: [1, N] 0..15;
    word: [32, 1]; slab: [32, 1], that of the word, below `slabs`, which is how many this superblock has.
    """
    at = panel // 4 + (slab * 4 + word % 4) * 16 + row
    if FORMAT == "Q8_0":
        at = panel // 4 + (slab * 8 + word % 4 * 2) * 16 + row
        first, second = _words(base, at), _words(base, at + 16)
    elif FORMAT == "Q5_K":
        first, second = _words(base, at), _bit_bytes(base, panel, slab, word, row, 256 * slabs)
    elif FORMAT == "Q6_K":
        first, second = _words(base, at), _pair_words(base, panel, slab, word, row, 256 * slabs)
    elif FORMAT == "Q3_K":
        first = _pair_words(base, panel, slab, word, row, 0)
        second = _bit_bytes(base, panel, slab, word, row, 128 * slabs)
    elif FORMAT == "Q2_K":
        first = _pair_words(base, panel, slab, word, row, 0)
        second = first
    else:
        first = _words(base, at)
        second = first
    return first, second


@triton.jit
def scales(base, panel, slab, word, row, slabs, FORMAT: tl.constexpr):
    """Scale and minimum of each word, float32 [32, N], in the operations of GGUF's own dequantisation."""
    half = word % 4 // 2
    if (FORMAT == "Q4_K") or (FORMAT == "Q5_K"):
        start = panel + (256 + 64 * (FORMAT == "Q5_K")) * slabs
        scale = _unsigned(tl.load(base + start + slab * 16 + row))
        minimum = _unsigned(tl.load(base + start + (slabs + slab) * 16 + row))
        once = (start + 32 * slabs) // 2 + row
        scale, minimum = scale * _halves(base, once), minimum * _halves(base, once + 16)
    elif FORMAT == "Q2_K":
        start = panel + 128 * slabs
        both = tl.load(base + start + slab * 32 + half * 16 + row).to(tl.int32)
        once = (start + 32 * slabs) // 2 + row
        scale = number(both, 0, 4, 0) * _halves(base, once)
        minimum = number(both, 4, 4, 0) * _halves(base, once + 16)
    elif (FORMAT == "Q6_K") or (FORMAT == "Q3_K"):
        start = panel + (384 if FORMAT == "Q6_K" else 192) * slabs
        scale = _signed(tl.load(base + start + slab * 32 + half * 16 + row))
        scale *= _halves(base, (start + 32 * slabs) // 2 + row)
        minimum = tl.zeros_like(scale)
    elif FORMAT == "IQ4_XS":
        start = panel + 256 * slabs
        scale = _signed(tl.load(base + start + slab * 16 + row))
        scale *= _halves(base, (start + 16 * slabs) // 2 + row)
        minimum = tl.zeros_like(scale)
    elif FORMAT == "MXFP4":
        exponent = tl.load(base + panel + 256 * slabs + slab * 16 + row).to(tl.int32)
        # 2^(e - 128): the bits of a float, or of a denormal where e < 2.
        bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        minimum = tl.zeros_like(scale)
    else:
        start = panel + (512 if FORMAT == "Q8_0" else 256) * slabs
        scale = _halves(base, start // 2 + slab * 16 + row)
        minimum = tl.zeros_like(scale)
    return scale, minimum


@triton.jit
def _iq4_value(code):
    """The table of IQ4_NL and IQ4_XS: each value plus 127 is a byte of two constants of 64 bits."""
    table = tl.where(code < 8, 0x75695C4E3E2C1700, -0x0F273B4B5A677380)
    return ((table >> (8 * (code & 7)).to(tl.int64)) & 255).to(tl.float32) - 127.0


@triton.jit
def part(first, second, scale, minimum, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Part number PART of the weights, float32 [32, N]."""
    byte: tl.constexpr = 8 * (PART % 4)
    odd: tl.constexpr = PART // 4  # of the two lines
    nibble: tl.constexpr = byte + 4 * odd
    if FORMAT == "Q8_0":
        return scale * number(first if odd == 0 else second, byte, 8, 128)
    if FORMAT == "Q4_0":
        return scale * number(first, nibble, 4, 8)
    if FORMAT == "Q4_K":
        return scale * number(first, nibble, 4, 0) - minimum
    if FORMAT == "Q2_K":
        return scale * number(first, byte + 2 * odd, 2, 0) - minimum
    if FORMAT == "Q5_K":
        codes = ((first >> (4 * odd)) & 0x0F0F0F0F) | (spread(second >> (4 * odd)) << 4)
        return scale * number(codes, byte, 5, 0) - minimum
    if FORMAT == "Q6_K":
        codes = ((first >> (4 * odd)) & 0x0F0F0F0F) | (((second >> (2 * odd)) & 0x03030303) << 4)
        return scale * number(codes, byte, 6, 32)
    if FORMAT == "Q3_K":
        codes = ((first >> (2 * odd)) & 0x03030303) | (spread(second >> (4 * odd)) << 2)
        return scale * number(codes, byte, 3, 4)
    code = (first >> nibble) & 15
    if FORMAT == "MXFP4":
        # E2M1: its exponent and mantissa as those of a float32, whose bias differs by 126, and doubled.
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return scale * (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38)
    return scale * _iq4_value(code)


@triton.jit
def float_part(base, panel, slab, word, row, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Part number PART of weights that are stored as they are, float32 [32, N]."""
    column = slab * 32 + word % 4 * 8 + PART
    if FORMAT == "F32":
        return tl.load(base.to(tl.pointer_type(tl.float32)) + panel // 4 + column * 16 + row)
    if FORMAT == "F16":
        return _halves(base, panel // 2 + column * 16 + row)
    at = panel // 2 + (column // 2 * 16 + row) * 2 + PART % 2
    return tl.load(base.to(tl.pointer_type(tl.bfloat16)) + at).to(tl.float32)

// Numbers of bfloat16, two in a word, and their products on tensor cores.

#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64 = long long;

__device__ inline float low_float(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float high_float(uint32_t word) { return __uint_as_float(word & 0xFFFF0000); }
__device__ inline float bfloat16_as_float(uint16_t number) { return low_float(number); }

// Rounded to the nearest.
__device__ inline uint32_t two_bfloat16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline uint16_t as_bfloat16(float number) { return uint16_t(two_bfloat16(number, 0.0f)); }

// Add the product of 16 columns (PTX ISA, "Matrix Fragments for mma.m16n8k16"). Of the left operand, lane 4g + t of a
// warp has rows g and g + 8, of the right one row g, and of both columns 2t, 2t + 1, 2t + 8 and 2t + 9: a0 and a1 are
// the first two of both rows, a2 and a3 the others. Columns are multiplied in any order, if both operands have the
// same.
__device__ inline void multiply(float sums[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The product of 16 columns alone.
__device__ inline void product(float sums[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// Weights of a block's scores, beside a running maximum: see by_warpgroups.cu.

#pragma once

#include "warpgroup_products.cuh"

constexpr int BLOCK = 128;        // keys
constexpr float LOWEST = -1e30f;  // level before the first key
constexpr float SLACK = 8.0f;     // weights may grow to 2 ** SLACK before sums are multiplied

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline uint32_t rounded(float low, float high) {
#if IS_BFLOAT16
  return two_bfloat16(low, high);
#else
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#endif
}

struct Rows {                // of a lane: g and g + 8
  float level[2], total[2];  // weights are 2 ** (score - level); total: of this lane's keys
  int position[2];
};

__device__ __forceinline__ void mask(float (&scores)[BLOCK / 2], const Rows& rows, int first, int t) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int last = rows.position[r] - first - 2 * t;  // counted from this lane's first key
    int lowest = -BLOCK;
    if constexpr (WINDOW > 0) lowest = last + 1 - WINDOW;
    if constexpr (CHUNK > 0) lowest = max(lowest, rows.position[r] / CHUNK * CHUNK - first - 2 * t);
#pragma unroll
    for (int i = 0; i < BLOCK / 4; i++) {
      const int key = i / 2 * 8 + i % 2;
      bool is_seen = key <= last;
      if constexpr (WINDOW > 0 || CHUNK > 0) is_seen = is_seen && key >= lowest;
      if (!is_seen) scores[i / 2 * 4 + 2 * r + i % 2] = __int_as_float(0xFF800000);
    }
  }
}

// Make weights of scores. Returns whether a row has a new level, and what earlier weights of both are multiplied by.
__device__ __forceinline__ bool weigh(float (&scores)[BLOCK / 2], Rows& rows, float (&shrink)[2], int first,
                                      bool is_masked, int t) {
  if constexpr (HAS_CAP) {  // tanh(x) = 1 - 2 / (1 + e ** (2 x))
    constexpr float FACTOR = SCALE * 2.0f * LOG2_E / CAP;
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++)
      scores[i] = CAP / SCALE * (1.0f - __fdividef(2.0f, 1.0f + power_of_two(scores[i] * FACTOR)));
  }
  if (is_masked) mask(scores, rows, first, t);
  bool is_new = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float tops[4];
#pragma unroll
    for (int i = 0; i < 4; i++) tops[i] = fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]);
#pragma unroll
    for (int i = 4; i < BLOCK / 8; i++)
      tops[i % 4] = fmaxf(tops[i % 4], fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2)) * SCALE;
    const float before = rows.level[r];
    const float level = top > before + SLACK ? top : before;
    shrink[r] = power_of_two(before - level);
    is_new = is_new || level != before;
    rows.level[r] = level;
    float totals[2] = {rows.total[r] * shrink[r], 0.0f};
#pragma unroll
    for (int i = 0; i < BLOCK / 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = scores[4 * i + 2 * r + e];
        score = power_of_two(fmaf(score, SCALE, -level));
        totals[e] += score;
      }
    rows.total[r] = totals[0] + totals[1];
  }
  return is_new;
}

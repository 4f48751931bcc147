// Products of queries, keys and values on Hopper's tensor cores, and copies by maps: see by_warpgroups.cu.

#pragma once

#include "../kernels/hopper.cuh"

struct alignas(64) Map {  // CUtensorMap
  uint8_t bytes[128];
};

__device__ inline void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// turn: counted from 0 by who waits.
__device__ inline void wait_for_turn(uint32_t barrier, uint32_t turn) { wait(barrier, turn & 1); }

__device__ inline void copy(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
__device__ inline void copy_box(uint32_t to, const Map* map, uint32_t barrier, int column, int head, int key,
                                int page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(map), "r"(column), "r"(head), "r"(key), "r"(page), "r"(barrier)
      : "memory");
}

#if IS_BFLOAT16
#define TYPES ".f32.bf16.bf16 {"
#else
#define TYPES ".f32.f16.f16 {"
#endif
#define VALUES(width, names, left, right, ...)                                                                \
  asm volatile(                                                                                               \
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0;\n"                                                           \
      "wgmma.mma_async.sync.aligned.m64n" width "k16" TYPES names "}, {" left "}, " right ", adds, 1, 1, 1;}" \
      : __VA_ARGS__                                                                                           \
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values))

// Begin a product of 16 columns, or add it: sums[4i + 2r + e] is row g + 8r, key 8i + 2t + e.
template <bool ADDS>
__device__ inline void multiply_keys(float (&sums)[64], uint64 queries, uint64 keys) {
  asm volatile(
      "{.reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16" TYPES NAMES_64 "}, %64, %65, adds, 1, 1, 0, 0;}"
      : SIXTY_FOUR
      : "l"(queries), "l"(keys), "n"(ADDS));
}
// Begin to add a product of 16 keys: sums[4i + 2r + e] is row g + 8r, column 8i + 2t + e.
__device__ inline void multiply_values(float (&sums)[32], const uint32_t* weights, uint64 values) {
  VALUES("64", NAMES_32, "%32,%33,%34,%35", "%36", THIRTY_TWO);
}
__device__ inline void multiply_values(float (&sums)[64], const uint32_t* weights, uint64 values) {
  VALUES("128", NAMES_64, "%64,%65,%66,%67", "%68", SIXTY_FOUR);
}

// Products of Hopper's tensor cores, copies by maps, and barriers in shared memory: see by_warpgroups.cu.

#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

struct alignas(64) Map {  // CUtensorMap
  uint8_t bytes[128];
};

__device__ inline void begin_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Arrive when all copies of this thread have.
__device__ inline void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity & 1)
      : "memory");
}
__device__ inline void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void copy(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
__device__ inline void copy_box(uint32_t to, const Map* map, uint32_t barrier, int column, int head, int key,
                                int page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(to), "l"(map), "r"(column), "r"(head), "r"(key), "r"(page), "r"(barrier)
      : "memory");
}

// An operand in panels of 64 columns, rows of 128 bytes, of which 16 bytes lie where their number, by exclusive or with
// the row's, says. panel: bytes from one panel to the next, if columns are what the product has, not what it adds.
__device__ inline uint64 operand(uint32_t address, int panel = 16) {
  return (address >> 4 & 0x3FFF) | uint64(panel >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SUMS_32 SIXTEEN(0), SIXTEEN(16)
#define SUMS_64 SUMS_32, SIXTEEN(32), SIXTEEN(48)
#define NAMES_32                                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
  "%28,%29,%30,%31"
#define NAMES_64                                                                                               \
  NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
           "%56,%57,%58,%59,%60,%61,%62,%63"
#if IS_BFLOAT16
#define TYPES ".f32.bf16.bf16 {"
#else
#define TYPES ".f32.f16.f16 {"
#endif
#define VALUES(width, names, left, right, ...)                                                                         \
  asm volatile("{.reg .pred adds; setp.eq.u32 adds, 0, 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n" width "k16" TYPES names "}, {" left "}, " right ", adds, 1, 1, 1;}" \
               : __VA_ARGS__                                                                                           \
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values))

// Begin a product of 16 columns, or add it: sums[4i + 2r + e] is row g + 8r, key 8i + 2t + e.
template <bool ADDS>
__device__ inline void multiply_keys(float (&sums)[64], uint64 queries, uint64 keys) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16" TYPES NAMES_64 "}, %64, %65, adds, 1, 1, 0, 0;}"
               : SUMS_64
               : "l"(queries), "l"(keys), "n"(ADDS));
}
// Begin to add a product of 16 keys: sums[4i + 2r + e] is row g + 8r, column 8i + 2t + e.
__device__ inline void multiply_values(float (&sums)[32], const uint32_t* weights, uint64 values) {
  VALUES("64", NAMES_32, "%32,%33,%34,%35", "%36", SUMS_32);
}
__device__ inline void multiply_values(float (&sums)[64], const uint32_t* weights, uint64 values) {
  VALUES("128", NAMES_64, "%64,%65,%66,%67", "%68", SUMS_64);
}
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int N>
__device__ inline void hold(float (&numbers)[N]) {  // none is read before, or written later
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(numbers[i])::"memory");
}

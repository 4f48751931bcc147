// What sources for Hopper have in common: barriers in shared memory, products of warpgroups, and their operands (PTX
// ISA, "mbarrier" and "wgmma.mma_async").

#pragma once

#include "bfloat16.cuh"

using uint64 = unsigned long long;

__device__ inline void begin_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
// Arrive when all copies of this thread have.
__device__ inline void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// parity: 0 or 1, in turns.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An operand in panels of 64 columns, rows of 128 bytes, of which 16 bytes lie where their number, by exclusive or with
// the row's, says. panel: bytes from one panel to the next, if columns are what the product has, not what it adds.
__device__ inline uint64 operand(uint32_t address, int panel = 16) {
  return (address >> 4 & 0x3FFF) | uint64(panel >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define THIRTY_TWO SIXTEEN(0), SIXTEEN(16)
#define SIXTY_FOUR THIRTY_TWO, SIXTEEN(32), SIXTEEN(48)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_48 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_64 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

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

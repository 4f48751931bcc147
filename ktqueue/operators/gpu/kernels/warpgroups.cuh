// What both kernels of warpgroups have: see expert_warpgroups.cu and expert_wide_warpgroups.cu.
//
// A warp decodes panels of 16 rows to bfloat16 on the way to the tensor cores. Four warps are a warpgroup, and multiply
// by rows of x in shared memory (PTX ISA, "wgmma.mma_async"). Their left operand is in registers: lane 4g + t of a warp
// has the rows g and g + 8 of its panel, and of each 16 columns 2t, 2t + 1, 2t + 8 and 2t + 9. Columns are multiplied
// in any order, if both operands have the same, and rows may be stored where they belong. So a lane takes rows 2g and
// 2g + 1 and of a slab columns 8t .. 8t + 7, which lie together in the packed planes, and column 8t + 4s + 2h + e of a
// slab of x lies at 16s + 8h + 2t + e.

#pragma once

#include "activation.cuh"
#include "superblock.cuh"

constexpr int BLOCKS = COLUMNS / 256;
constexpr int CHUNK = 64;  // columns of x that are copied at once: two slabs, 128 bytes of a row
constexpr int CHUNKS = COLUMNS / CHUNK;
constexpr int CHUNK_BYTES = PAIRS * 2 * CHUNK;

// The right operand: rows of 128 bytes, of which 16 bytes lie where their number, by exclusive or with the row's, says.
__device__ inline unsigned long long right_operand(uint32_t address) {
  return (address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_48 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_64 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_80 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_96 NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_112 NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_128 NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SIXTY_FOUR SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define MULTIPLY(width, names, left_names, right_name, ...)                                                    \
  asm volatile(                                                                                                \
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0;\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n" width "k16.f32.bf16.bf16 {" names "}, {" left_names "}, " right_name \
      ", adds, 1, 1, 0;}"                                                                                      \
      : __VA_ARGS__                                                                                            \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

// Begin to add the product of 16 columns: sums[4i + 2r + e] is row 2g + r of a panel, pair 8i + 2t + e.
template <int N>
__device__ inline void multiply(float (&sums)[N / 2], const uint32_t left[4], unsigned long long right) {
  if constexpr (N == 32)
    MULTIPLY("32", NAMES_16, "%16,%17,%18,%19", "%20", SIXTEEN(0));
  else if constexpr (N == 64)
    MULTIPLY("64", NAMES_32, "%32,%33,%34,%35", "%36", SIXTEEN(0), SIXTEEN(16));
  else if constexpr (N == 96)
    MULTIPLY("96", NAMES_48, "%48,%49,%50,%51", "%52", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32));
  else if constexpr (N == 128)
    MULTIPLY("128", NAMES_64, "%64,%65,%66,%67", "%68", SIXTY_FOUR);
  else if constexpr (N == 160)
    MULTIPLY("160", NAMES_80, "%80,%81,%82,%83", "%84", SIXTY_FOUR, SIXTEEN(64));
  else if constexpr (N == 192)
    MULTIPLY("192", NAMES_96, "%96,%97,%98,%99", "%100", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80));
  else if constexpr (N == 224)
    MULTIPLY("224", NAMES_112, "%112,%113,%114,%115", "%116", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80), SIXTEEN(96));
  else
    MULTIPLY("256", NAMES_128, "%128,%129,%130,%131", "%132", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80), SIXTEEN(96),
             SIXTEEN(112));
}

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

struct Results {
  const float *pair_weights, *bias, *up_bias;
  uint16_t* out;
};

// Up to PAIRS pairs of an expert are a list. ends: of the lists of an expert, counted over all experts. By one warp.
__device__ inline void count_lists(int* ends, const int* counts, int lane) {
  int before = 0;
  for (int first = 0; first < EXPERTS; first += 32) {
    const int expert = first + lane;
    int end = expert < EXPERTS ? (counts[expert] + PAIRS - 1) / PAIRS : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, end, distance);
      if (lane >= distance) end += other;
    }
    end += before;
    if (expert < EXPERTS) ends[expert] = end;
    before = __shfl_sync(0xFFFFFFFF, end, 31);
  }
}

struct List {
  int expert, done, live;  // done: pairs of the expert in lists before
};

// The lists of an expert have about as many pairs as each other.
__device__ inline List find_list(const int* ends, const int* counts, int list) {
  int expert = 0, last = EXPERTS - 1;
  while (expert < last) {
    const int middle = (expert + last) / 2;
    if (ends[middle] > list)
      last = middle;
    else
      expert = middle + 1;
  }
  const int first = expert > 0 ? ends[expert - 1] : 0, lists = ends[expert] - first, count = counts[expert];
  const int size = ((count + lists - 1) / lists + 7) / 8 * 8, done = (list - first) * size;
  return {expert, done, min(size, count - done)};
}

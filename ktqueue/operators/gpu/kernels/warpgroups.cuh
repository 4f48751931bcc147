// Products by warpgroups, of lists of pairs: see expert_warpgroups.cu.
//
// A warp decodes panels of 16 rows to bfloat16 on the way to the tensor cores. Four warps are a warpgroup, and multiply
// by rows of x in shared memory (PTX ISA, "wgmma.mma_async"). Their left operand is in registers: lane 4g + t of a warp
// has the rows g and g + 8 of its panel, and of each 16 columns 2t, 2t + 1, 2t + 8 and 2t + 9. Columns are multiplied
// in any order, if both operands have the same, and rows may be stored where they belong. So a lane takes rows 2g and
// 2g + 1 and of a slab columns 8t .. 8t + 7, which lie together in the packed planes, and column 8t + 4s + 2h + e of a
// slab of x lies at 16s + 8h + 2t + e.

#pragma once

#include "activation.cuh"
#include "hopper.cuh"
#include "superblock.cuh"

constexpr int BLOCKS = COLUMNS / 256;
constexpr int CHUNK = 64;  // columns of x that are copied at once: two slabs, 128 bytes of a row
constexpr int CHUNKS = COLUMNS / CHUNK;
constexpr int CHUNK_BYTES = PAIRS * 2 * CHUNK;

#define NAMES_72 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NAMES_80 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_96 NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_112 NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_120 NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define NAMES_128 NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MULTIPLY(width, names, left_names, right_name, ...)                                                    \
  asm volatile(                                                                                                \
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0;\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n" width "k16.f32.bf16.bf16 {" names "}, {" left_names "}, " right_name \
      ", adds, 1, 1, 0;}"                                                                                      \
      : __VA_ARGS__                                                                                            \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

// Begin to add the product of 16 columns: sums[4i + 2r + e] is row 2g + r of a panel, pair 8i + 2t + e.
template <int N>
__device__ inline void multiply(float (&sums)[N / 2], const uint32_t left[4], uint64 right) {
  if constexpr (N == 32)
    MULTIPLY("32", NAMES_16, "%16,%17,%18,%19", "%20", SIXTEEN(0));
  else if constexpr (N == 64)
    MULTIPLY("64", NAMES_32, "%32,%33,%34,%35", "%36", THIRTY_TWO);
  else if constexpr (N == 96)
    MULTIPLY("96", NAMES_48, "%48,%49,%50,%51", "%52", THIRTY_TWO, SIXTEEN(32));
  else if constexpr (N == 128)
    MULTIPLY("128", NAMES_64, "%64,%65,%66,%67", "%68", SIXTY_FOUR);
  else if constexpr (N == 144)
    MULTIPLY("144", NAMES_72, "%72,%73,%74,%75", "%76", SIXTY_FOUR, EIGHT(64));
  else if constexpr (N == 160)
    MULTIPLY("160", NAMES_80, "%80,%81,%82,%83", "%84", SIXTY_FOUR, SIXTEEN(64));
  else if constexpr (N == 192)
    MULTIPLY("192", NAMES_96, "%96,%97,%98,%99", "%100", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80));
  else if constexpr (N == 224)
    MULTIPLY("224", NAMES_112, "%112,%113,%114,%115", "%116", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80), SIXTEEN(96));
  else if constexpr (N == 240)
    MULTIPLY("240", NAMES_120, "%120,%121,%122,%123", "%124", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80), SIXTEEN(96),
             EIGHT(112));
  else if constexpr (N == 256)
    MULTIPLY("256", NAMES_128, "%128,%129,%130,%131", "%132", SIXTY_FOUR, SIXTEEN(64), SIXTEEN(80), SIXTEEN(96),
             SIXTEEN(112));
  else {  // no product has more than 256 columns
    multiply<128>(reinterpret_cast<float (&)[64]>(sums), left, right);
    multiply<N - 128>(reinterpret_cast<float (&)[N / 2 - 64]>(sums[64]), left, right + 128 * 2 * CHUNK / 16);
  }
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

struct Results {
  const float *bias, *up_bias;
  uint16_t* out;
};

// The pairs of an expert, divided into lists: some of PAIRS, and up to two of other widths. Products have no more
// columns than that.
struct Division {
  int whole, first, second;
  __device__ int lists() const { return whole + (first > 0) + (second > 0); }
};
__device__ inline Division divide(int count) {
  constexpr int widths[] = {WIDTHS}, number = sizeof(widths) / sizeof(int);
  const int whole = count > 2 * PAIRS ? (count - PAIRS - 1) / PAIRS : 0, rest = count - whole * PAIRS;
  Division best = {whole, PAIRS, PAIRS};
#pragma unroll
  for (int i = number - 1; i >= 0; i--)
#pragma unroll
    for (int k = i; k >= 0; k--)
      if (widths[i] + widths[k] >= rest && widths[i] + widths[k] < best.first + best.second)
        best.first = widths[i], best.second = widths[k];
  if (rest <= PAIRS) best.first = rest, best.second = 0;
  return best;
}

// ends: of the lists of an expert, counted over all experts. By one warp.
__device__ inline void count_lists(int* ends, const int* counts, int lane) {
  int before = 0;
  for (int first = 0; first < EXPERTS; first += 32) {
    const int expert = first + lane;
    int end = expert < EXPERTS ? divide(counts[expert]).lists() : 0;
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

__device__ inline List find_list(const int* ends, const int* counts, int list) {
  int expert = 0, last = EXPERTS - 1;
  while (expert < last) {
    const int middle = (expert + last) / 2;
    if (ends[middle] > list)
      last = middle;
    else
      expert = middle + 1;
  }
  const int number = expert > 0 ? list - ends[expert - 1] : list, count = counts[expert];
  const Division division = divide(count);
  const int done = min(number, division.whole) * PAIRS + (number > division.whole ? division.first : 0);
  const int size = number < division.whole ? PAIRS : number == division.whole ? division.first : division.second;
  return {expert, done, min(size, count - done)};
}

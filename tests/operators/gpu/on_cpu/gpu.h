// A GPU on one CPU thread: enough of one for kernels in CUDA C++ to compute real results. See emulated.py.
//
// Each lane is a context of its own. It runs until it waits for others of its warp, its program or its cluster. The
// programs of one cluster run at once, one cluster after the other. Copies are done where they begin. So this finds
// wrong results, not a missing wait. All is static: two libraries in one process must not share it.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

using std::max;
using std::min;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }

namespace emulated {

constexpr uint32_t LAUNCHED_BYTES = 228 << 10, DECLARED_BYTES = 28 << 10;  // of shared memory of a program
constexpr uint32_t SHARED_BYTES = LAUNCHED_BYTES + DECLARED_BYTES;
constexpr int STACK_BYTES = 1 << 17;

struct Group {  // of lanes that wait for each other
  int members = 0, arrived = 0, turn = 0;
};
struct Warp {
  Group group;
  uint32_t given[2][32][8];  // by the lanes, in turns: a lane reads those of one turn while others give the next
};
struct Lane {
  ucontext_t context;
  std::vector<char> stack;
  bool has_ended = false;
  int cluster_turn = 0;
};
struct Place {
  unsigned x, y, z;
};

static std::vector<uint8_t> shared_memory;  // of all programs of the cluster; addresses are places in it
static std::vector<Lane> lanes;
static std::vector<Warp> warps;
static std::vector<Group> programs;
static std::vector<std::array<Group, 16>> named_barriers;  // of each program
static Group cluster;
static ucontext_t scheduler;
static int current, threads;
static std::function<void()> run_lane;

static int program() { return current / threads; }  // in its cluster
static uint8_t* memory_of_program() { return shared_memory.data() + program() * SHARED_BYTES; }
// Where a program has the variable that the source declares as number `variable`.
static uint8_t* declared(size_t variable, size_t bytes) {
  static std::vector<size_t> places;
  static size_t used = 0;
  if (variable >= places.size()) places.resize(variable + 1, DECLARED_BYTES);
  if (places[variable] == DECLARED_BYTES) places[variable] = used, used += (bytes + 15) / 16 * 16;
  if (used > DECLARED_BYTES) std::abort();
  return memory_of_program() + LAUNCHED_BYTES + places[variable];
}
static void let_others_run() { swapcontext(&lanes[current].context, &scheduler); }
static void arrive(Group& group) {
  if (++group.arrived == group.members) group.arrived = 0, group.turn++;
}
static void wait_for(const Group& group, int turn) {
  while (group.turn == turn) let_others_run();
}
static void meet(Group& group) {
  const int turn = group.turn;
  arrive(group);
  wait_for(group, turn);
}
// What all lanes of the warp give.
template <typename... Words>
static const uint32_t (&exchange(Words... words))[32][8] {
  Warp& warp = warps[current / 32];
  auto& given = warp.given[warp.group.turn % 2];
  const uint32_t own[] = {words...};
  std::copy(std::begin(own), std::end(own), given[current % 32]);
  meet(warp.group);
  return given;
}

static void enter() {
  run_lane();
  lanes[current].has_ended = true;
  let_others_run();
}
}  // namespace emulated

static emulated::Place threadIdx, blockIdx, gridDim;

namespace emulated {
struct Launch {
  int columns, rows;  // of programs
  int together;       // programs in a row that are a cluster
  int threads;        // of a program
};
// Run all programs until they have ended.
static void launch(Launch how, std::function<void()> run) {
  threads = how.threads, run_lane = run, gridDim = {unsigned(how.columns), unsigned(how.rows), 1};
  for (int first = 0; first < how.columns * how.rows; first += how.together) {
    const int together = how.together;
    const int count = together * threads;
    shared_memory.assign(size_t(together) * SHARED_BYTES, 0xFF);
    lanes.assign(count, {});
    warps.assign(count / 32, {});
    programs.assign(together, {threads, 0, 0});
    named_barriers.assign(together, {});
    cluster = {count, 0, 0};
    for (Warp& warp : warps) warp.group.members = 32;
    for (Lane& lane : lanes) {
      lane.stack.resize(STACK_BYTES);
      getcontext(&lane.context);
      lane.context.uc_stack = {lane.stack.data(), 0, lane.stack.size()};
      makecontext(&lane.context, enter, 0);
    }
    for (int left = count; left > 0;) {
      for (current = 0, left = 0; current < count; current++) {
        if (lanes[current].has_ended) continue;
        const int place = first + program();
        threadIdx = {unsigned(current % threads), 0, 0};
        blockIdx = {unsigned(place % how.columns), unsigned(place / how.columns), 0};
        swapcontext(&scheduler, &lanes[current].context);
        left += !lanes[current].has_ended;
      }
    }
  }
}
static float number(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}
static float low_half(uint32_t both) { return number(both << 16); }
static float high_half(uint32_t both) { return number(both & 0xFFFF0000); }
static uint32_t rounded(float value) {  // to bfloat16
  const uint32_t word = bits(value);
  return std::isnan(value) ? 0x7FFF : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}
static uint32_t two_rounded(float low, float high) { return rounded(low) | rounded(high) << 16; }
}  // namespace emulated

// ---- CUDA's functions

static void __syncthreads() { emulated::meet(emulated::programs[emulated::program()]); }
static void __syncwarp() { emulated::meet(emulated::warps[emulated::current / 32].group); }
static float __shfl_xor_sync(uint32_t, float value, int distance) {
  return emulated::number(emulated::exchange(emulated::bits(value))[emulated::current % 32 ^ distance][0]);
}
static int __shfl_xor_sync(uint32_t, int value, int distance) {
  return emulated::exchange(uint32_t(value))[emulated::current % 32 ^ distance][0];
}
static int __shfl_up_sync(uint32_t, int value, int distance) {
  const int lane = emulated::current % 32, from = lane < distance ? lane : lane - distance;
  return emulated::exchange(uint32_t(value))[from][0];
}
static uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const auto& of = emulated::exchange(value);
  for (const auto& words : of) value = max(value, words[0]);
  return value;
}
static uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const auto& of = emulated::exchange(value);
  for (const auto& words : of) value = min(value, words[0]);
  return value;
}
static uint32_t __ballot_sync(uint32_t, bool holds) {
  const auto& of = emulated::exchange(uint32_t(holds));
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= of[lane][0] << lane;
  return votes;
}
static bool __any_sync(uint32_t all, bool holds) { return __ballot_sync(all, holds) != 0; }
static int __popc(uint32_t word) { return std::popcount(word); }
static void atomicOr(uint32_t* word, uint32_t bits) { *word |= bits; }  // lanes do not run at once
template <typename T>
static T __ldcg(const T* from) {
  return *from;
}
static float __uint_as_float(uint32_t bits) { return emulated::number(bits); }
static uint32_t __float_as_uint(float value) { return emulated::bits(value); }
static float __int_as_float(int bits) { return emulated::number(bits); }
static int __float_as_int(float value) { return int(emulated::bits(value)); }
static int __float2int_rn(float value) { return int(std::nearbyint(value)); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fdividef(float a, float b) { return a / b; }
#define __expf expf  // the C library has another of this name
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
#define rsqrtf(x) (1.0f / std::sqrt(x))
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t distance) {
  return uint32_t((uint64_t(high) << 32 | low) >> (distance & 31));
}
static uint32_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const uint8_t*>(pointer) - emulated::shared_memory.data();
}

// ---- PTX's instructions, by their names with _ for . and ::

static void griddepcontrol_wait() {}
static void griddepcontrol_launch_dependents() {}
static void cp_async_commit_group() {}
static void cp_async_wait_group(int) {}
static void createpolicy_fractional_L2__evict_first_b64(unsigned long long& policy, float) { policy = 0; }
static void cp_async_cg_shared_global(uint32_t to, const void* from, int bytes, int given) {  // the rest is zero
  std::memset(emulated::shared_memory.data() + to, 0, bytes);
  std::memcpy(emulated::shared_memory.data() + to, from, given);
}
static void cp_async_cg_shared_global(uint32_t to, const void* from, int bytes) {
  cp_async_cg_shared_global(to, from, bytes, bytes);
}
static void cp_async_cg_shared_global_L2__cache_hint(uint32_t to, const void* from, int bytes, unsigned long long) {
  cp_async_cg_shared_global(to, from, bytes);
}
static void cvt_rn_bf16x2_f32(uint32_t& both, float high, float low) { both = emulated::two_rounded(low, high); }
static void cvt_f32_f16(float& value, uint16_t half) {
  _Float16 number;
  std::memcpy(&number, &half, 2);
  value = float(number);
}
static void lop3_b32(uint32_t& result, uint32_t a, uint32_t b, uint32_t c, int table) {
  result = 0;
  for (int i = 0; i < 32; i++)
    result |= uint32_t(table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i;
}
static void fma_rn_bf16x2(uint32_t& result, uint32_t a, uint32_t b, uint32_t c) {
  using namespace emulated;
  result =
      two_rounded(std::fma(low_half(a), low_half(b), low_half(c)), std::fma(high_half(a), high_half(b), high_half(c)));
}
namespace emulated {
// What mma of all kinds share: `of` is what each lane gave, four words of the left operand and two of the right one.
// See "Matrix Fragments for mma.m16n8k16", "for mma.m16n8k32" and "for mma.m16n8k8" of the PTX ISA.
template <typename Number, typename Product>
static void add_products(Number* const (&results)[4], const Number (&before)[4], const uint32_t (&of)[32][8],
                         Product product) {
  const int group = current % 32 / 4, lane = current % 4;
  for (int i = 0; i < 4; i++) {
    auto sum = product(0, 0) + before[i];
    for (int k = 0; k < 8; k++)
      sum += product(of[4 * group + k % 4][k / 4 * 2 + i / 2], of[4 * (2 * lane + i % 2) + k % 4][4 + k / 4]);
    *results[i] = Number(sum);
  }
}
static double product_of_bfloat16(uint32_t left, uint32_t right) {
  return double(low_half(left)) * low_half(right) + double(high_half(left)) * high_half(right);
}
static int product_of_bytes(uint32_t left, uint32_t right) {
  int sum = 0;
  for (int byte = 0; byte < 32; byte += 8) sum += int8_t(left >> byte) * int8_t(right >> byte);
  return sum;
}
static double product_of_tf32(uint32_t left, uint32_t right) {  // which has 11 significant bits
  return double(number(left & 0xFFFFE000)) * number(right & 0xFFFFE000);
}
}  // namespace emulated

static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                                uint32_t b1, float c0, float c1, float c2, float c3) {
  using namespace emulated;
  add_products({&d0, &d1, &d2, &d3}, {c0, c1, c2, c3}, exchange(a0, a1, a2, a3, b0, b1), product_of_bfloat16);
}
static void mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int& d0, int& d1, int& d2, int& d3, uint32_t a0,
                                                            uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                            uint32_t b1, int c0, int c1, int c2, int c3) {
  using namespace emulated;
  add_products({&d0, &d1, &d2, &d3}, {c0, c1, c2, c3}, exchange(a0, a1, a2, a3, b0, b1), product_of_bytes);
}
static void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                                                               uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                               uint32_t b1, float c0, float c1, float c2, float c3) {
  using namespace emulated;
  add_products({&d0, &d1, &d2, &d3}, {c0, c1, c2, c3}, exchange(a0, a1, a2, a3, b0, b1), product_of_tf32);
}
static void bar_sync(int name, int members) {
  emulated::Group& group = emulated::named_barriers[emulated::program()][name];
  group.members = members;
  emulated::meet(group);
}
static void barrier_cluster_arrive_relaxed_aligned() {
  emulated::lanes[emulated::current].cluster_turn = emulated::cluster.turn;
  emulated::arrive(emulated::cluster);
}
static void barrier_cluster_arrive_release_aligned() { barrier_cluster_arrive_relaxed_aligned(); }
static void barrier_cluster_wait_acquire_aligned() {
  emulated::wait_for(emulated::cluster, emulated::lanes[emulated::current].cluster_turn);
}
static void mapa_shared__cluster_u32(uint32_t& there, uint32_t here, int program) {
  there = here % emulated::SHARED_BYTES + program * emulated::SHARED_BYTES;
}
static void st_shared__cluster_u32(uint32_t to, uint32_t word) {
  std::memcpy(emulated::shared_memory.data() + to, &word, 4);
}
static void cp_async_bulk_prefetch_L2_global(const uint8_t*, int) {}
static void atom_acq_rel_gpu_global_add_u32(int& before, int* word, int added) { before = *word, *word += added; }
static void st_shared__cluster_f32(uint32_t to, float value) {
  std::memcpy(emulated::shared_memory.data() + to, &value, 4);
}
static void st_shared__cluster_v2_f32(uint32_t to, float first, float second) {
  st_shared__cluster_f32(to, first);
  st_shared__cluster_f32(to + 4, second);
}

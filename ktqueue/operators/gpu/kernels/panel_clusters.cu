// Products of some tokens with a packed matrix of few panels, or with two of different formats one below the other:
// see panel_clusters.py, which compiles this file.
//
// A cluster of programs has a group of panels, and each of its programs some columns of all of them. So a program reads
// few columns of x. A warp has up to UNITS superblocks. It decodes EARLY of them before it waits for x. Each panel has
// a program, to whose shared memory all warps of the cluster send their sums. It adds them, always in the same order.

#include "panel_parts.cuh"

constexpr int OWN = (BLOCKS + PROGRAMS - 1) / PROGRAMS;   // superblocks of a panel that a program has
constexpr int UNITS = (OWN * GROUP + WARPS - 1) / WARPS;  // superblocks of a warp
constexpr int KEPT = (GROUP + PROGRAMS - 1) / PROGRAMS;   // panels that a program adds up
constexpr bool HOLDS_X = WARPS % OWN == 0 && TILES <= 2;  // in registers: all superblocks of a warp have its columns
static_assert(EARLY <= UNITS);

// The place in shared memory of another program of the cluster where this one has `pointer`.
__device__ inline uint32_t in_program(const void* pointer, int program) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))), "r"(program));
  return there;
}

// Decode a superblock, and call take(left, slab) for each slab.
template <typename Part, typename Take>
__device__ inline void decode_block_of(const uint8_t* here, int slabs, int g, int t, const Take& take) {
  const auto factors = Part::factors(here, g, slabs);
#pragma unroll
  for (int slab = 0; slab < 8; slab++) {
    if (slab >= slabs) break;
    uint32_t left[2][4];
    Part::decode(left, here, factors, slab, g, t, slabs);
    take(left, slab);
  }
}
template <typename Take>
__device__ inline void decode_block(const uint8_t* here, bool is_first, int slabs, int g, int t, const Take& take) {
  if (is_first)
    decode_block_of<first_part>(here, slabs, g, t, take);
  else
    decode_block_of<second_part>(here, slabs, g, t, take);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(PROGRAMS, 1, 1)
    multiply_by_clusters(const uint8_t* first_panels, const uint8_t* second_panels, const uint16_t* x,
                         const uint16_t* norm, const uint16_t* bias, void* out, int tokens, int x_stride,
                         int out_stride) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int program = blockIdx.x % PROGRAMS, first_panel = blockIdx.x / PROGRAMS * GROUP;
  float* all_sums = reinterpret_cast<float*>(memory + WARPS * UNITS * SLOT_BYTES);  // [KEPT][BLOCKS][TOKENS][..]
  float* squares_of = all_sums + KEPT * BLOCKS * TOKENS * TOKEN_STRIDE;             // [BLOCKS][TOKENS]
  const uint8_t* slots = memory + warp * UNITS * SLOT_BYTES;
  const auto place_of = [&](int unit) { return (warp + unit * WARPS) / OWN; };  // of its panel in the group
  const auto block_of = [&](int unit) { return program * OWN + (warp + unit * WARPS) % OWN; };
  const auto slabs_of = [&](int unit) { return LAST_SLABS == 8 || block_of(unit) < BLOCKS - 1 ? 8 : LAST_SLABS; };
  const auto is_first = [&](int place) { return SECOND_ROWS == 0 || first_panel + place < FIRST_PANELS; };
  const auto exists = [&](int unit) {
    return place_of(unit) < GROUP && first_panel + place_of(unit) < PANELS && block_of(unit) < BLOCKS;
  };
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // this program has begun
  const uint32_t to_lane = static_cast<uint32_t>(__cvta_generic_to_shared(slots)) + first::place_of_byte(16 * lane);
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++) {
    if (!exists(unit)) continue;
    const int64 panel = first_panel + place_of(unit);
    const uint32_t to = to_lane + unit * SLOT_BYTES;
    if (is_first(place_of(unit)))
      first_part::fetch(to, first_panels + panel * first_part::PANEL, block_of(unit), lane);
    else
      second_part::fetch(to, second_panels + (panel - FIRST_PANELS) * second_part::PANEL, block_of(unit), lane);
  }
  asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  uint32_t early[EARLY][8][2][4];
#pragma unroll
  for (int unit = 0; unit < EARLY; unit++) {
    const auto keep = [&](const uint32_t (&left)[2][4], int slab) {
#pragma unroll
      for (int i = 0; i < 8; i++) early[unit][slab][i / 4][i % 4] = left[i / 4][i % 4];
    };
    if (exists(unit)) decode_block(slots + unit * SLOT_BYTES, is_first(place_of(unit)), slabs_of(unit), g, t, keep);
  }
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");

  const Rows rows = {x + int64(g) * x_stride, norm, x_stride, tokens - g, t};
  uint4 held[8][TILES];
  float squares[TILES] = {};
  if constexpr (HOLDS_X) {
#pragma unroll
    for (int slab = 0; slab < 8; slab++)
      if (block_of(0) < BLOCKS && slab < slabs_of(0)) rows.load(held[slab], squares, block_of(0), slab);
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++) {
    if (!exists(unit)) continue;
    const int block = block_of(unit), place = place_of(unit);
    float sums[TILES][4] = {};
    if constexpr (!HOLDS_X) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) squares[tile] = 0.0f;
    }
    const auto add = [&](const uint32_t (&left)[2][4], int slab) {
      uint4 loaded[TILES];
      if constexpr (!HOLDS_X) rows.load(loaded, squares, block, slab);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const uint4& right = HOLDS_X ? held[slab][tile] : loaded[tile];
        multiply(sums[tile], left[0][0], left[0][1], left[0][2], left[0][3], right.x, right.y);
        multiply(sums[tile], left[1][0], left[1][1], left[1][2], left[1][3], right.z, right.w);
      }
    };
    if (unit < EARLY) {
#pragma unroll
      for (int slab = 0; slab < 8; slab++)
        if (slab < slabs_of(unit)) add(early[min(unit, EARLY - 1)][slab], slab);
    } else {
      decode_block(slots + unit * SLOT_BYTES, is_first(place), slabs_of(unit), g, t, add);
    }
    const uint32_t there =
        in_program(all_sums + (place / PROGRAMS * BLOCKS + block) * TOKENS * TOKEN_STRIDE + 2 * g, place % PROGRAMS);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        asm volatile(
            "st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there + 4 * (8 * tile + 2 * t + i) * TOKEN_STRIDE),
            "f"(sums[tile][i]), "f"(sums[tile][2 + i])
            : "memory");
    if (NORMED && place == 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float total = squares[tile];
        total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
        for (int other = t; other < PROGRAMS; other += 4)
          asm volatile(
              "st.shared::cluster.f32 [%0], %1;" ::"r"(in_program(squares_of + block * TOKENS + 8 * tile + g, other)),
              "f"(total)
              : "memory");
      }
    }
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int i = threadIdx.x; i < KEPT * 16 * TOKENS; i += THREADS) {
    const int kept = i / (16 * TOKENS), token = i / 16 % TOKENS, place = kept * PROGRAMS + program;
    const bool of_first = is_first(place);
    const int panel = first_panel + place, in_part = 16 * (of_first ? panel : panel - FIRST_PANELS) + i % 16;
    if (place >= GROUP || panel >= PANELS || token >= tokens || in_part >= (of_first ? FIRST_ROWS : SECOND_ROWS))
      continue;
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
      sum += all_sums[((kept * BLOCKS + block) * TOKENS + token) * TOKEN_STRIDE + i % 16];
    if constexpr (NORMED) sum *= norm_scale<BLOCKS>(squares_of, token);
    write_product(sum, out, bias, token, of_first, in_part, out_stride);
  }
}

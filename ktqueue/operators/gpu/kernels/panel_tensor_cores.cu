// Products of some tokens with a packed matrix, or with two of different formats one below the other, on tensor cores:
// see panel_tensor_cores.py, which compiles this file.
//
// A program multiplies panels of 16 rows, one after the other. Each of its warps has some of a panel's superblocks: it
// copies them to shared memory, some ahead of their use, and decodes slabs to bfloat16 in registers. The sums of all
// warps are added in shared memory, always in the same order.

#include "panel_parts.cuh"

constexpr int OWN = (BLOCKS + WARPS - 1) / WARPS;  // superblocks of a panel that a warp has
constexpr bool HOLDS_X = OWN == 1 && TILES <= 2;   // in registers, for all panels
constexpr int SUM_FLOATS = WARPS * TOKENS * TOKEN_STRIDE;
constexpr int SUM_BUFFERS = TILES <= 2 ? 2 : 1;

// Whether scales of a part multiply sums, not codes. Where a warp holds x, both parts must have the same columns of it.
template <typename Part>
constexpr bool SCALES_SUMS = Part::HAS_SMALL_CODES && TILES <= 2 && !(HOLDS_X && HAS_SECOND);
template <typename Part>
constexpr bool BY_HALVES = SCALES_SUMS<Part> && Part::PARTS == 2;

// Add a slab's product to `sums`: codes times x, times scales.
template <typename Part>
__device__ inline void add_scaled(float (&sums)[TILES][4], const uint8_t* here, const typename Part::Factors& factors,
                                  const uint4 (&x)[TILES], int slab, int slabs, int g, int t) {
  uint32_t left[2][4];
  float scale[Part::PARTS][2];
  Part::codes(left, here, slab, g, t, slabs);
#pragma unroll
  for (int part = 0; part < Part::PARTS; part++) Part::scales(scale[part], here, factors, slab, part, g, slabs);
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float products[2][4];
    product(products[0], left[0][0], left[0][1], left[0][2], left[0][3], x[tile].x, x[tile].y);
    if constexpr (BY_HALVES<Part>)
      product(products[1], left[1][0], left[1][1], left[1][2], left[1][3], x[tile].z, x[tile].w);
    else
      multiply(products[0], left[1][0], left[1][1], left[1][2], left[1][3], x[tile].z, x[tile].w);
#pragma unroll
    for (int part = 0; part < Part::PARTS; part++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[tile][i] = __fmaf_rn(scale[part][i / 2], products[part][i], sums[tile][i]);
  }
}

// Add a superblock's product. held: x of the warp's only superblock.
template <typename Part, int slabs>
__device__ inline void add_block(float (&sums)[TILES][4], float (&squares)[TILES], const uint8_t* here,
                                 const uint4 (&held)[8][TILES], const Rows& rows, int block, int g, int t) {
  const auto factors = Part::factors(here, g, slabs);
#pragma unroll
  for (int slab = 0; slab < slabs; slab++) {
    uint4 x[TILES];
    if constexpr (!HOLDS_X) rows.load<BY_HALVES<Part>>(x, squares, block, slab);
    if constexpr (SCALES_SUMS<Part>) {
      if constexpr (HOLDS_X)
        add_scaled<Part>(sums, here, factors, held[slab], slab, slabs, g, t);
      else
        add_scaled<Part>(sums, here, factors, x, slab, slabs, g, t);
      continue;
    }
    uint32_t left[2][4];
    Part::decode(left, here, factors, slab, g, t, slabs);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const uint4& right = HOLDS_X ? held[slab][tile] : x[tile];
      multiply(sums[tile], left[0][0], left[0][1], left[0][2], left[0][3], right.x, right.y);
      multiply(sums[tile], left[1][0], left[1][1], left[1][2], left[1][3], right.z, right.w);
    }
  }
}

template <typename Part>
__device__ inline void add(float (&sums)[TILES][4], float (&squares)[TILES], const uint8_t* here,
                           const uint4 (&held)[8][TILES], const Rows& rows, int block, int g, int t) {
  if (LAST_SLABS == 8 || block < BLOCKS - 1)
    add_block<Part, 8>(sums, squares, here, held, rows, block, g, t);
  else
    add_block<Part, LAST_SLABS>(sums, squares, here, held, rows, block, g, t);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    multiply_panels(const uint8_t* first_panels, const uint8_t* second_panels, const uint16_t* x, const uint16_t* norm,
                    const uint16_t* bias, void* out, int tokens, int x_stride, int out_stride) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* all_sums = reinterpret_cast<float*>(memory);
  float* squares_of = all_sums + SUM_BUFFERS * SUM_FLOATS;  // [WARPS][TOKENS]
  uint8_t* ring = reinterpret_cast<uint8_t*>(squares_of + NORMED * WARPS * TOKENS) + warp * STAGES * SLOT_BYTES;
  const uint32_t ring_at_lane = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + first::place_of_byte(16 * lane);
  const int items = (PANELS - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * OWN;

  const auto fetch = [&](int item) {
    const int panel = blockIdx.x + item / OWN * gridDim.x, block = warp + item % OWN * WARPS;
    if (item < items && block < BLOCKS) {
      const uint32_t to = ring_at_lane + item % STAGES * SLOT_BYTES;
      if (SECOND_ROWS == 0 || panel < FIRST_PANELS)
        first_part::fetch(to, first_panels + int64(panel) * first_part::PANEL, block, lane);
      else
        second_part::fetch(to, second_panels + int64(panel - FIRST_PANELS) * second_part::PANEL, block, lane);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int item = 0; item < STAGES - 1; item++) fetch(item);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Rows rows = {x + int64(g) * x_stride, norm, x_stride, tokens - g, t};
  uint4 held[8][TILES];
  float squares[TILES] = {};
  if constexpr (HOLDS_X) {
#pragma unroll
    for (int slab = 0; slab < 8; slab++)
      if (slab < LAST_SLABS || warp < BLOCKS - 1) rows.load<BY_HALVES<first_part>>(held[slab], squares, warp, slab);
  }
  float sums[TILES][4];
#pragma unroll 1
  for (int item = 0; item < items; item++) {
    const int panel = blockIdx.x + item / OWN * gridDim.x, turn = item % OWN, block = warp + turn * WARPS;
    const bool is_first = SECOND_ROWS == 0 || panel < FIRST_PANELS;
    if (turn == 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    const uint8_t* here = ring + item % STAGES * SLOT_BYTES;
    fetch(item + STAGES - 1);  // to the slot of the item before, which all lanes have read
    if (block < BLOCKS) {
      if (is_first)
        add<first_part>(sums, squares, here, held, rows, block, g, t);
      else
        add<second_part>(sums, squares, here, held, rows, block, g, t);
    }
    if (turn < OWN - 1) continue;
    float* of_panel = all_sums + (SUM_BUFFERS > 1 ? item / OWN % 2 * SUM_FLOATS : 0);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *reinterpret_cast<float2*>(of_panel + (warp * TOKENS + 8 * tile + 2 * t + i) * TOKEN_STRIDE + 2 * g) =
            make_float2(sums[tile][i], sums[tile][2 + i]);
    if (NORMED && item < OWN) {  // with later panels, they would be counted again
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        squares[tile] += __shfl_xor_sync(0xFFFFFFFF, squares[tile], 1);
        squares[tile] += __shfl_xor_sync(0xFFFFFFFF, squares[tile], 2);
        if (t == 0) squares_of[warp * TOKENS + 8 * tile + g] = squares[tile];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * TOKENS; i += THREADS) {
      const int token = i / 16, in_panel = 16 * (is_first ? panel : panel - FIRST_PANELS) + i % 16;
      if (token >= tokens || in_panel >= (is_first ? FIRST_ROWS : SECOND_ROWS)) continue;
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; other++) sum += of_panel[(other * TOKENS + token) * TOKEN_STRIDE + i % 16];
      if constexpr (NORMED) sum *= norm_scale<WARPS>(squares_of, token);
      write_product(sum, out, bias, token, is_first, in_panel, out_stride);
    }
    if constexpr (SUM_BUFFERS == 1) __syncthreads();
  }
}

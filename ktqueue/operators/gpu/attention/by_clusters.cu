// Attention of one token of each row over its pages, in one launch: see by_clusters.py, which compiles this file.
//
// A cluster of PROGRAMS programs has the heads of one key/value head of a row. Each warp has a running softmax over
// blocks of 16 keys. Its left operand is 16 keys, or 16 columns of 16 values, the right one up to eight heads (PTX ISA,
// "mma.m16n8k16"). Keys and values go from memory to registers: lane 4g + t has of the left operand rows g and g + 8
// and columns 2t, 2t + 1, 2t + 8, 2t + 9. Columns of a sum may have any order, if both operands have the same, and rows
// may be stored where they belong. So a lane loads 16 bytes at once: of keys g and g + 8 columns 8t .. 8t + 7 of each
// 32, of values 2t, 2t + 1, 2t + 8, 2t + 9 columns 8g .. 8g + 7 of each 64.

using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64 = long long;

constexpr int BLOCK = 16;  // keys
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int TILES = (GROUP + 7) / 8;              // of eight heads
constexpr int KEY_PARTS = HEAD_DIM / 32;            // of a key, 16 bytes in each lane
constexpr int VALUE_PARTS = HEAD_DIM / 64;          // of a value
constexpr int VALUE_TILES = HEAD_DIM / 16;          // of 16 columns
constexpr int EIGHTS = HEAD_DIM / 8;                // of columns of a head
constexpr int EIGHT_SUMS = 8 * TILES * 8;           // sums of eight columns of all heads
constexpr int STRIDE = PROGRAMS * WARPS;            // warps of a cluster
constexpr int LINE = HEAD_DIM + 32;                 // of a head in shared memory, so that no bank is read twice at once
constexpr int TURNS = (GROUP + WARPS + 1) / WARPS;  // of warps that make the heads of queries, a key and a value
static_assert(PAGE_SIZE % BLOCK == 0 && HEAD_DIM % 64 == 0);

__device__ inline uint32_t rounded(float low, float high) {
    uint32_t both;
#if IS_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ inline void multiply(float4& sums, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
#if IS_BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Of a matrix of 8 x 8 numbers of 16 bits, whose lanes have two numbers of a row each.
__device__ inline uint32_t transposed(uint32_t two) {
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
    return result;
}

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float over_keys(float x, bool is_sum) {  // of the eight lanes that have the same heads
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFF, x, distance);
        x = is_sum ? x + other : fmaxf(x, other);
    }
    return x;
}

__device__ inline float2 numbers(uint32_t two) {
    float2 both;
#if IS_BFLOAT16
    both = {__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000)};
#else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(both.x), "=f"(both.y)
        : "r"(two));
#endif
    return both;
}

__device__ inline uint32_t shared_place(const void* from) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(from));
}
// Where a place of this program's shared memory lies in that of another one.
__device__ inline uint32_t in_program(uint32_t place, int program) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(program));
    return there;
}
__device__ inline void store(uint32_t place, float a, float b, float c, float d) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
__device__ inline void store(uint32_t place, float a, float b) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(a), "f"(b) : "memory");
}

__device__ inline int added_one(int* counter) {  // the number before
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ inline uint4 sixteen_bytes(const void* from) {
    return *reinterpret_cast<const uint4*>(from);
}

// Before the wait, the first-level cache may hold what was there steps ago. Behind it, it is faster by a tenth.
__device__ inline uint4 sixteen_bytes(const uint16_t* from, bool has_waited) {
    return has_waited ? sixteen_bytes(from) : __ldcg(reinterpret_cast<const uint4*>(from));
}

// Sums of values, each times 2 ** (its score - best), and the sum of these powers.
struct Joined {
    float2 sum;
    float best, total;
    __device__ inline void add(const Joined& other) {
        const float top = fmaxf(best, other.best);
        const float share = power_of_two(best - top), other_share = power_of_two(other.best - top);
        sum.x = sum.x * share + other.sum.x * other_share, sum.y = sum.y * share + other.sum.y * other_share;
        total = total * share + other.total * other_share, best = top;
    }
};

// A norm's weights, and numbers times a row's scale and these: rounded where qk_norm_rope_append rounds.
#if FLOAT_NORMS
using Weight = float;
__device__ inline float2 weights_at(const float* norm, int place) {
    return *reinterpret_cast<const float2*>(norm + place);
}
#else
using Weight = uint16_t;
__device__ inline float2 weights_at(const uint16_t* norm, int place) {
    return numbers(*reinterpret_cast<const uint32_t*>(norm + place));
}
#endif
__device__ inline float2 weighted(float2 x, float scale, float2 weights) {
    x.x *= scale, x.y *= scale;
    if (!FLOAT_NORMS) x = numbers(rounded(x.x, x.y));
    return numbers(rounded(x.x * weights.x, x.y * weights.y));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
#if PROGRAMS > 1
    __cluster_dims__(PROGRAMS, 1, 1)
#endif
        attend_to_rows(const uint16_t* query, uint16_t* keys, uint16_t* values, const int* page_starts,
                       const int* pages, const int* contexts, const float* sinks, uint16_t* out,
                       const Weight* query_norm, const Weight* key_norm, const float* cosine, const float* sine,
                       const int64* positions, const int64* slots, float4* parts, int* counters, int query_stride,
                       int page_stride, int slot_stride, int table_stride) {
    extern __shared__ __align__(16) float sums_of[];  // [warps of the cluster, EIGHTS / programs, EIGHT_SUMS]
    __shared__ float2 level_of[STRIDE][8 * TILES];    // the highest score, and the sum of exponentials
    __shared__ Joined joined[32 * WARPS];
    __shared__ __align__(16) uint16_t made[GROUP + 2][LINE];  // queries, the newest key and value
    const float nothing = __int_as_float(0xFF800000);         // -infinity
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = blockIdx.y, program = blockIdx.x % PROGRAMS, kv_head = blockIdx.x / PROGRAMS % KV_HEADS;
    const int cluster = blockIdx.x / (PROGRAMS * KV_HEADS), row_head = row * KV_HEADS + kv_head;
    const int context = __ldcg(contexts + row), newest = context - 1;
    const int* row_pages = pages + __ldcg(page_starts + row);
    int first = WINDOW > 0 ? max(context - WINDOW, 0) : 0;
    if (CHUNK > 0) first = max(first, newest / max(CHUNK, 1) * CHUNK);
    const int first_block = first / BLOCK, blocks = (context + BLOCK - 1) / BLOCK, count = blocks - first_block;
    // Clusters that have keys: another one for two more blocks of each warp. And their programs that have keys, rounded
    // up to a power of two: of several clusters, all.
    const int clusters = max(1, min(CLUSTERS, count / (2 * STRIDE))), needed = (count + WARPS - 1) / WARPS;
    const int used = needed > 1 ? min(PROGRAMS, 1 << (32 - __clz(needed - 1))) : 1;
    if (cluster >= clusters || program >= used) return;
    if (PROGRAMS > 1 && used > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // this program has begun

    uint16_t *head_keys = keys + kv_head * HEAD_DIM, *head_values = values + kv_head * HEAD_DIM;
    const auto cell = [&](int page, int index) {
        return static_cast<int64>(page) * page_stride + index % PAGE_SIZE * slot_stride;
    };
    const auto page_of = [&](int block) {
        return block < blocks ? __ldcg(row_pages + block / (PAGE_SIZE / BLOCK)) : 0;
    };
    uint4 key[2][KEY_PARTS] = {}, value[4][VALUE_PARTS] = {};  // zeros, or those of another block, have no weight
    const auto load_keys = [&](int block, int page, bool has_waited) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int index = block * BLOCK + g + 8 * half;
            if (index < first || index >= newest) continue;
#pragma unroll
            for (int part = 0; part < KEY_PARTS; part++)
                key[half][part] = sixteen_bytes(head_keys + cell(page, index) + 32 * part + 8 * t, has_waited);
        }
    };
    const auto load_values = [&](int block, int page, bool has_waited) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int index = block * BLOCK + 2 * t + i % 2 + i / 2 * 8;
            if (index < first || index >= newest) continue;
#pragma unroll
            for (int part = 0; part < VALUE_PARTS; part++)
                value[i][part] = sixteen_bytes(head_values + cell(page, index) + 64 * part + 8 * g, has_waited);
        }
    };

    // No kernel of this step writes the keys before the newest. So they are requested before the wait.
    const int own = program * WARPS + warp;
    const int stride = clusters * STRIDE;
    int block = first_block + cluster * STRIDE + own, page = page_of(block), next_page = page_of(block + stride);
    load_keys(block, page, false), load_values(block, page, false);
    const bool has_newest = (count - 1) % stride / WARPS == cluster * PROGRAMS + program;  // this program has
    const int place = 2 * lane;  // of two of the columns of a head's first half that this lane makes
    const bool inside = place < HEAD_DIM / 2;
#if PROJECTED
    float2 c = {}, s = {}, query_weights[2] = {}, key_weights[2] = {};
    if (inside) {
        const float* row_of = cosine + __ldcg(positions + row) * table_stride + place;
        c = *reinterpret_cast<const float2*>(row_of);
        s = *reinterpret_cast<const float2*>(sine + (row_of - cosine));
        if (HAS_NORMS)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                query_weights[half] = weights_at(query_norm, half * HEAD_DIM / 2 + place);
                key_weights[half] = weights_at(key_norm, half * HEAD_DIM / 2 + place);
            }
    }
    const int64 newest_cell = __ldcg(slots + row) * slot_stride;
#else
    const int64 newest_cell = cell(page_of(blocks - 1), newest);
#endif
    asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");

    uint32_t raw[TURNS][2] = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int of = warp + turn * WARPS;
        if (!inside || of >= GROUP + 2 * has_newest) continue;
        const uint16_t* row_of = query + row * query_stride;
        const uint16_t* from = row_of + (kv_head * GROUP + of) * HEAD_DIM;
#if PROJECTED
        if (of >= GROUP) from = row_of + (HEADS + (of - GROUP) * KV_HEADS + kv_head) * HEAD_DIM;
#else
        if (of >= GROUP) from = (of == GROUP ? head_keys : head_values) + newest_cell;
#endif
        raw[turn][0] = *reinterpret_cast<const uint32_t*>(from + place);
        raw[turn][1] = *reinterpret_cast<const uint32_t*>(from + HEAD_DIM / 2 + place);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int of = warp + turn * WARPS;
        if (of >= GROUP + 2 * has_newest) continue;
#if PROJECTED
        if (of <= GROUP) {
            float2 low = numbers(raw[turn][0]), high = numbers(raw[turn][1]);
            if (HAS_NORMS) {
                float squares = low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
#pragma unroll
                for (int distance = 16; distance > 0; distance /= 2)
                    squares += __shfl_xor_sync(0xFFFFFFFF, squares, distance);
                const float scale = rsqrtf(squares / HEAD_DIM + EPSILON);
                low = weighted(low, scale, of < GROUP ? query_weights[0] : key_weights[0]);
                high = weighted(high, scale, of < GROUP ? query_weights[1] : key_weights[1]);
            }
            raw[turn][0] = rounded(low.x * c.x - high.x * s.x, low.y * c.y - high.y * s.y);
            raw[turn][1] = rounded(high.x * c.x + low.x * s.x, high.y * c.y + low.y * s.y);
        }
#endif
        const auto write = [&](uint16_t* to) {
            *reinterpret_cast<uint32_t*>(to + place) = raw[turn][0];
            *reinterpret_cast<uint32_t*>(to + HEAD_DIM / 2 + place) = raw[turn][1];
        };
        if (!inside) continue;
        write(made[of]);
#if PROJECTED
        if (of >= GROUP) write((of == GROUP ? head_keys : head_values) + newest_cell);
#endif
    }
    __syncthreads();
    uint4 head[TILES][KEY_PARTS] = {};  // the right operand: columns 8t .. 8t + 7 of each 32 of head g
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        if (8 * tile + g < GROUP)
#pragma unroll
            for (int part = 0; part < KEY_PARTS; part++)
                head[tile][part] = sixteen_bytes(made[8 * tile + g] + 32 * part + 8 * t);

    float best[TILES][2], total[TILES][2] = {};  // of heads 2t and 2t + 1; total: of this lane's keys
    float4 sums[TILES][VALUE_TILES] = {};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) best[tile][0] = best[tile][1] = nothing;
#pragma unroll 1
    for (; block < blocks; block += stride) {
        if (block == blocks - 1) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (g + 8 * half == newest % BLOCK)
#pragma unroll
                    for (int part = 0; part < KEY_PARTS; part++)
                        key[half][part] = sixteen_bytes(made[GROUP] + 32 * part + 8 * t);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (2 * t + i % 2 + i / 2 * 8 == newest % BLOCK)
#pragma unroll
                    for (int part = 0; part < VALUE_PARTS; part++)
                        value[i][part] = sixteen_bytes(made[GROUP + 1] + 64 * part + 8 * g);
        }
        float4 scores[TILES] = {};
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const uint4 &low = key[0][part], &high = key[1][part], &right = head[tile][part];
                multiply(scores[tile], low.x, high.x, low.y, high.y, right.x, right.y);
                multiply(scores[tile], low.z, high.z, low.w, high.w, right.z, right.w);
            }
        page = next_page, next_page = page_of(block + 2 * stride);
        if (block + stride < blocks) load_keys(block + stride, page, true);

        const int low = block * BLOCK + g, high = low + 8;
        const bool sees_low = low >= first && low < context, sees_high = high >= first && high < context;
        uint32_t right[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float* score = &scores[tile].x;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                score[i] *= SCALE;  // in base 2
                if (CAP > 0) {      // tanh(x) = 2 sigmoid(2 x) - 1
                    const float power = power_of_two(score[i] * (-2.0f * LOG2_E / (CAP > 0 ? CAP : 1)));
                    score[i] = CAP * (2.0f / (1.0f + power) - 1.0f);
                }
                if (!(i < 2 ? sees_low : sees_high)) score[i] = nothing;
            }
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float top = fmaxf(best[tile][i], over_keys(fmaxf(score[i], score[i + 2]), false));
                shrink[i] = power_of_two(best[tile][i] - top);
                best[tile][i] = top;
                score[i] = power_of_two(score[i] - top), score[i + 2] = power_of_two(score[i + 2] - top);
                total[tile][i] = total[tile][i] * shrink[i] + score[i] + score[i + 2];
            }
            right[tile][0] = transposed(rounded(score[0], score[1]));
            right[tile][1] = transposed(rounded(score[2], score[3]));
#pragma unroll
            for (int i = 0; i < VALUE_TILES; i++) {
                sums[tile][i].x *= shrink[0], sums[tile][i].y *= shrink[1];
                sums[tile][i].z *= shrink[0], sums[tile][i].w *= shrink[1];
            }
        }
#pragma unroll
        for (int i = 0; i < VALUE_TILES; i++) {  // of a lane, rows g and g + 8 are its columns i and i + VALUE_TILES
            const auto word = [&](int of, int column) { return (&value[of][column / 8].x)[column % 8 / 2]; };
            const auto both = [&](int of, int column) {
                return __byte_perm(word(of, column), word(of + 1, column), column % 2 ? 0x7632 : 0x5410);
            };
            const uint32_t a0 = both(0, i), a1 = both(0, i + VALUE_TILES), a2 = both(2, i),
                           a3 = both(2, i + VALUE_TILES);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply(sums[tile][i], a0, a1, a2, a3, right[tile][0], right[tile][1]);
        }
        if (block + stride < blocks) load_values(block + stride, page, true);
    }

    // Each warp gives its sums to the program that writes these columns, and every program its levels.
    if (PROGRAMS > 1 && used > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int shift = 31 - __clz(used), warps = min(STRIDE, count);
    const auto there = [&](const void* place, int of) {
        return PROGRAMS > 1 ? in_program(shared_place(place), of) : shared_place(place);
    };
    if (own < warps) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int of = 8 * tile + 2 * t + i;
                const float all = over_keys(total[tile][i], true);
                for (int other = g; other < used; other += 8)
                    store(there(&level_of[own][of], other), best[tile][i], all);
#pragma unroll
                for (int part = 0; part < VALUE_PARTS; part++) {
                    const int eight = 8 * part + g;
                    const float* place = sums_of + ((own * EIGHTS >> shift) + (eight >> shift)) * EIGHT_SUMS + 8 * of;
                    const uint32_t to = there(place, eight & (used - 1));
                    float sum[8];
#pragma unroll
                    for (int column = 0; column < 8; column++) {
                        const float4& from = sums[tile][(8 * part + column) % VALUE_TILES];
                        sum[column] = 8 * part + column < VALUE_TILES ? (i ? from.y : from.x) : (i ? from.w : from.z);
                    }
                    store(to, sum[0], sum[1], sum[2], sum[3]), store(to + 16, sum[4], sum[5], sum[6], sum[7]);
                }
            }
    }
    if (PROGRAMS > 1 && used > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();

    // Then each program joins all warps for its columns: each thread some of the warps, for two columns of a head.
    const int pairs = EIGHT_SUMS / 2 * EIGHTS >> shift, groups = max(1, 32 * WARPS / pairs),
              group = threadIdx.x / pairs;
    const auto head_of = [&](int i) { return i / 4 % (8 * TILES); };
    const auto column_of = [&](int i) { return 8 * (program + used * (i / (32 * TILES))) + 2 * (i % 4); };
    const auto part_of = [&](int i, int of) {
        return parts + ((row_head * CLUSTERS + of) * 8 * TILES + head_of(i)) * (HEAD_DIM / 2) + column_of(i) / 2;
    };
    const auto write = [&](int i, Joined all) {
        const int head = kv_head * GROUP + head_of(i);
        if (head_of(i) >= GROUP) return;
        if (HAS_SINKS) all.add({{}, sinks[head] * LOG2_E, 1});
        *reinterpret_cast<uint32_t*>(out + (row * HEADS + head) * HEAD_DIM + column_of(i)) =
            rounded(all.sum.x / all.total, all.sum.y / all.total);
    };
    for (int i = threadIdx.x - group * pairs; i < pairs; i += 32 * WARPS) {
        Joined all = {{}, nothing, 0};
        for (int other = group; other < warps; other += groups) {
            const float2 level = level_of[other][head_of(i)];
            all.add({reinterpret_cast<const float2*>(sums_of + (other * EIGHTS >> shift) * EIGHT_SUMS)[i], level.x,
                     level.y});
        }
        if (groups > 1) {
            joined[threadIdx.x] = all;
            __syncthreads();
            if (group > 0) break;
            for (int other = 1; other < groups; other++) all.add(joined[other * pairs + i]);
        }
        if (clusters == 1)
            write(i, all);
        else
            *part_of(i, cluster) = {all.sum.x, all.sum.y, all.best, all.total};
    }
    if (clusters == 1) return;

    // The last of the programs that have these columns joins all clusters. See `is_last` in operation.py.
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = counters + row_head * PROGRAMS + program;
        is_last = added_one(counter) == clusters - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    for (int i = threadIdx.x; i < pairs; i += 32 * WARPS) {
        Joined all = {{}, nothing, 0};
        for (int of = 0; of < clusters; of++) {
            const float4 part = __ldcg(part_of(i, of));
            all.add({{part.x, part.y}, part.z, part.w});
        }
        write(i, all);
    }
}

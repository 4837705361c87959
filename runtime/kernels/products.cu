// The weight products of decode for 1..16 rows: Q8_0 matrices, grouped MXFP4 experts, and a bfloat16 matrix.
//
// Weights are exact. int8 and E2M1 are exact in float16, and the scale of a block of 32 multiplies the float32 sum of that block.
// An activation is the sum of two float16 numbers, after a power of two has brought the largest of its slice to 2^14..2^15: that leaves an
// error of at most 2^-24 of it, or 2^-40 of the slice's largest, as float32 itself would. An infinite activation makes its row NaN.
// Products run on tensor cores with the weights as the 16-row operand, so 1 to 8 rows of activations cost about the same.
//
// A row's bits depend on nothing but its own activations and the weights: row i of the activations is column i of the second operand and
// never meets another; the order of every sum follows from the number of columns K; rows beyond the first 8 have accumulators of their own.
// Nothing is atomic. There is one binary for all row counts.
//
// One block of 16 warps runs per multiprocessor. It streams its share of the weights through a ring in shared memory, 60 to 190 KB of it.
// Each warp keeps its own slice of the columns of x in registers; the sums of the warps meet in shared memory, warp 0 first.
//
// Why not Triton: on one H200 (30 November 2026, torch 2.11, CUDA 13.0, benchmarks/kernels.py with and without --triton), at one row, these take
// 99 us for a Q8_0 matrix [49376, 7168] (0.89 of the rate of a device copy; Triton's kernel of this package 440 us), 27 us for one of
// [7168, 12288] (0.82; 176 us), 107 us for 16 experts (0.62; 1064 us), and 9 us for the gate [896, 7168] (97 us).
//
// Two macros say what the GPU has; the order of every sum, and so every bit, is the same for all of them:
//
//   KTIER_SHARED_BYTES   shared memory that a block may have: 227 KB (compute capability 9.0, 10.x, 11.0), 163 KB (8.0, 8.7) or 99 KB (8.6, 8.9,
//                        12.x). It decides how many stages a ring has, and how many rows of experts are a unit.
//   KTIER_BULK           1: bulk copies, clusters and overlapping launches (9.0 and newer); 0: copies of 16 bytes (8.x).
//
// What must be in flight is rate times latency per multiprocessor: 4.8 TB/s times 0.8 us over 132 are 29 KB for an H200, 1.8 TB/s over 188 are
// 8 KB for an RTX PRO 6000. The smallest ring has two stages of 31 to 34 KB, of which one is always under way.
//
// Shape tags: M rows of activations, N rows of weights, K columns; g = lane / 4 and t = lane % 4, as PTX names a fragment's places.

#ifndef KTIER_SHARED_BYTES
#define KTIER_SHARED_BYTES (227 * 1024)
#endif
#ifndef KTIER_BULK
#define KTIER_BULK 1
#endif

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace cg = cooperative_groups;

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int MOST_ROWS = 16;
constexpr int BLOCK = 32;             // columns that share a scale
constexpr int TILE = 16;              // rows of weights in one tensor-core operand
constexpr int MOST_DEVICES = 64;
constexpr int MOST_SHARED = KTIER_SHARED_BYTES;
constexpr bool IS_SMALL = MOST_SHARED < 160 * 1024;

constexpr int least(int a, int b) { return a < b ? a : b; }

// ---- tensor cores ----

struct Halves {
    uint32_t a[4];   // eight activations of a column, the leading float16 of each: two words for each of the two products of 16 columns
    uint32_t b[4];   // what is left of them
};

__device__ __forceinline__ void product_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void product_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }

// Split two scaled activations into their leading float16 and what is left.
__device__ __forceinline__ void split(float x, float y, uint32_t& lead, uint32_t& rest) {
    const __half2 h = __floats2half2_rn(x, y);
    const float2 f = __half22float2(h);
    lead = bits(h);
    rest = bits(__floats2half2_rn(x - f.x, y - f.y));
}

// ---- the two block formats ----

// Eight int8, stored with 128 added, as eight float16: 1024 + byte, less 1152.
__device__ __forceinline__ void decode_int8(uint32_t q, uint32_t& first, uint32_t& second) {
    const __half2 offset = __float2half2_rn(1152.0f);
    const uint32_t x = __byte_perm(q, 0x64646464u, 0x4140), y = __byte_perm(q, 0x64646464u, 0x4342);
    first = bits(__hsub2(*reinterpret_cast<const __half2*>(&x), offset));
    second = bits(__hsub2(*reinterpret_cast<const __half2*>(&y), offset));
}

// Of every byte the top bit of x and the other bits of y.
__device__ __forceinline__ uint32_t top_bits_of(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80808080u));
    return z;
}

// Eight E2M1 as float16, each times 2^-14: its sign, exponent and fraction bits put where float16 has its own. pairs[j] holds nibbles j and j + 4.
__device__ __forceinline__ void decode_e2m1(uint32_t q, uint32_t (&pairs)[4]) {
    const uint32_t even = top_bits_of(q << 4, q << 1), odd = top_bits_of(q, q >> 3);
    pairs[0] = (even << 8) & 0x8E008E00u;
    pairs[1] = (odd << 8) & 0x8E008E00u;
    pairs[2] = even & 0x8E008E00u;
    pairs[3] = odd & 0x8E008E00u;
}

// ---- scaling a slice of a row of activations ----

// The largest exponent of a slice, from each of the four lanes that hold its column; at least 15, so that both powers below are normal.
__device__ __forceinline__ uint32_t slice_exponent(uint32_t largest) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    return max(largest >> 23, 15u);
}

__device__ __forceinline__ float to_float16_range(uint32_t exponent) { return __uint_as_float((268u - exponent) << 23); }

// ---- bulk copies and barriers ----

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}

// All 32 lanes of a warp arrive as one.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#if KTIER_BULK
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.test_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

// One thread has initialised barriers; a __syncthreads must follow.
__device__ __forceinline__ void end_barrier_init() {
#if KTIER_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

#if KTIER_BULK
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(n_bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

__device__ __forceinline__ void copy_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N groups of copies of this thread are under way.
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// With an overlapping launch: what the kernels before this one wrote may be read from here on.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if KTIER_BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if KTIER_BULK
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Q8_0 ----
//
// A matrix lies in tiles of 16 rows; a tile's blocks of 32 columns follow each other, 544 bytes each: 16 bytes for each lane (8 quants of row g,
// 8 of row g + 8, columns 8t..8t+7), then 16 float16 scales. K is cut in chunks of at most 64 blocks, warp w takes blocks w, w + 16, ... of each.
// The first half of the chunks and the second half are summed apart; two blocks of a cluster share them where N alone is too small to
// occupy the processor evenly.

constexpr int Q8_BLOCK_BYTES = 544, Q8_SLICE = 4, Q8_CHUNK = Q8_SLICE * WARPS, Q8_GROUP = IS_SMALL ? 8 : 16;
constexpr int Q8_STAGE_BYTES = Q8_CHUNK * Q8_BLOCK_BYTES, SUMS = TILE * MOST_ROWS, HALF_SUMS = SUMS / 2;
constexpr int Q8_BUFFERS = IS_SMALL ? 1 : 2, Q8_OTHER_BYTES = (Q8_BUFFERS * WARPS + Q8_GROUP) * SUMS * sizeof(float);
constexpr int Q8_STAGES = least(5, (MOST_SHARED - Q8_OTHER_BYTES) / (Q8_STAGE_BYTES + 8));

struct Q8Shared {
    unsigned char stages[Q8_STAGES][Q8_STAGE_BYTES];
    float parts[Q8_BUFFERS][WARPS][SUMS];   // [buffer][warp][row / 8][N row][row % 8]
    float sums[Q8_GROUP][SUMS];
    uint64_t full[Q8_STAGES];
};
static_assert(Q8_STAGES >= 2 && sizeof(Q8Shared) <= MOST_SHARED, "a ring needs two stages");

struct Q8Task {
    const unsigned char* weights;
    const float* x;                   // [M, K]
    float* out;                       // [M, N]
    int m, n, k, n_tiles, n_blocks, n_chunks, chunk_blocks;
};

// The order in which a block goes through its share: groups of tiles, chunks within, tiles within.
struct Q8Cursor {
    int tile_end, chunk_begin, chunk_end, group_begin, group_end, chunk, tile;

    __device__ Q8Cursor(int tile_begin, int tile_end, int chunk_begin, int chunk_end)
        : tile_end(tile_end), chunk_begin(chunk_begin), chunk_end(chunk_end), chunk(chunk_begin) { open_group(tile_begin); }
    __device__ void open_group(int begin) { group_begin = tile = begin; group_end = min(begin + Q8_GROUP, tile_end); }
    __device__ bool is_done() const { return tile >= tile_end; }
    __device__ void advance() {
        if (++tile < group_end) return;
        tile = group_begin;
        if (++chunk < chunk_end) return;
        chunk = chunk_begin;
        open_group(group_end);
    }
};

// Have the next stage filled: with bulk copies thread 0 calls it, else all threads do.
__device__ __forceinline__ void q8_fetch(Q8Shared& s, const Q8Task& p, Q8Cursor& next, int stage) {
    if (!next.is_done()) {
        const int first = next.chunk * p.chunk_blocks;
        const uint32_t n_bytes = min(p.chunk_blocks, p.n_blocks - first) * Q8_BLOCK_BYTES;
        const unsigned char* from = p.weights + (static_cast<int64_t>(next.tile) * p.n_blocks + first) * Q8_BLOCK_BYTES;
#if KTIER_BULK
        barrier_expect(&s.full[stage], n_bytes);
        bulk_copy(s.stages[stage], from, n_bytes, &s.full[stage]);
#else
        for (uint32_t i = 16 * threadIdx.x; i < n_bytes; i += 16 * THREADS) copy_16(s.stages[stage] + i, from + i);
#endif
        next.advance();
    }
#if !KTIER_BULK
    end_group_of_copies();
#endif
}

// Where a warp puts its part of the sums, in turns in two places; a single buffer has room for two of 8 rows.
template <int COLUMNS>
__device__ __forceinline__ float* q8_part(Q8Shared& s, int it, int warp) {
    if (Q8_BUFFERS == 2) return s.parts[it & (Q8_BUFFERS - 1)][warp];
    return s.parts[0][warp] + (COLUMNS == 1 ? (it & 1) * HALF_SUMS : 0);
}

// Wait for a stage that is being filled.
__device__ __forceinline__ void q8_wait(Q8Shared& s, int stage, int parity) {
#if KTIER_BULK
    barrier_wait(&s.full[stage], parity);
#else
    wait_for_copies<Q8_STAGES - 1>();
    __syncthreads();
#endif
}

// This warp's slice of one column of activations, split, and the power of two that undoes its scaling for the two columns of a lane's sums.
template <int SLICE>
__device__ __forceinline__ void q8_load_x(const float* x, int first, int n, Halves (&part)[SLICE], float (&undo)[2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float v[SLICE][8];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < SLICE; i++) {
        const int block = i * WARPS + warp;
        float4 lo = make_float4(0, 0, 0, 0), hi = lo;
        if (x != nullptr && block < n) {
            const float4* from = reinterpret_cast<const float4*>(x + (first + block) * BLOCK + 8 * (lane % 4));
            lo = from[0], hi = from[1];
        }
        v[i][0] = lo.x, v[i][1] = lo.y, v[i][2] = lo.z, v[i][3] = lo.w, v[i][4] = hi.x, v[i][5] = hi.y, v[i][6] = hi.z, v[i][7] = hi.w;
#pragma unroll
        for (int j = 0; j < 8; j++) largest = max(largest, __float_as_uint(v[i][j]) & 0x7FFFFFFFu);
    }
    const uint32_t exponent = slice_exponent(largest);
    const float scale = to_float16_range(exponent);
#pragma unroll
    for (int i = 0; i < SLICE; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) split(v[i][2 * j] * scale, v[i][2 * j + 1] * scale, part[i].a[j], part[i].b[j]);
#pragma unroll
    for (int j = 0; j < 2; j++) undo[j] = __uint_as_float((__shfl_sync(~0u, exponent, 8 * (lane % 4) + 4 * j) - 14u) << 23);
}

template <int COLUMNS, int SLICE>
__device__ __forceinline__ void q8_block(const unsigned char* block, const Halves (&x)[COLUMNS][SLICE], int slice, float (&sum)[COLUMNS][4]) {
    const int lane = threadIdx.x % 32;
    const uint4 q = *reinterpret_cast<const uint4*>(block + 16 * lane);
    const __half* scales = reinterpret_cast<const __half*>(block + 512);
    const float s0 = __half2float(scales[lane / 4]), s1 = __half2float(scales[lane / 4 + 8]);
    uint32_t top[4], low[4];
    decode_int8(q.x, top[0], top[1]);
    decode_int8(q.y, top[2], top[3]);
    decode_int8(q.z, low[0], low[1]);
    decode_int8(q.w, low[2], low[3]);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        float c[4] = {0, 0, 0, 0};
        product_f16(c, top[0], low[0], top[1], low[1], x[i][slice].a[0], x[i][slice].a[1]);
        product_f16(c, top[2], low[2], top[3], low[3], x[i][slice].a[2], x[i][slice].a[3]);
        product_f16(c, top[0], low[0], top[1], low[1], x[i][slice].b[0], x[i][slice].b[1]);
        product_f16(c, top[2], low[2], top[3], low[3], x[i][slice].b[2], x[i][slice].b[3]);
        sum[i][0] = fmaf(c[0], s0, sum[i][0]), sum[i][1] = fmaf(c[1], s0, sum[i][1]);
        sum[i][2] = fmaf(c[2], s1, sum[i][2]), sum[i][3] = fmaf(c[3], s1, sum[i][3]);
    }
}

__device__ __forceinline__ void store_parts(float* parts, const float (&sum)[4]) {
    const int lane = threadIdx.x % 32, at = (lane / 4) * 8 + 2 * (lane % 4);
    *reinterpret_cast<float2*>(parts + at) = make_float2(sum[0], sum[1]);
    *reinterpret_cast<float2*>(parts + at + 64) = make_float2(sum[2], sum[3]);
}

// COLUMNS: how often 8 rows of activations.
template <int SLICE, int COLUMNS>
__device__ __forceinline__ void q8_run(Q8Shared& s, const Q8Task& p, int n_ranks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % n_ranks, team = blockIdx.x / n_ranks, n_teams = gridDim.x / n_ranks;
    const int half = (p.n_chunks + 1) / 2;
    const int tile_begin = static_cast<int64_t>(p.n_tiles) * team / n_teams, tile_end = static_cast<int64_t>(p.n_tiles) * (team + 1) / n_teams;
    const int chunk_begin = rank == 0 ? 0 : half, chunk_end = n_ranks == 2 && rank == 0 ? half : p.n_chunks;

    Q8Cursor next(tile_begin, tile_end, chunk_begin, chunk_end);
    if (!KTIER_BULK || threadIdx.x == 0) {
        if (threadIdx.x == 0)
            for (int i = 0; i < Q8_STAGES; i++) barrier_init(&s.full[i], 1);
        end_barrier_init();
        for (int i = 0; i < Q8_STAGES; i++) q8_fetch(s, p, next, i);
    }
    __syncthreads();
    let_next_kernel_start();
    wait_for_earlier_kernels();

    Halves part[COLUMNS][SLICE];
    float undo[COLUMNS][2];
    int it = 0, stage = 0, parity = 0, loaded = -1;
    for (Q8Cursor at(tile_begin, tile_end, chunk_begin, chunk_end); !at.is_done(); it++) {
        const int first = at.chunk * p.chunk_blocks, n = min(p.chunk_blocks, p.n_blocks - first);
        if (at.chunk != loaded) {
            loaded = at.chunk;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                const int row = lane / 4 + 8 * i;
                q8_load_x(row < p.m ? p.x + static_cast<int64_t>(row) * p.k : nullptr, first, n, part[i], undo[i]);
            }
        }
        q8_wait(s, stage, parity);
        float sum[COLUMNS][4] = {};
        // Past the end of a slice x is zero, and any block of the same rows will do.
#pragma unroll
        for (int i = 0; i < SLICE; i++) q8_block(s.stages[stage] + min(i * WARPS + warp, n - 1) * Q8_BLOCK_BYTES, part, i, sum);
        // With one buffer, the warps that add up must be done with it.
        if (Q8_BUFFERS == 1 && COLUMNS == 2) __syncthreads();
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            sum[i][0] *= undo[i][0], sum[i][1] *= undo[i][1], sum[i][2] *= undo[i][0], sum[i][3] *= undo[i][1];
            store_parts(q8_part<COLUMNS>(s, it, warp) + HALF_SUMS * i, sum[i]);
        }
        __syncthreads();

        if (!KTIER_BULK || threadIdx.x == 0) q8_fetch(s, p, next, stage);
        // Half of the warps add up, in turns; the others go on.
        if (warp / 8 == (it & 1)) {
            const int o = threadIdx.x % 256, row = o % 8 + 8 * (o / 128);
            if (row < p.m) {
                float total = q8_part<COLUMNS>(s, it, 0)[o];
#pragma unroll
                for (int w = 1; w < WARPS; w++) total += q8_part<COLUMNS>(s, it, w)[o];
                float* kept = &s.sums[at.tile - at.group_begin][o];
                const bool is_first = at.chunk == chunk_begin || at.chunk == half;
                if (!is_first) total += *kept;
                *kept = total;
                const int n_row = at.tile * TILE + o / 8 % 16;
                if (n_ranks == 1 && n_row < p.n && (at.chunk == half - 1 || at.chunk == p.n_chunks - 1)) {
                    // The same block wrote the first half's sum here, before a barrier of its threads.
                    float* out = p.out + static_cast<int64_t>(row) * p.n + n_row;
                    *out = at.chunk >= half ? *reinterpret_cast<volatile float*>(out) + total : total;
                }
            }
        }
#if KTIER_BULK
        const bool ends_group = at.tile == at.group_end - 1 && at.chunk == chunk_end - 1;
        if (n_ranks == 2 && ends_group) {
            auto cluster = cg::this_cluster();
            cluster.sync();
            if (rank == 0) {
                const float* others = cluster.map_shared_rank(&s.sums[0][0], 1);
                for (int i = threadIdx.x; i < (at.group_end - at.group_begin) * SUMS; i += THREADS) {
                    const int o = i % SUMS, row = o % 8 + 8 * (o / 128), n_row = (at.group_begin + i / SUMS) * TILE + o / 8 % 16;
                    if (row < p.m && n_row < p.n) p.out[static_cast<int64_t>(row) * p.n + n_row] = s.sums[i / SUMS][o] + others[i];
                }
            }
            cluster.sync();
        }
#endif
        at.advance();
        if (++stage == Q8_STAGES) stage = 0, parity ^= 1;
    }
}

template <int SLICE>
__global__ void __launch_bounds__(THREADS, 1) q8_0_kernel(const Q8Task p, const int n_ranks) {
    extern __shared__ __align__(128) unsigned char memory[];
    Q8Shared& s = *reinterpret_cast<Q8Shared*>(memory);
    if (p.m > 8) q8_run<SLICE, 2>(s, p, n_ranks);
    else q8_run<SLICE, 1>(s, p, n_ranks);
}

// ---- grouped MXFP4 experts ----
//
// A unit is two tiles of 16 rows of packed weights with their scales, as the record has them: 16 rows of w1 and the same 16 of w3 (first launch; a
// tile has 8 of each), or 32 of w2 (second). Where shared memory is short it is one tile, and half the rows. Warp w takes the w-th run of SLICE
// blocks of the columns. All units of all items are dealt out in equal runs.
//
// An item is the first or the second 8 rows of a group, if any of them is there: rows 9 to 16 of an expert are a second pass over its weights. In one
// pass 16 rows of 3584 activations, split in two float16, would take 57,344 of the 65,536 registers of a multiprocessor, or all of its shared memory.
// A group of more than 8 rows is rare: of 896 experts a row chooses 16.
//
// The warps do not keep step. Each copies its own columns into its own ring. It stores its part of a unit's sums in one of two buffers and goes on;
// a warp for each tile, in turns, adds the parts up in the order of the warps, after its next unit.

constexpr int MX_MOST_SLICE = 7, MX_BUFFERS = 2, MX_TILES = IS_SMALL ? 1 : 2, MOST_GROUPS = THREADS / 2;
// Rows of a unit, and those of its first half: of w1, or the first ones of w2.
constexpr int UNIT_ROWS = TILE * MX_TILES, HALF_ROWS = UNIT_ROWS / 2;

// One warp's columns of a unit. Rows lie an odd multiple of 16 bytes apart, so that eight of them meet different banks. A row's scales start up to
// three bytes into its words.
template <int SLICE>
struct MxStage {
    unsigned char packed[UNIT_ROWS][16 * (SLICE | 1)];
    uint32_t scales[UNIT_ROWS][3];
};

struct MxTask {
    const int64_t* addresses;         // [n] of records
    const int* rows;                  // [n, 16] of z, -1: none
    const int* places;                // [n, 16] of outputs
    const float* x;                   // z [., K], or hidden [n, 16, K]
    float* out;                       // hidden [n, 16, N], or outputs [., N]
    int n, k, n_rows, units;          // n_rows = N
    uint32_t packed[2], scale[2];     // offsets within a record, of the first and the second half of unit 0
    float beta, linear_beta;
};

struct MxShared {
    float parts[MX_BUFFERS][MX_TILES][WARPS][128];   // [buffer][tile][warp][N row][row]
    uint64_t done[MX_BUFFERS], taken[MX_BUFFERS];
    int n_items_of_warp[WARPS];
    uint16_t items[2 * MOST_GROUPS];          // 2 * group + half
    const unsigned char* records[2 * MOST_GROUPS];
    __align__(128) unsigned char ring[];
};

constexpr int MX_STAGES = least(3, (MOST_SHARED - static_cast<int>(sizeof(MxShared))) / static_cast<int>(WARPS * sizeof(MxStage<MX_MOST_SLICE>)));
static_assert(MX_STAGES >= 2, "a ring needs two stages");

// One block's run of units: unit `unit` of item `item`, `left` to go.
struct MxCursor {
    int item, unit, left;

    __device__ MxCursor(int begin, int end, int units) : item(begin / units), unit(begin % units), left(end - begin) {}
    __device__ void advance(int units) {
        left--;
        if (++unit == units) unit = 0, item++;
    }
};

// List the items in order, and return how many there are. Thread 2i + h looks at half h of group i.
__device__ __forceinline__ int mx_list_items(MxShared& s, const MxTask& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool any = false;
    int64_t address = 0;
    if (threadIdx.x < 2 * p.n) {
        address = p.addresses[threadIdx.x / 2];
        const int4* rows = reinterpret_cast<const int4*>(p.rows + 8 * threadIdx.x);
        const int4 a = rows[0], b = rows[1];
        any = max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w))) >= 0;
    }
    const uint32_t votes = __ballot_sync(~0u, any);
    if (lane == 0) s.n_items_of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) before = all;
        all += s.n_items_of_warp[w];
    }
    if (any) {
        const int item = before + __popc(votes & ((1u << lane) - 1));
        s.items[item] = threadIdx.x, s.records[item] = reinterpret_cast<const unsigned char*>(address);
    }
    __syncthreads();
    return all;
}

// Have this warp's columns of a unit copied. EXACT: K is SLICE blocks for each warp, known at compile time. ROWS: from a unit to the next.
template <int ROWS, int SLICE, bool EXACT>
__device__ __forceinline__ void mx_copy(MxStage<SLICE>& to, const MxTask& p, const unsigned char* record, int unit, int k) {
    const int lane = threadIdx.x % 32, column = lane % 8, first = threadIdx.x / 32 * SLICE, n_blocks = k / BLOCK;
    const int n = EXACT ? SLICE : min(SLICE, n_blocks - first);
    if (n <= 0) return;
    if (column < n) {
        const uint32_t at = unit * (ROWS * (k / 2)) + (lane / 8 * (k / 2) + 16 * (first + column));
        const unsigned char *from = record + (p.packed[0] + at), *from2 = record + (p.packed[1] + at);
#pragma unroll
        for (int j = 0; j < UNIT_ROWS / 4; j++)
            copy_16(&to.packed[4 * j + lane / 8][16 * column], (j < HALF_ROWS / 4 ? from : from2) + j % (HALF_ROWS / 4) * 4 * (k / 2));
    }
    if (lane >= UNIT_ROWS) return;
    // Records, and the scales of 8 rows, start at multiples of 4 bytes.
    const uint32_t scales_at = unit * (ROWS * n_blocks) + (lane % HALF_ROWS * n_blocks + first), lead = scales_at % 4;
    const unsigned char* scales = record + ((lane < HALF_ROWS ? p.scale[0] : p.scale[1]) + scales_at - lead);
#pragma unroll
    for (int j = 0; j < 3; j++)
        if (static_cast<int>(lead) + n > 4 * j) copy_4(&to.scales[lane][j], scales + 4 * j);
}

// The scales of this warp's blocks of one row of weights, lane by lane. They are times 2^-64 if one of them is 2^65 or more, so that no sum overflows
// that should not; `undo` makes up for it, and is NaN if a scale byte is 255. 2^-127 is subnormal. Past the last block x is zero.
template <int SLICE, bool EXACT>
__device__ __forceinline__ void mx_load_scales(const MxStage<SLICE>& from, int lead, int n_blocks, float (&scale)[SLICE], float& undo) {
    const uint32_t(&words)[3] = from.scales[threadIdx.x % UNIT_ROWS];
    const uint32_t bytes[2] = {__funnelshift_r(words[0], words[1], 8 * lead), __funnelshift_r(words[1], words[2], 8 * lead)};
    int e[SLICE], largest = 0;
#pragma unroll
    for (int i = 0; i < SLICE; i++) {
        e[i] = bytes[i / 4] >> (8 * (i % 4)) & 255;
        if (!EXACT && static_cast<int>(threadIdx.x / 32 * SLICE) + i >= n_blocks) e[i] = 127;
        largest = max(largest, e[i]);
    }
    const int less = largest >= 192 ? 64 : 0;
#pragma unroll
    for (int i = 0; i < SLICE; i++) scale[i] = __int_as_float(max((e[i] - less) * (1 << 23), 0x00400000));
    undo = largest == 255 ? __int_as_float(0x7FC00000) : __int_as_float((127 + less) << 23);
}

// As q8_load_x; the columns of a pair lie four apart, as decode_e2m1 pairs nibbles, and `undo` also makes up for its 2^-14.
template <int SLICE>
__device__ __forceinline__ void mx_load_x(const float* x, int n_blocks, bool takes_rest, Halves (&part)[SLICE], float (&undo)[2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 lo[SLICE], hi[SLICE];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < SLICE; i++) {
        const int block = warp * SLICE + i;
        lo[i] = hi[i] = make_float4(0, 0, 0, 0);
        if (x != nullptr && block < n_blocks) {
            const float4* from = reinterpret_cast<const float4*>(x + block * BLOCK + 8 * (lane % 4));
            lo[i] = from[0], hi[i] = from[1];
        }
        const float v[8] = {lo[i].x, lo[i].y, lo[i].z, lo[i].w, hi[i].x, hi[i].y, hi[i].z, hi[i].w};
#pragma unroll
        for (int j = 0; j < 8; j++) largest = max(largest, __float_as_uint(v[j]) & 0x7FFFFFFFu);
    }
    const uint32_t exponent = slice_exponent(largest);
    const float scale = to_float16_range(exponent);
#pragma unroll
    for (int i = 0; i < SLICE; i++) {
        split(lo[i].x * scale, hi[i].x * scale, part[i].a[0], part[i].b[0]);
        split(lo[i].y * scale, hi[i].y * scale, part[i].a[1], part[i].b[1]);
        split(lo[i].z * scale, hi[i].z * scale, part[i].a[2], part[i].b[2]);
        split(lo[i].w * scale, hi[i].w * scale, part[i].a[3], part[i].b[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) part[i].a[j] = takes_rest ? part[i].b[j] : part[i].a[j];
    }
#pragma unroll
    for (int j = 0; j < 2; j++) undo[j] = __uint_as_float(__shfl_sync(~0u, exponent, 8 * (lane % 4) + 4 * j) << 23);
}

// One block of columns of a unit's tiles: q and scale by [tile][row g, row g + 8]. The leading parts of x and what is left of it have sums of their
// own; PACKED: four rows' leading parts are columns 0..3 of `sum`, their rest is columns 4..7, and `sum2` is not used.
template <bool PACKED>
__device__ __forceinline__ void mx_blocks(const uint32_t (&q)[MX_TILES][2], const float (&scale)[MX_TILES][2], const Halves& x,
                                          float (&sum)[MX_TILES][4], float (&sum2)[MX_TILES][4]) {
    uint32_t top[MX_TILES][4], low[MX_TILES][4];
    float c[MX_TILES][4] = {}, d[MX_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < MX_TILES; i++) decode_e2m1(q[i][0], top[i]), decode_e2m1(q[i][1], low[i]);
#pragma unroll
    for (int j = 0; j < 4; j += 2)
#pragma unroll
        for (int i = 0; i < MX_TILES; i++) {
            product_f16(c[i], top[i][j], low[i][j], top[i][j + 1], low[i][j + 1], x.a[j], x.a[j + 1]);
            if (!PACKED) product_f16(d[i], top[i][j], low[i][j], top[i][j + 1], low[i][j + 1], x.b[j], x.b[j + 1]);
        }
#pragma unroll
    for (int i = 0; i < MX_TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum[i][j] = fmaf(c[i][j], scale[i][j / 2], sum[i][j]);
            if (!PACKED) sum2[i][j] = fmaf(d[i][j], scale[i][j / 2], sum2[i][j]);
        }
}

// Rows of the unit: from a tile to the next, and from a tile's row g to its row g + 8.
template <bool FUSED>
constexpr int NEXT_TILE = FUSED ? 8 : 16;
template <bool FUSED>
constexpr int LOW_ROW = FUSED ? HALF_ROWS : 8;

// This warp's part of a unit's sums, but for `undo`.
template <bool FUSED, bool PACKED, int SLICE>
__device__ __forceinline__ void mx_unit(const MxStage<SLICE>& from, const float (&scale)[SLICE], const Halves (&x)[SLICE],
                                        float (&sum)[MX_TILES][4]) {
    constexpr int NEXT = NEXT_TILE<FUSED>, LOW = LOW_ROW<FUSED>;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum2[MX_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < SLICE; i++) {
        uint32_t q[MX_TILES][2];
        float scales[MX_TILES][2];
#pragma unroll
        for (int j = 0; j < 2 * MX_TILES; j++) {
            const int row = j / 2 * NEXT + j % 2 * LOW;
            q[j / 2][j % 2] = *reinterpret_cast<const uint32_t*>(&from.packed[g + row][16 * i + 4 * t]);
            scales[j / 2][j % 2] = __shfl_sync(~0u, scale[i], g + row);
        }
        mx_blocks<PACKED>(q, scales, x[i], sum, sum2);
    }
#pragma unroll
    for (int i = 0; i < MX_TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] += PACKED ? __shfl_xor_sync(~0u, sum[i][j], 2) : sum2[i][j];
}

__device__ __forceinline__ float situ(float gate, float up, float beta, float linear_beta) {
    const float sigmoid = __fdiv_rn(1.0f, 1.0f + expf(-fmaxf(gate, -80.0f)));
    return beta * tanhf(__fdiv_rn(gate, beta)) * sigmoid * linear_beta * tanhf(__fdiv_rn(up, linear_beta));
}

// The sums of all warps: lane l has row l / 2 of the tile, columns 4 (l % 2) and the three after it.
__device__ __forceinline__ float4 add_parts(const float (&parts)[WARPS][128]) {
    const int at = 4 * (threadIdx.x % 32);
    float4 total = *reinterpret_cast<const float4*>(&parts[0][at]);
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const float4 part = *reinterpret_cast<const float4*>(&parts[w][at]);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    return total;
}

// Which 8 rows of activations are at work: the first of their slots in [n, 16], bit 4c of `present` whether row c is there, and in lane c where its
// output goes.
struct MxRows {
    int first_slot, place;
    uint32_t present;
};

template <bool FUSED>
__device__ __forceinline__ void mx_write(const MxTask& p, float4 total, int unit, int tile, const MxRows& rows) {
    const int lane = threadIdx.x % 32, row = lane / 2, first = 4 * (lane % 2);
    if (FUSED) {
        // Lanes 0..15 have the gate, the others the up of the same 8 x 8 places: each half takes two columns of the other's.
        const bool is_low = lane < 16;
        const float x = __shfl_xor_sync(~0u, is_low ? total.z : total.x, 16), y = __shfl_xor_sync(~0u, is_low ? total.w : total.y, 16);
        const float gates[2] = {is_low ? total.x : x, is_low ? total.y : y}, ups[2] = {is_low ? x : total.z, is_low ? y : total.w};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int col = first + j + (is_low ? 0 : 2);
            if (rows.present >> (4 * col) & 1)
                p.out[static_cast<int64_t>(rows.first_slot + col) * p.n_rows + unit * HALF_ROWS + 8 * tile + row % 8] =
                    situ(gates[j], ups[j], p.beta, p.linear_beta);
        }
    } else {
        const float totals[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int place = __shfl_sync(~0u, rows.place, first + j);
            if (rows.present >> (4 * (first + j)) & 1) p.out[static_cast<int64_t>(place) * p.n_rows + unit * UNIT_ROWS + 16 * tile + row] = totals[j];
        }
    }
}

template <bool FUSED, int SLICE, bool EXACT>
__global__ void __launch_bounds__(THREADS, 1) experts_kernel(const MxTask p) {
    extern __shared__ __align__(128) unsigned char memory[];
    MxShared& s = *reinterpret_cast<MxShared*>(memory);
    constexpr int ROWS = FUSED ? HALF_ROWS : UNIT_ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int k = EXACT ? SLICE * WARPS * BLOCK : p.k, n_blocks = k / BLOCK;
    MxStage<SLICE>* ring = reinterpret_cast<MxStage<SLICE>*>(s.ring) + warp * MX_STAGES;
    // The second launch may start before the first one ends, but not before the tables are there: the first one let it start after this.
    if (FUSED) {
        wait_for_earlier_kernels();
        let_next_kernel_start();
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < MX_BUFFERS; i++) barrier_init(&s.done[i], WARPS), barrier_init(&s.taken[i], MX_TILES);
        end_barrier_init();
    }
    const int n_units = mx_list_items(s, p) * p.units;
    const int begin = static_cast<int64_t>(n_units) * blockIdx.x / gridDim.x, end = static_cast<int64_t>(n_units) * (blockIdx.x + 1) / gridDim.x;
    MxCursor next(begin, end, p.units);
    const auto copy_next = [&](int stage) {
        if (next.left > 0) {
            mx_copy<ROWS, SLICE, EXACT>(ring[stage], p, s.records[next.item], next.unit, k);
            next.advance(p.units);
        }
        end_group_of_copies();
    };
    for (int i = 0; i < MX_STAGES; i++) copy_next(i);
    if (!FUSED) {
        let_next_kernel_start();
        wait_for_earlier_kernels();
    }

    Halves part[SLICE];
    float undo[2];
    MxRows rows = {-1, 0, 0}, rows_before = rows;
    int stage = 0, unit_before = 0;
    bool is_packed = false;
    MxCursor at(begin, end, p.units);
    for (int it = 0; at.left > 0; it++) {
        if (at.unit == 0 || it == 0) {
            rows.first_slot = 8 * s.items[at.item];
            int row = p.rows[rows.first_slot + g];
            rows.present = __ballot_sync(~0u, row >= 0);
            // None of rows 4..7: the tensor cores' columns 4..7 take what is left of rows 0..3.
            is_packed = rows.present >> 16 == 0;
            row = __shfl_sync(~0u, row, is_packed ? lane % 16 : lane);
            const float* x = row < 0 ? nullptr : p.x + static_cast<int64_t>(FUSED ? row : rows.first_slot + (is_packed ? g % 4 : g)) * k;
            mx_load_x(x, n_blocks, is_packed && g >= 4, part, undo);
            if (!FUSED) rows.place = p.places[rows.first_slot + lane % 8];
        }
        wait_for_copies<MX_STAGES - 1>();
        __syncwarp();
        const MxStage<SLICE>& from = ring[stage];
        float scale[SLICE], undo_row, sum[MX_TILES][4] = {};
        mx_load_scales<SLICE, EXACT>(from, ((at.unit * ROWS + lane % HALF_ROWS) * n_blocks + warp * SLICE) % 4, n_blocks, scale, undo_row);
        if (is_packed) mx_unit<FUSED, true>(from, scale, part, sum);
        else mx_unit<FUSED, false>(from, scale, part, sum);
        constexpr int NEXT = NEXT_TILE<FUSED>, LOW = LOW_ROW<FUSED>;
#pragma unroll
        for (int tile = 0; tile < MX_TILES; tile++) {
            const float top = __shfl_sync(~0u, undo_row, g + tile * NEXT), low = __shfl_sync(~0u, undo_row, g + tile * NEXT + LOW);
            sum[tile][0] = sum[tile][0] * undo[0] * top, sum[tile][1] = sum[tile][1] * undo[1] * top;
            sum[tile][2] = sum[tile][2] * undo[0] * low, sum[tile][3] = sum[tile][3] * undo[1] * low;
        }
        __syncwarp();
        copy_next(stage);
        const int buffer = it % MX_BUFFERS, use = it / MX_BUFFERS;
        if (use > 0) barrier_wait(&s.taken[buffer], (use - 1) & 1);
#pragma unroll
        for (int tile = 0; tile < MX_TILES; tile++) store_parts(s.parts[buffer][tile][warp], sum[tile]);
        barrier_arrive(&s.done[buffer]);

        // The unit before, whose parts should all be there by now; and, after the last, that one too.
        for (int j = max(it - 1, 0); j <= (at.left == 1 ? it : it - 1); j++) {
            if (warp / MX_TILES != j % (WARPS / MX_TILES)) continue;
            const bool is_this = j == it;
            const MxRows its_rows = {is_this ? rows.first_slot : rows_before.first_slot, is_this ? rows.place : rows_before.place,
                                     is_this ? rows.present : rows_before.present};
            barrier_wait(&s.done[j % MX_BUFFERS], j / MX_BUFFERS & 1);
            mx_write<FUSED>(p, add_parts(s.parts[j % MX_BUFFERS][warp % MX_TILES]), is_this ? at.unit : unit_before, warp % MX_TILES, its_rows);
            barrier_arrive(&s.taken[j % MX_BUFFERS]);
        }
        rows_before = rows, unit_before = at.unit;
        at.advance(p.units);
        if (++stage == MX_STAGES) stage = 0;
    }
}

// ---- bfloat16, for the router's gate ----
//
// One block of 16 warps per 16 rows of weights, read straight from the row-major matrix. An activation is the exact sum of three bfloat16.

__device__ __forceinline__ uint32_t lead_bf16(float& x, float& y) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const float2 f = __bfloat1622float2(h);
    x -= f.x, y -= f.y;
    return *reinterpret_cast<const uint32_t*>(&h);
}

__device__ __forceinline__ void bf16_block(const uint4& top, const uint4& low, const float* x, float (&sum)[4]) {
    float4 a = make_float4(0, 0, 0, 0), b = a;
    if (x != nullptr) a = *reinterpret_cast<const float4*>(x), b = *reinterpret_cast<const float4*>(x + 4);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const uint32_t x0 = lead_bf16(a.x, a.y), x1 = lead_bf16(a.z, a.w), x2 = lead_bf16(b.x, b.y), x3 = lead_bf16(b.z, b.w);
        product_bf16(sum, top.x, low.x, top.y, low.y, x0, x1);
        product_bf16(sum, top.z, low.z, top.w, low.w, x2, x3);
    }
}

__global__ void __launch_bounds__(THREADS, 1) bf16_kernel(const float* x, const __nv_bfloat16* weights, float* out, int m, int n, int k) {
    __shared__ float parts[WARPS][SUMS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, n_blocks = k / BLOCK;
    const int top = min(blockIdx.x * TILE + g, n - 1), low = min(blockIdx.x * TILE + g + 8, n - 1);
    const bool two = m > 8;
    const __nv_bfloat16* w0 = weights + static_cast<int64_t>(top) * k + 8 * (lane % 4);
    const __nv_bfloat16* w1 = weights + static_cast<int64_t>(low) * k + 8 * (lane % 4);
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const float* x0 = g < m ? x + static_cast<int64_t>(g) * k + 8 * (lane % 4) : nullptr;
    const float* x1 = g + 8 < m ? x + static_cast<int64_t>(g + 8) * k + 8 * (lane % 4) : nullptr;
    float sum[4] = {0, 0, 0, 0}, sum2[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int block = warp; block < n_blocks; block += WARPS) {
        const uint4 a = *reinterpret_cast<const uint4*>(w0 + block * BLOCK), b = *reinterpret_cast<const uint4*>(w1 + block * BLOCK);
        bf16_block(a, b, x0 == nullptr ? nullptr : x0 + block * BLOCK, sum);
        if (two) bf16_block(a, b, x1 == nullptr ? nullptr : x1 + block * BLOCK, sum2);
    }
    store_parts(parts[warp], sum);
    if (two) store_parts(parts[warp] + 128, sum2);
    __syncthreads();
    const int o = threadIdx.x, row = o % 8 + 8 * (o / 128), n_row = blockIdx.x * TILE + o / 8 % 16;
    if (o >= SUMS || row >= m || n_row >= n) return;
    float total = parts[0][o];
#pragma unroll
    for (int w = 1; w < WARPS; w++) total += parts[w][o];
    out[static_cast<int64_t>(row) * n + n_row] = total;
}

// ---- launching; each function returns a cudaError_t ----

static int n_processors(int device) {
    static int known[MOST_DEVICES];
    if (known[device] == 0) cudaDeviceGetAttribute(&known[device], cudaDevAttrMultiProcessorCount, device);
    return known[device];
}

static bool has_clusters(int device) {
    static int known[MOST_DEVICES];   // 2: yes, 1: no
    if (known[device] == 0) {
        int answer = 0;
        if (KTIER_BULK) cudaDeviceGetAttribute(&answer, cudaDevAttrClusterLaunch, device);
        known[device] = 1 + (answer != 0);
    }
    return known[device] == 2;
}

// Raise a kernel's limit of shared memory once for each device.
static cudaError_t allow_shared(const void* kernel, bool (&is_done)[MOST_DEVICES], int device, int n_bytes) {
    if (is_done[device]) return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
    is_done[device] = error == cudaSuccess;
    return error;
}

template <typename... Parameters, typename... Arguments>
static cudaError_t launch(void (*kernel)(Parameters...), int grid, int cluster, int shared, void* stream, bool overlaps, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = shared, config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[2];
    int n = 0;
    if (cluster > 1) {
        attributes[n].id = cudaLaunchAttributeClusterDimension;
        attributes[n].val.clusterDim.x = cluster, attributes[n].val.clusterDim.y = 1, attributes[n++].val.clusterDim.z = 1;
    }
    if (overlaps && KTIER_BULK) {
        attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    config.attrs = attributes, config.numAttrs = n;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// How many blocks of columns a warp takes at most: the least size compiled that holds them.
static int slice_of(int n_blocks) { return (n_blocks + WARPS - 1) / WARPS; }

template <int SLICE>
static cudaError_t run_q8_0(const Q8Task& task, int grid, int n_ranks, void* stream, int device, bool overlaps) {
    static bool is_done[MOST_DEVICES];
    const cudaError_t error = allow_shared(reinterpret_cast<const void*>(q8_0_kernel<SLICE>), is_done, device, sizeof(Q8Shared));
    return error != cudaSuccess ? error : launch(q8_0_kernel<SLICE>, grid, n_ranks, sizeof(Q8Shared), stream, overlaps, task, n_ranks);
}

template <bool FUSED, int SLICE, bool EXACT>
static cudaError_t run_experts(const MxTask& task, void* stream, int device, bool overlaps) {
    static bool is_done[MOST_DEVICES];
    const cudaError_t error = allow_shared(reinterpret_cast<const void*>(experts_kernel<FUSED, SLICE, EXACT>), is_done, device, MOST_SHARED);
    const int shared = sizeof(MxShared) + WARPS * MX_STAGES * sizeof(MxStage<SLICE>);
    return error != cudaSuccess ? error : launch(experts_kernel<FUSED, SLICE, EXACT>, n_processors(device), 1, shared, stream, overlaps, task);
}

template <bool FUSED>
static cudaError_t run_experts(const MxTask& task, void* stream, int device, bool overlaps) {
    const int slice = slice_of(task.k / BLOCK);
    if (task.k == 7 * WARPS * BLOCK) return run_experts<FUSED, 7, true>(task, stream, device, overlaps);
    if (task.k == 6 * WARPS * BLOCK) return run_experts<FUSED, 6, true>(task, stream, device, overlaps);
    if (slice == 1) return run_experts<FUSED, 1, false>(task, stream, device, overlaps);
    if (slice <= 3) return run_experts<FUSED, 3, false>(task, stream, device, overlaps);
    return slice <= MX_MOST_SLICE ? run_experts<FUSED, MX_MOST_SLICE, false>(task, stream, device, overlaps) : cudaErrorInvalidValue;
}

extern "C" {

int ktier_q8_0(void* stream, int device, const void* weights, const float* x, float* out, int m, int n, int k, int overlaps) {
    const int n_tiles = (n + TILE - 1) / TILE, n_blocks = k / BLOCK;
    const int n_chunks = n_blocks <= Q8_CHUNK ? 1 : 2 * ((n_blocks + 2 * Q8_CHUNK - 1) / (2 * Q8_CHUNK));
    const int chunk_blocks = (n_blocks + n_chunks - 1) / n_chunks;
    const Q8Task task = {static_cast<const unsigned char*>(weights), x, out, m, n, k, n_tiles, n_blocks, n_chunks, chunk_blocks};
    const int processors = n_processors(device);
    // Two blocks share the tiles where that deals them out more evenly; the bits are the same.
    const int n_ranks = n_chunks > 1 && n_tiles < 8 * processors && has_clusters(device) ? 2 : 1;
    const int grid = min(processors / n_ranks, n_tiles) * n_ranks;
    switch (slice_of(chunk_blocks)) {
        case 1: return run_q8_0<1>(task, grid, n_ranks, stream, device, overlaps);
        case 2: return run_q8_0<2>(task, grid, n_ranks, stream, device, overlaps);
        case 3: return run_q8_0<3>(task, grid, n_ranks, stream, device, overlaps);
        default: return run_q8_0<4>(task, grid, n_ranks, stream, device, overlaps);
    }
}

// offsets: of w1.packed, w1.scale, w2.packed, w2.scale, w3.packed, w3.scale within a record.
int ktier_experts(void* stream, int device, const float* z, const int64_t* addresses, const int* rows, const int* places, int n,
                  float* hidden, float* outputs, int latent, int intermediate, const int64_t* offsets, float beta, float linear_beta, int overlaps) {
    if (n > MOST_GROUPS) return cudaErrorInvalidValue;
    MxTask first = {addresses, rows, places, z, hidden, n, latent, intermediate, intermediate / HALF_ROWS}, second = first;
    first.packed[0] = offsets[0], first.scale[0] = offsets[1], first.packed[1] = offsets[4], first.scale[1] = offsets[5];
    first.beta = beta, first.linear_beta = linear_beta;
    second.x = hidden, second.out = outputs, second.k = intermediate, second.n_rows = latent, second.units = latent / UNIT_ROWS;
    second.packed[0] = offsets[2], second.scale[0] = offsets[3];
    second.packed[1] = offsets[2] + HALF_ROWS * (intermediate / 2), second.scale[1] = offsets[3] + HALF_ROWS * (intermediate / BLOCK);
    const cudaError_t error = run_experts<true>(first, stream, device, overlaps);
    return error != cudaSuccess ? error : run_experts<false>(second, stream, device, overlaps);
}

int ktier_bf16(void* stream, int device, const void* weights, const float* x, float* out, int m, int n, int k, int overlaps) {
    (void)device;
    return launch(bf16_kernel, (n + TILE - 1) / TILE, 1, 0, stream, overlaps, x, static_cast<const __nv_bfloat16*>(weights), out, m, n, k);
}

const char* ktier_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}

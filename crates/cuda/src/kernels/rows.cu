// Rows at full width: products with candidates, the exact scan, and the reranker inputs of candidates.
#include "scan.cuh"

enum RowKind { CODES, ROWS_BF16, ROWS_F16, ROWS_F32 };

// Widest stored rows of the items.
struct WideRows {
    const u8* rows;      // [slots, dimension], or blocks of codes
    const float* scales; // scales of the codes
    u32 kind, dimension;
};

DEVICE float number_at(const WideRows& w, u64 slot, u32 d) {
    u64 at = slot * w.dimension + d;
    if (w.kind == ROWS_F32) return ((const float*)w.rows)[at];
    if (w.kind == ROWS_F16) return half_to_float(((const u16*)w.rows)[at]);
    if (w.kind == ROWS_BF16) return bf16_to_float(((const u16*)w.rows)[at]);
    u64 block = (u64)((w.dimension + 3) / 4) * 64;
    u8 code = w.rows[slot / 16 * block + d / 4 * 64 + slot % 16 * 4 + d % 4];
    return (float)code - 128.0f;
}

// Eight numbers of a row whose width is a multiple of eight.
DEVICE void read8(const WideRows& w, u64 slot, u32 d, float (&x)[8]) {
    u64 at = slot * w.dimension + d;
    if (w.kind == ROWS_F32) {
        float4 low = __ldg((const float4*)w.rows + at / 4), high = __ldg((const float4*)w.rows + at / 4 + 1);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        return;
    }
    uint4 all = __ldg((const uint4*)w.rows + at / 8);
    u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u16 bits = (u16)(words[i / 2] >> (16 * (i % 2)));
        x[i] = w.kind == ROWS_F16 ? half_to_float(bits) : bf16_to_float(bits);
    }
}

// Number of lanes of a warp that share a row.
DEVICE u32 lanes_a_row(u32 dimension) {
    u32 lanes = 32;
    while (lanes > 1 && (lanes / 2) * 8 >= dimension) lanes /= 2;
    return lanes;
}

// Product of a query with a row, by `lanes` lanes per row; called by the complete warp.
DEVICE float product(const WideRows& w, const float* query, u32 slot, bool has_one, u32 lanes) {
    u32 within = lane_of() % lanes;
    float sum = 0;
    if (has_one && w.kind != CODES && w.dimension % 8 == 0) {
        for (u32 d = within * 8; d < w.dimension; d += lanes * 8) {
            float x[8];
            read8(w, slot, d, x);
#pragma unroll
            for (u32 i = 0; i < 8; i++) sum = __fmaf_rn(query[d + i], x[i], sum);
        }
    } else if (has_one) {
        for (u32 d = within; d < w.dimension; d += lanes) sum = __fmaf_rn(query[d], number_at(w, slot, d), sum);
    }
    for (u32 step = lanes / 2; step; step >>= 1) sum += __shfl_xor_sync(EVERY_LANE, sum, step);
    return has_one && w.kind == CODES ? __fmul_rn(sum, w.scales[slot]) : sum;
}

struct ProductArgs {
    WideRows rows;
    const float* queries; // [requests, each, dimension]
    const float* weights; // [each], or null: `each` is 1, and the product is not weighted
    const u32* slots;     // [requests, stride]
    const u32* counts;    // [requests]
    u32* keys;            // [requests, stride] ordered keys of the products, or of the weighted sums over all queries of a request
    u32 stride, each;
};

// Computes the products of candidates with their queries: grid (parts, requests).
KERNEL(256, row_products, ProductArgs) {
    float* query = (float*)shared_memory();
    u32 lanes = lanes_a_row(a.rows.dimension), rows = 32 / lanes, count = a.counts[blockIdx.y];
    u64 base = (u64)blockIdx.y * a.stride;
    for (u32 q = 0; q < a.each; q++) {
        // The barrier ensures that every warp has finished the previous query.
        __syncthreads();
        for (u32 d = threadIdx.x; d < a.rows.dimension; d += blockDim.x)
            query[d] = a.queries[((u64)blockIdx.y * a.each + q) * a.rows.dimension + d];
        __syncthreads();
        for (u32 first = (blockIdx.x * warps_of() + warp_of()) * rows; first < count; first += gridDim.x * warps_of() * rows) {
            u32 n = first + lane_of() / lanes;
            float score = product(a.rows, query, n < count ? a.slots[base + n] : 0, n < count, lanes);
            if (n >= count || lane_of() % lanes != 0) continue;
            if (a.weights) score = finite(__fmul_rn(a.weights[q], score));
            if (q > 0) score = __fadd_rn(unordered(a.keys[base + n]), score);
            a.keys[base + n] = ordered(a.weights && q + 1 == a.each ? finite(score) : score);
        }
    }
}

struct ExactArgs {
    WideRows rows;
    Candidates to;
    const float* queries;    // [queries, dimension]
    const u64* const* words; // [queries] filter bitmap over all words
    const u32* word_slots;   // [words]
    u32 words_count, unused;
};

// Scores every eligible item by its widest row: grid (parts, queries), one warp per word.
KERNEL(256, scan_exact, ExactArgs) {
    float* query = (float*)shared_memory();
    for (u32 d = threadIdx.x; d < a.rows.dimension; d += blockDim.x)
        query[d] = a.queries[(u64)blockIdx.y * a.rows.dimension + d];
    __syncthreads();
    u32 lanes = lanes_a_row(a.rows.dimension), each = 32 / lanes, mine = lane_of() / lanes, scored = 0;
    float bins = a.to.heads[blockIdx.y].bins_per_score;
    for (u32 word = blockIdx.x * warps_of() + warp_of(); word < a.words_count; word += gridDim.x * warps_of()) {
        u64 left = a.words[blockIdx.y][word];
        scored += __popcll(left);
        while (left) {
            // The n-th part of the warp scores the n-th remaining item.
            u32 bit = 64;
            for (u32 n = 0; n < each && left; n++, left &= left - 1)
                if (n == mine) bit = (u32)__ffsll((i64)left) - 1;
            bool has_one = bit < 64;
            u32 slot = a.word_slots[word] + bit;
            float score = product(a.rows, query, slot, has_one, lanes);
            keep_now(a.to, blockIdx.y, has_one && lane_of() % lanes == 0, score, slot, fresh(a.to.bars + blockIdx.y), bins);
        }
    }
    if (lane_of() == 0 && scored) atomicAdd(a.to.survivors + blockIdx.y, scored);
}

struct NormArgs {
    WideRows rows;
    WideRows codes;
    u32* most; // bits of the largest norm
    u32 slots, unused;
};

// Finds the largest norm of any item, by its codes and by its widest row: grid (parts), one warp per item.
KERNEL(256, largest_norm, NormArgs) {
    float most = 0;
    for (u32 slot = blockIdx.x * warps_of() + warp_of(); slot < a.slots; slot += gridDim.x * warps_of()) {
        float of_row = 0, of_codes = 0;
        for (u32 d = lane_of(); d < a.rows.dimension; d += 32) {
            float x = number_at(a.rows, slot, d), y = number_at(a.codes, slot, d);
            of_row = __fmaf_rn(x, x, of_row);
            of_codes = __fmaf_rn(y, y, of_codes);
        }
        for (u32 step = 16; step; step >>= 1) {
            of_row += __shfl_xor_sync(EVERY_LANE, of_row, step);
            of_codes += __shfl_xor_sync(EVERY_LANE, of_codes, step);
        }
        float scale = fabsf(a.codes.scales[slot]);
        float row = sqrtf(of_row) * (a.rows.kind == CODES ? scale : 1.0f);
        most = fmaxf(most, fmaxf(row, sqrtf(of_codes) * scale));
    }
    if (lane_of() == 0) atomicMax(a.most, __float_as_uint(most));
}

struct GatherArgs {
    WideRows rows;
    const u32* slots;      // [queries, stride]
    const u32* counts;     // [queries]
    const u32* similarity; // [queries, stride] ordered keys of the retrieval scores
    // Columns with one number per slot; null for the retrieval score.
    const float* const* columns;
    float* out; // [queries, stride, out_stride]
    // Destination of the row (NOWHERE if the row is not read), and destination of the first column.
    u32 row_at, column_at;
    u32 stride, out_stride, column_count, unused;
};

#define NOWHERE 0xffffffffu

// Gathers the reranker inputs of each candidate: its row and its columns. Grid (parts, queries), one warp per candidate.
KERNEL(256, gather_rows, GatherArgs) {
    u32 count = a.counts[blockIdx.y];
    for (u32 n = blockIdx.x * warps_of() + warp_of(); n < count; n += gridDim.x * warps_of()) {
        u64 place = (u64)blockIdx.y * a.stride + n;
        u32 slot = a.slots[place];
        float* out = a.out + place * a.out_stride;
        if (a.row_at != NOWHERE) {
            float scale = a.rows.kind == CODES ? a.rows.scales[slot] : 1.0f;
            for (u32 d = lane_of(); d < a.rows.dimension; d += 32)
                out[a.row_at + d] = __fmul_rn(number_at(a.rows, slot, d), scale);
        }
        for (u32 c = lane_of(); c < a.column_count; c += 32)
            out[a.column_at + c] = a.columns[c] ? a.columns[c][slot] : unordered(a.similarity[place]);
    }
}

// Products of rows with matrices by tensor cores, whose factors come in pairs of bf16: the words of pairs are the words of
// fragments, so that nothing is repacked.
#include "dense.cuh"

#define PAIR_ROWS 128u
#define PAIR_COLUMNS 64u
// Words of depth, each a pair, that lie in shared memory at a time.
#define PAIR_DEPTH 16u
// From a row to the next in shared memory: such that the lanes that read a fragment differ in banks.
#define LEFT_STRIDE (PAIR_DEPTH + 4u)
#define RIGHT_STRIDE (PAIR_COLUMNS + 8u)

struct PairArgs {
    ProductOfArgs of; // depths, strides of rows and of matrices in words
    u32 is_paired;    // whether the result goes out in pairs
    u32 unused;
};

// Sums of products, a tile of 128 x 64 a block: grid (tiles of columns, tiles of rows, requests), a warp 32 x 32 of it.
KERNEL(256, product_of_pairs, PairArgs) {
    u32* left = (u32*)shared_memory();            // [PAIR_ROWS, LEFT_STRIDE]
    u32* right = left + PAIR_ROWS * LEFT_STRIDE;  // [PAIR_DEPTH, RIGHT_STRIDE]
    u32 request = blockIdx.z, rows = a.of.counts[request] * a.of.runs;
    u32 first_row = blockIdx.y * PAIR_ROWS, first_column = blockIdx.x * PAIR_COLUMNS;
    if (first_row >= rows) return;
    u32 warp_row = warp_of() / 2 * 32, warp_column = warp_of() % 2 * 32, group = lane_of() >> 2, within = lane_of() & 3;
    float sums[2][4][4] = {};
    for (u32 p = 0; p < a.of.part_count; p++) {
        const Factor& part = a.of.parts[p];
        const u32* matrix = (const u32*)row_at(part.matrix, request, 0);
        for (u32 k = 0; k < part.depth; k += PAIR_DEPTH) {
            __syncthreads();
            for (u32 n = threadIdx.x; n < PAIR_ROWS * PAIR_DEPTH; n += blockDim.x) {
                u32 of_row = n / PAIR_DEPTH, depth = n % PAIR_DEPTH, row = first_row + of_row;
                bool is_inside = row < rows && k + depth < part.depth;
                const u32* from = (const u32*)row_at(part.rows, request, row / a.of.runs) + (u64)(row % a.of.runs) * part.depth;
                left[of_row * LEFT_STRIDE + depth] = is_inside ? from[k + depth] : 0;
            }
            for (u32 n = threadIdx.x; n < PAIR_DEPTH * PAIR_COLUMNS; n += blockDim.x) {
                u32 depth = n / PAIR_COLUMNS, column = first_column + n % PAIR_COLUMNS;
                bool is_inside = column < a.of.columns && k + depth < part.depth;
                u64 at = (u64)(column / 32) * part.panel_stride + (u64)(k + depth) * part.row_stride + column % 32;
                right[depth * RIGHT_STRIDE + n % PAIR_COLUMNS] = is_inside ? matrix[at] : 0;
            }
            __syncthreads();
#pragma unroll
            for (u32 step = 0; step < PAIR_DEPTH; step += 8) {
                u32 xs[2][4];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32* x = left + (warp_row + 16 * i + group) * LEFT_STRIDE + step + within;
                    xs[i][0] = x[0], xs[i][1] = x[8 * LEFT_STRIDE], xs[i][2] = x[4], xs[i][3] = x[8 * LEFT_STRIDE + 4];
                }
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32* w = right + (step + within) * RIGHT_STRIDE + warp_column + 8 * j + group;
                    u32 ws[2] = {w[0], w[4 * RIGHT_STRIDE]};
#pragma unroll
                    for (u32 i = 0; i < 2; i++) mma_bf16(sums[i][j], xs[i], ws);
                }
            }
        }
    }
    const float* bias = a.of.bias.at ? row_at(a.of.bias, request, 0) : nullptr;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = first_row + warp_row + 16 * i + 8 * half + group;
            if (row >= rows) continue;
            float* out = (float*)row_at(a.of.out, request, row / a.of.runs);
            out += (u64)(row % a.of.runs) * (a.is_paired ? (a.of.columns + 1) / 2 : a.of.columns);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 column = first_column + warp_column + 8 * j + 2 * within;
                float x[2];
#pragma unroll
                for (u32 c = 0; c < 2; c++) {
                    x[c] = sums[i][j][2 * half + c] + (bias && column + c < a.of.columns ? bias[column + c] : 0.0f);
                    if (a.of.is_rectified && x[c] < 0) x[c] = 0;
                }
                if (column >= a.of.columns) continue;
                bool has_second = column + 1 < a.of.columns;
                if (a.is_paired) {
                    ((u32*)out)[column / 2] = float_to_bf16(x[0]) | (has_second ? float_to_bf16(x[1]) << 16 : 0);
                } else {
                    out[column] = x[0];
                    if (has_second) out[column + 1] = x[1];
                }
            }
        }
    }
}

struct NarrowArgs {
    Numbers from, out;
    const u32* counts;
    u32 count, unused;
};

// The numbers of each row as pairs: grid (parts, requests).
KERNEL(256, narrow, NarrowArgs) {
    u64 each = (a.count + 1) / 2, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), pair = (u32)(at % each);
        const float* from = row_at(a.from, blockIdx.y, row) + 2 * pair;
        u32 second = 2 * pair + 1 < a.count ? float_to_bf16(from[1]) << 16 : 0;
        ((u32*)row_at(a.out, blockIdx.y, row))[pair] = float_to_bf16(from[0]) | second;
    }
}

struct PackArgs {
    Numbers from, out;
    const u32* counts;
    u32 depth, columns;
};

// A matrix [depth, columns] of each row packed in pairs of its rows, in panels of 32 columns: grid (parts, requests).
KERNEL(256, pack_narrow, PackArgs) {
    u32 pairs = (a.depth + 1) / 2;
    u64 each = (u64)pairs * ((a.columns + 31) / 32) * 32, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), word = (u32)(at % each);
        u32 pair = word / 32 % pairs, column = word / 32 / pairs * 32 + word % 32;
        const float* from = row_at(a.from, blockIdx.y, row) + (u64)2 * pair * a.columns + column;
        bool is_inside = column < a.columns, has_second = is_inside && 2 * pair + 1 < a.depth;
        u32 first = is_inside ? float_to_bf16(from[0]) : 0, second = has_second ? float_to_bf16(from[a.columns]) << 16 : 0;
        ((u32*)row_at(a.out, blockIdx.y, row))[word] = first | second;
    }
}

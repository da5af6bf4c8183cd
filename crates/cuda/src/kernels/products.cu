// Products of rows with matrices on tensor cores, for pairs of bf16 and for single-precision numbers that are split
// into two TF32 numbers each; also converts rows and matrices to pairs.
#include "dense.cuh"

#define PRODUCT_ROWS 128u
// Number of words of depth per stage in shared memory; a word is a pair of bf16 or a number.
#define PRODUCT_DEPTH 16u
// Number of tiles of depth that are loaded while another is multiplied.
#define TILES_AHEAD 2u
// Row stride in shared memory, chosen so that the lanes that read a fragment use different banks.
#define LEFT_STRIDE (PRODUCT_DEPTH + 4u)

struct PairArgs {
    ProductOfArgs of; // depths and strides of rows and matrices, in words
    u32 is_paired;    // whether the result is written as pairs
    u32 unused;
};

// Loads four words, with zeros in place of missing ones: one load if all exist, are adjacent and aligned.
DEVICE uint4 four(const u32* from, u32 count) {
    if (count >= 4 && ((u64)from & 15) == 0) return *(const uint4*)from;
    uint4 words = {0, 0, 0, 0};
    if (count > 0) words.x = from[0];
    if (count > 1) words.y = from[1];
    if (count > 2) words.z = from[2];
    if (count > 3) words.w = from[3];
    return words;
}

// Copies four words to shared memory, with zeros in place of missing words. The words are available after `brought`.
DEVICE void bring(u32* to, const u32* from, u32 count) {
    if (count >= 4 && ((u64)from & 15) == 0) bring_four(to, from);
    else *(uint4*)to = four(from, count);
}

// Rounds a number to the 11 bits that TF32 retains, and returns the remainder: 12 bits and a sign, of which tensor cores read all
// but the last bit.
DEVICE u32 split(u32& number) {
    u32 near = (number + 0x1000) & 0xffffe000u;
    u32 rest = __float_as_uint(__uint_as_float(number) - __uint_as_float(near));
    number = near;
    return rest;
}

// Adds the tensor-core product of one step of depth: 16 pairs, or 8 numbers as the products of their parts without the smallest.
// A step is summed separately, because tensor cores truncate sums where single precision rounds: only the sum of one step is
// truncated.
template <bool IS_PAIRED>
DEVICE void step_of(float (&sums)[4], const u32 (&x)[4], const u32 (&x_rest)[4], const u32 (&w)[2], const u32 (&w_rest)[2]) {
    if (IS_PAIRED) {
        mma_bf16(sums, x, w);
        return;
    }
    float step[4] = {};
    mma_tf32(step, x_rest, w);
    mma_tf32(step, x, w_rest);
    mma_tf32(step, x, w);
#pragma unroll
    for (u32 n = 0; n < 4; n++) sums[n] = __fadd_rn(sums[n], step[n]);
}

// Computes sums of products, one tile of 128 rows per block: grid (tiles of columns, tiles of rows, requests); a warp handles 32
// rows and half of the columns. The order of summation does not depend on the tile.
template <bool IS_PAIRED, u32 COLUMNS> DEVICE void products(const ProductOfArgs& a, bool is_out_paired) {
    const u32 RIGHT_STRIDE = COLUMNS + 8, ACROSS = COLUMNS / 16;
    const u32 TILE_WORDS = PRODUCT_ROWS * LEFT_STRIDE + PRODUCT_DEPTH * RIGHT_STRIDE;
    u32* tiles = (u32*)shared_memory(); // [TILES_AHEAD + 1] of rows [PRODUCT_ROWS, LEFT_STRIDE] and of the matrix [PRODUCT_DEPTH, RIGHT_STRIDE]
    u32 request = blockIdx.z, rows = a.counts[request] * a.runs;
    u32 first_row = blockIdx.y * PRODUCT_ROWS, first_column = blockIdx.x * COLUMNS;
    if (first_row >= rows) return;
    u32 warp_row = warp_of() / 2 * 32, warp_column = warp_of() % 2 * (COLUMNS / 2), group = lane_of() >> 2, within = lane_of() & 3;
    // Two threads load a row.
    u32 of_row = threadIdx.x / 2, row_loaded = first_row + of_row, first_word = threadIdx.x % 2 * 8;
    // Factor and depth of the next tile to load.
    u32 next = 0, next_depth = 0;
    const u32 *row = nullptr, *matrix = nullptr;
    auto bring_tile = [&](u32 stage) {
        while (next < a.part_count && next_depth >= a.parts[next].depth) next++, next_depth = 0;
        if (next < a.part_count) {
            const Factor& part = a.parts[next];
            if (next_depth == 0) {
                matrix = (const u32*)row_at(part.matrix, request, 0);
                row = (const u32*)row_at(part.rows, request, row_loaded / a.runs) + (u64)(row_loaded % a.runs) * part.depth;
            }
            u32 row_depth = row_loaded < rows ? part.depth : 0;
            u32 *left = tiles + stage * TILE_WORDS, *right = left + PRODUCT_ROWS * LEFT_STRIDE;
#pragma unroll
            for (u32 n = 0; n < 8; n += 4) {
                u32 depth = next_depth + first_word + n;
                bring(left + of_row * LEFT_STRIDE + first_word + n, row + depth, depth < row_depth ? row_depth - depth : 0);
            }
#pragma unroll
            for (u32 n = 0; n < PRODUCT_DEPTH * COLUMNS; n += 1024) {
                u32 at = n + 4 * threadIdx.x, of_depth = at / COLUMNS, depth = next_depth + of_depth, column = first_column + at % COLUMNS;
                const u32* from = matrix + (u64)(column / 32) * part.panel_stride + (u64)depth * part.row_stride + column % 32;
                bool is_inside = depth < part.depth && column < a.columns;
                bring(right + of_depth * RIGHT_STRIDE + at % COLUMNS, from, is_inside ? a.columns - column : 0);
            }
            next_depth += PRODUCT_DEPTH;
        }
        end_of_bringing();
    };
    u32 tile_count = 0;
    for (u32 p = 0; p < a.part_count; p++) tile_count += (a.parts[p].depth + PRODUCT_DEPTH - 1) / PRODUCT_DEPTH;
    for (u32 stage = 0; stage < TILES_AHEAD; stage++) bring_tile(stage);
    float sums[2][ACROSS][4] = {};
    for (u32 tile = 0; tile < tile_count; tile++) {
        brought<TILES_AHEAD - 1>();
        // At this barrier, all threads have finished the tile that the next load overwrites.
        __syncthreads();
        bring_tile((tile + TILES_AHEAD) % (TILES_AHEAD + 1));
        const u32 *left = tiles + tile % (TILES_AHEAD + 1) * TILE_WORDS, *right = left + PRODUCT_ROWS * LEFT_STRIDE;
        if (first_row + warp_row >= rows) continue;
#pragma unroll
        for (u32 step = 0; step < PRODUCT_DEPTH; step += 8) {
            u32 xs[2][4], x_rests[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32* x = left + (warp_row + 16 * i + group) * LEFT_STRIDE + step + within;
                xs[i][0] = x[0], xs[i][1] = x[8 * LEFT_STRIDE], xs[i][2] = x[4], xs[i][3] = x[8 * LEFT_STRIDE + 4];
#pragma unroll
                for (u32 n = 0; n < 4; n++) x_rests[i][n] = IS_PAIRED ? 0 : split(xs[i][n]);
            }
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
                const u32* w = right + (step + within) * RIGHT_STRIDE + warp_column + 8 * j + group;
                u32 ws[2] = {w[0], w[4 * RIGHT_STRIDE]}, w_rests[2] = {0, 0};
                if (!IS_PAIRED) w_rests[0] = split(ws[0]), w_rests[1] = split(ws[1]);
#pragma unroll
                for (u32 i = 0; i < 2; i++) step_of<IS_PAIRED>(sums[i][j], xs[i], x_rests[i], ws, w_rests);
            }
        }
    }
    const float* bias = a.bias.at ? row_at(a.bias, request, 0) : nullptr;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = first_row + warp_row + 16 * i + 8 * half + group;
            if (row >= rows) continue;
            float* out = (float*)row_at(a.out, request, row / a.runs);
            out += (u64)(row % a.runs) * (is_out_paired ? (a.columns + 1) / 2 : a.columns);
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
                u32 column = first_column + warp_column + 8 * j + 2 * within;
                float x[2];
#pragma unroll
                for (u32 c = 0; c < 2; c++) {
                    x[c] = sums[i][j][2 * half + c] + (bias && column + c < a.columns ? bias[column + c] : 0.0f);
                    if (a.is_rectified && x[c] < 0) x[c] = 0;
                }
                if (column >= a.columns) continue;
                bool has_second = column + 1 < a.columns;
                if (is_out_paired) {
                    ((u32*)out)[column / 2] = float_to_bf16(x[0]) | (has_second ? float_to_bf16(x[1]) << 16 : 0);
                } else {
                    out[column] = x[0];
                    if (has_second) out[column + 1] = x[1];
                }
            }
        }
    }
}

KERNEL(256, product_of, ProductOfArgs) { products<false, 64>(a, false); }
KERNEL(256, product_of_pairs, PairArgs) { products<true, 64>(a.of, a.is_paired); }
KERNEL(256, product_of_wide_pairs, PairArgs) { products<true, 128>(a.of, a.is_paired); }

struct NarrowArgs {
    Numbers from, out;
    const u32* counts;
    u32 count, unused;
};

// Converts the numbers of each row to pairs: grid (parts, requests).
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
    u32 depth, columns, panel_rows, unused;
};

// Packs a matrix [depth, columns] per row of the input as pairs of the matrix's rows, in panels of 32 columns that also
// hold rows of other matrices: grid (parts, requests).
KERNEL(256, pack_narrow, PackArgs) {
    u32 pairs = (a.depth + 1) / 2;
    u64 each = (u64)pairs * ((a.columns + 31) / 32) * 32, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), word = (u32)(at % each);
        u32 pair = word / 32 % pairs, column = word / 32 / pairs * 32 + word % 32;
        const float* from = row_at(a.from, blockIdx.y, row) + (u64)2 * pair * a.columns + column;
        bool is_inside = column < a.columns, has_second = is_inside && 2 * pair + 1 < a.depth;
        u32 first = is_inside ? float_to_bf16(from[0]) : 0, second = has_second ? float_to_bf16(from[a.columns]) << 16 : 0;
        ((u32*)row_at(a.out, blockIdx.y, row))[(u64)(column / 32 * a.panel_rows + pair) * 32 + column % 32] = first | second;
    }
}

// Steps of dense graphs, over all rows of several requests at a time.
#include "dense.cuh"

struct MatricesArgs {
    Numbers left, right, out;
    const u32* left_at; // [batch] offset of each matrix in a row
    const u32* right_at;
    const u32* counts;
    u32 batch, m, k, n;
};

// Products of matrices that differ from row to row: grid (parts, requests), one thread per number.
KERNEL(256, product_of_matrices, MatricesArgs) {
    u64 each = (u64)a.batch * a.m * a.n, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), within = (u32)(at % each);
        u32 batch = within / (a.m * a.n), i = within / a.n % a.m, j = within % a.n;
        const float* left = row_at(a.left, blockIdx.y, row) + a.left_at[batch] + (u64)i * a.k;
        const float* right = row_at(a.right, blockIdx.y, row) + a.right_at[batch] + j;
        float sum = 0;
        for (u32 d = 0; d < a.k; d++) sum = __fmaf_rn(left[d], right[(u64)d * a.n], sum);
        ((float*)row_at(a.out, blockIdx.y, row))[within] = sum;
    }
}

enum UnaryKind {
    RELU, SIGMOID, TANH, EXP, LOG, SQRT, ABS, NEG, RECIPROCAL, ERF, GELU, SILU, SOFTPLUS, TRUNC, NOT_OF, IS_NAN
};
enum BinaryKind { SUM_OF, SUB, MUL, DIV, MAX_OF, MIN_OF, EQUAL_TO, BELOW, NOT_ABOVE, KEEP_IF, DROP_IF };

DEVICE float unary(u32 f, float x) {
    switch (f) {
    case RELU: return x < 0 ? 0 : x;
    case SIGMOID: return __fdiv_rn(1.0f, 1.0f + expf(-x));
    case TANH: return tanhf(x);
    case EXP: return expf(x);
    case LOG: return logf(x);
    case SQRT: return sqrtf(x);
    case ABS: return fabsf(x);
    case NEG: return -x;
    case ERF: return erff(x);
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case SILU: return __fdiv_rn(x, 1.0f + expf(-x));
    case SOFTPLUS: return (x > 0 || x != x ? x : 0) + log1pf(expf(-fabsf(x)));
    case TRUNC: return truncf(x);
    case NOT_OF: return x == 0;
    case IS_NAN: return x != x;
    default: return __fdiv_rn(1.0f, x);
    }
}

DEVICE float binary(u32 f, float x, float y) {
    switch (f) {
    case SUM_OF: return x + y;
    case SUB: return x - y;
    case MUL: return x * y;
    case DIV: return __fdiv_rn(x, y);
    case MAX_OF: return x > y || x != x ? x : y;
    case MIN_OF: return x < y || x != x ? x : y;
    case EQUAL_TO: return x == y;
    case BELOW: return x < y;
    case NOT_ABOVE: return x <= y;
    case KEEP_IF: return x == 0 ? 0 : y;
    default: return x == 0 ? y : 0;
    }
}

struct MapArgs {
    Numbers first, second; // second operand of binary functions
    Numbers out;
    const u32* counts;
    u32 function, outer, inner, unused;
};

DEVICE float operand(const Numbers& of, u32 request, u32 row, u32 outer, u32 inner) {
    return row_at(of, request, row)[(u64)outer * of.outer + inner * of.inner];
}

// Applies a unary function: grid (parts, requests).
KERNEL(256, map_one, MapArgs) {
    u64 each = (u64)a.outer * a.inner, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), within = (u32)(at % each);
        float x = operand(a.first, blockIdx.y, row, within / a.inner, within % a.inner);
        ((float*)row_at(a.out, blockIdx.y, row))[within] = unary(a.function, x);
    }
}

// Applies a binary function: grid (parts, requests).
KERNEL(256, map_two, MapArgs) {
    u64 each = (u64)a.outer * a.inner, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), within = (u32)(at % each);
        float x = operand(a.first, blockIdx.y, row, within / a.inner, within % a.inner);
        float y = operand(a.second, blockIdx.y, row, within / a.inner, within % a.inner);
        ((float*)row_at(a.out, blockIdx.y, row))[within] = binary(a.function, x, y);
    }
}

// Binary function and initial value of a reduction: sum, maximum, minimum.
DEVICE u32 fold_of(u32 fold) {
    return fold == 0 ? SUM_OF : fold == 1 ? MAX_OF : MIN_OF;
}

DEVICE float fold_start(u32 fold) {
    float infinite = __uint_as_float(0x7f800000u);
    return fold == 0 ? 0.0f : fold == 1 ? -infinite : infinite;
}

DEVICE float fold_lanes(u32 f, float folded) {
    for (u32 step = 16; step; step >>= 1) folded = binary(f, folded, __shfl_xor_sync(EVERY_LANE, folded, step));
    return folded;
}

// Reduces groups of `inner` contiguous numbers (runs) by sum, maximum or minimum, one warp per run: grid (parts,
// requests).
KERNEL(256, fold_runs, MapArgs) {
    u32 f = fold_of(a.function);
    u64 total = (u64)a.outer * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * warps_of() + warp_of(); at < total; at += (u64)gridDim.x * warps_of()) {
        u32 row = (u32)(at / a.outer), run = (u32)(at % a.outer);
        const float* from = row_at(a.first, blockIdx.y, row) + (u64)run * a.inner;
        float folded = fold_start(a.function);
        for (u32 n = lane_of(); n < a.inner; n += 32) folded = binary(f, folded, from[n]);
        folded = fold_lanes(f, folded);
        if (lane_of() == 0) ((float*)row_at(a.out, blockIdx.y, row))[run] = folded;
    }
}

// Reduction of the numbers that belong to keys.
struct EqualFold {
    Numbers values;
    u32 function, unused[3];
};

struct EqualArgs {
    Numbers key, keys; // one key per row; keys of a request
    Numbers out;       // one number per reduction
    EqualFold folds[4];
    const u32* counts;
    u32 fold_count, count;
};

// Masked reductions: each number times 1 if its key equals the row's key, and times 0 otherwise. One warp per row: grid (parts,
// requests).
KERNEL(256, fold_equal, EqualArgs) {
    for (u64 row = (u64)blockIdx.x * warps_of() + warp_of(); row < a.counts[blockIdx.y]; row += (u64)gridDim.x * warps_of()) {
        float key = *row_at(a.key, blockIdx.y, (u32)row);
        const float* keys = row_at(a.keys, blockIdx.y, (u32)row);
        float folded[4];
        for (u32 fold = 0; fold < 4; fold++) folded[fold] = fold_start(a.folds[fold].function);
        for (u32 n = lane_of(); n < a.count; n += 32) {
            float is_equal = keys[n] == key;
#pragma unroll
            for (u32 fold = 0; fold < 4; fold++) {
                if (fold >= a.fold_count) break;
                float x = is_equal * row_at(a.folds[fold].values, blockIdx.y, (u32)row)[n];
                folded[fold] = binary(fold_of(a.folds[fold].function), folded[fold], x);
            }
        }
#pragma unroll
        for (u32 fold = 0; fold < 4; fold++) {
            if (fold >= a.fold_count) break;
            float whole = fold_lanes(fold_of(a.folds[fold].function), folded[fold]);
            if (lane_of() == 0) ((float*)row_at(a.out, blockIdx.y, (u32)row))[fold] = whole;
        }
    }
}

struct ChainArgs {
    Numbers reads[24];
    Numbers out;
    const u32* counts;
    u32 links[24]; // one byte each: function, first and second register, and whether it is binary
    u32 kept[24];  // registers that are written to the result
    u32 read_count, link_count, kept_count, unused;
};

// Element-wise functions on single numbers of a row, one thread per row: grid (parts, requests). Register n of a thread is
// shared[n, thread].
KERNEL(128, chain, ChainArgs) {
    float* registers = (float*)shared_memory() + threadIdx.x;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < a.counts[blockIdx.y]; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)at;
        for (u32 n = 0; n < a.read_count; n++) registers[n * blockDim.x] = *row_at(a.reads[n], blockIdx.y, row);
        for (u32 n = 0; n < a.link_count; n++) {
            u32 link = a.links[n], f = link & 255;
            float x = registers[(link >> 8 & 255) * blockDim.x], y = registers[(link >> 16 & 255) * blockDim.x];
            registers[(a.read_count + n) * blockDim.x] = link >> 24 ? binary(f, x, y) : unary(f, x);
        }
        float* out = (float*)row_at(a.out, blockIdx.y, row);
        for (u32 n = 0; n < a.kept_count; n++) out[n] = registers[a.kept[n] * blockDim.x];
    }
}

struct PickArgs {
    Numbers from, out;
    const u32* index; // number n of a result row is number index[n] of the source row; null: number n
    const u32* rows;  // result row n is source row rows[n]; null: row n
    const u32* counts;
    // Groups of `count` contiguous numbers (`runs`), written `stride` apart from number `first` on.
    u32 runs, count, stride, first;
};

// Copies numbers: transpose, slice, expand, gather and concatenate. Grid (parts, requests).
KERNEL(256, pick, PickArgs) {
    u64 each = (u64)a.runs * a.count, total = each * a.counts[blockIdx.y];
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
        u32 row = (u32)(at / each), within = (u32)(at % each);
        float x = row_at(a.from, blockIdx.y, a.rows ? a.rows[row] : row)[a.index ? a.index[within] : within];
        u64 place = (u64)(within / a.count) * a.stride + a.first + within % a.count;
        ((float*)row_at(a.out, blockIdx.y, row))[place] = x;
    }
}

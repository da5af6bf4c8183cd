// Pooled embedding bags: one warp a bag, rows of every format, from memory of the device or of a host that it can read.
#include "platform.cuh"

struct PoolArgs {
    const u8* rows;
    const i64* ids;       // rows of all bags; a negative one adds nothing
    const u32* offsets;   // [bags + 1]
    const float* weights; // one an id, or null
    float* sums;          // [bags, stride], of which columns `column` .. `column + width` are written
    u32 bags, width, row_bytes, stride, column;
    u32 is_mean;
};

enum RowFormat { F32, F16, BF16, INT8, INT4, INT2 };

// Numbers that a lane sums at a time.
#define EACH 4u

// Up to four numbers of a row from column `first` on; 0 beyond the width.
template <int FORMAT> DEVICE void read4(const u8* row, u32 first, u32 width, bool is_whole, float (&x)[EACH]) {
    const bool is_quantized = FORMAT >= INT8;
    float scale = 1, bias = 0;
    if (is_quantized) {
        // Rows of an odd number of bytes lie at any address.
        u32 head = is_whole ? __ldg((const u32*)row) : row[0] | row[1] << 8 | row[2] << 16 | (u32)row[3] << 24;
        scale = half_to_float((u16)head);
        bias = half_to_float((u16)(head >> 16));
        row += 4;
    }
    // Aligned rows of whole fours are read by one load.
    if (is_whole && FORMAT == F32) {
        float4 all = __ldg((const float4*)row + first / 4);
        x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
        return;
    }
    u32 packed[2] = {0, 0};
    if (is_whole && (FORMAT == F16 || FORMAT == BF16)) {
        uint2 all = __ldg((const uint2*)row + first / 4);
        packed[0] = all.x, packed[1] = all.y;
    } else if (is_whole && FORMAT == INT8) {
        packed[0] = __ldg((const u32*)row + first / 4);
    }
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u32 at = first + i;
        if (at >= width) {
            x[i] = 0;
            continue;
        }
        if (FORMAT == F32) x[i] = *(const float*)(row + 4 * (u64)at);
        else if (FORMAT == F16 || FORMAT == BF16) {
            u16 bits = is_whole ? (u16)(packed[i / 2] >> (16 * (i % 2))) : *(const u16*)(row + 2 * (u64)at);
            x[i] = FORMAT == F16 ? half_to_float(bits) : bf16_to_float(bits);
        } else {
            u32 code;
            if (FORMAT == INT8) code = is_whole ? packed[0] >> (8 * i) & 255 : row[at];
            else if (FORMAT == INT4) code = row[at / 2] >> (at % 2 * 4) & 15;
            else code = row[at / 4] >> (at % 4 * 2) & 3;
            x[i] = __fadd_rn(__fmul_rn(scale, (float)code), bias);
        }
    }
}

template <int FORMAT> DEVICE void pool(const PoolArgs& a) {
    u32 bag = blockIdx.x * warps_of() + warp_of();
    if (bag >= a.bags) return;
    u32 begin = a.offsets[bag], end = a.offsets[bag + 1];
    // Narrow rows share a warp: each of its parts takes every so many-th row.
    u32 lanes = 32;
    while (lanes > 1 && (lanes / 2) * EACH >= a.width) lanes /= 2;
    u32 parts = 32 / lanes, part = lane_of() / lanes, within = lane_of() % lanes;
    u32 aligned = FORMAT == F32 ? 16 : FORMAT >= INT8 ? 4 : 8;
    bool is_whole = a.width % EACH == 0 && a.row_bytes % aligned == 0 && (u64)a.rows % aligned == 0;
    for (u32 first = 0; first < a.width; first += lanes * EACH) {
        u32 column = first + within * EACH;
        float sums[EACH] = {0, 0, 0, 0};
        for (u32 n = begin + part; n < end; n += parts) {
            i64 id = a.ids[n];
            if (id < 0 || column >= a.width) continue;
            float x[EACH], weight = a.weights ? a.weights[n] : 1.0f;
            read4<FORMAT>(a.rows + (u64)id * a.row_bytes, column, a.width, is_whole, x);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) sums[i] = __fmaf_rn(weight, x[i], sums[i]);
        }
        for (u32 step = lanes; step < 32; step <<= 1) {
#pragma unroll
            for (u32 i = 0; i < EACH; i++) sums[i] += __shfl_xor_sync(EVERY_LANE, sums[i], step);
        }
        float factor = a.is_mean && end > begin ? __fdiv_rn(1.0f, (float)(end - begin)) : 1.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (part == 0 && column + i < a.width)
                a.sums[(u64)bag * a.stride + a.column + column + i] = __fmul_rn(sums[i], factor);
    }
}

KERNEL(256, pool_f32, PoolArgs) { pool<F32>(a); }
KERNEL(256, pool_f16, PoolArgs) { pool<F16>(a); }
KERNEL(256, pool_bf16, PoolArgs) { pool<BF16>(a); }
KERNEL(256, pool_int8, PoolArgs) { pool<INT8>(a); }
KERNEL(256, pool_int4, PoolArgs) { pool<INT4>(a); }
KERNEL(256, pool_int2, PoolArgs) { pool<INT2>(a); }

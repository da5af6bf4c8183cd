// Pooled embedding bags: one warp a bag, rows of every format; and how rows come to the device.
#include "platform.cuh"

struct PoolArgs {
    const u8* rows;
    const i64* ids;       // rows of all bags; a negative one adds nothing
    const u32* offsets;   // [bags + 1]
    const float* weights; // one an id, or null
    float* sums;          // [bags, stride], of which columns `column` .. `column + width` are written
    const u8* staged;     // rows that came with the ids: id `resident + n` is the n-th of them
    u64 resident;
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

// Rows of a table, and how a bag of them becomes one.
struct Pooled {
    const u8* rows;
    const u8* staged; // rows from number `resident` on
    const float* weights; // one a place, or null
    u64 resident;
    u32 width, row_bytes, is_mean;
};

// The rows at places `begin` to `end` as one, by a whole warp. `row_of` says which row a place takes; a negative one adds nothing.
template <int FORMAT, class RowOf> DEVICE void pool_bag(const Pooled& a, u32 begin, u32 end, RowOf row_of, float* out) {
    // Narrow rows share a warp: each of its parts takes every so many-th row.
    u32 lanes = 32;
    while (lanes > 1 && (lanes / 2) * EACH >= a.width) lanes /= 2;
    u32 parts = 32 / lanes, part = lane_of() / lanes, within = lane_of() % lanes;
    u32 aligned = FORMAT == F32 ? 16 : FORMAT >= INT8 ? 4 : 8;
    bool is_whole = a.width % EACH == 0 && a.row_bytes % aligned == 0 && ((u64)a.rows | (u64)a.staged) % aligned == 0;
    for (u32 first = 0; first < a.width; first += lanes * EACH) {
        u32 column = first + within * EACH;
        float sums[EACH] = {0, 0, 0, 0};
        for (u32 n = begin + part; n < end; n += parts) {
            i64 row = row_of(n);
            if (row < 0 || column >= a.width) continue;
            float x[EACH], weight = a.weights ? a.weights[n] : 1.0f;
            bool is_staged = (u64)row >= a.resident;
            const u8* from = is_staged ? a.staged + ((u64)row - a.resident) * a.row_bytes : a.rows + (u64)row * a.row_bytes;
            read4<FORMAT>(from, column, a.width, is_whole, x);
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
            if (part == 0 && column + i < a.width) out[column + i] = __fmul_rn(sums[i], factor);
    }
}

template <int FORMAT> DEVICE void pool(const PoolArgs& a) {
    u32 bag = blockIdx.x * warps_of() + warp_of();
    if (bag >= a.bags) return;
    Pooled of = {a.rows, a.staged, a.weights, a.resident, a.width, a.row_bytes, a.is_mean};
    float* out = a.sums + (u64)bag * a.stride + a.column;
    pool_bag<FORMAT>(of, a.offsets[bag], a.offsets[bag + 1], [&](u32 n) { return a.ids[n]; }, out);
}

KERNEL(256, pool_f32, PoolArgs) { pool<F32>(a); }
KERNEL(256, pool_f16, PoolArgs) { pool<F16>(a); }
KERNEL(256, pool_bf16, PoolArgs) { pool<BF16>(a); }
KERNEL(256, pool_int8, PoolArgs) { pool<INT8>(a); }
KERNEL(256, pool_int4, PoolArgs) { pool<INT4>(a); }
KERNEL(256, pool_int2, PoolArgs) { pool<INT2>(a); }

struct SlotBagsArgs {
    const u8* rows;
    const u32* keys;    // rows of the table, NO_ROW adds nothing; null: a slot takes the row of its own number
    const u32* offsets; // [slots + 1] where the keys of each slot start; null: each has one
    const u32* slots;   // [queries, stride]
    const u32* counts;  // [queries]
    float* out;         // [queries, stride, out_stride], of which columns `column` .. `column + width` are written
    u32 width, row_bytes, format, stride, out_stride, column;
    u32 is_mean, unused;
};

#define NO_ROW 0xffffffffu

template <int FORMAT> DEVICE void pool_slot(const SlotBagsArgs& a, u32 slot, float* out) {
    u32 begin = a.offsets ? a.offsets[slot] : slot, end = a.offsets ? a.offsets[slot + 1] : slot + 1;
    auto row_of = [&](u32 n) { return !a.keys ? (i64)n : a.keys[n] == NO_ROW ? (i64)-1 : (i64)a.keys[n]; };
    pool_bag<FORMAT>({a.rows, nullptr, nullptr, ~0ull, a.width, a.row_bytes, a.is_mean}, begin, end, row_of, out);
}

// What candidates are looked up in: grid (parts, queries), a warp a candidate.
KERNEL(256, pool_slots, SlotBagsArgs) {
    u32 count = a.counts[blockIdx.y];
    for (u32 n = blockIdx.x * warps_of() + warp_of(); n < count; n += gridDim.x * warps_of()) {
        u64 place = (u64)blockIdx.y * a.stride + n;
        float* out = a.out + place * a.out_stride + a.column;
        switch (a.format) {
        case F32: pool_slot<F32>(a, a.slots[place], out); break;
        case F16: pool_slot<F16>(a, a.slots[place], out); break;
        case BF16: pool_slot<BF16>(a, a.slots[place], out); break;
        case INT8: pool_slot<INT8>(a, a.slots[place], out); break;
        case INT4: pool_slot<INT4>(a, a.slots[place], out); break;
        default: pool_slot<INT2>(a, a.slots[place], out);
        }
    }
}

struct PlaceArgs {
    const u8* staged;  // rows
    const u32* taken;  // [count] which of them
    const u32* places; // [count] where each goes
    u8* rows;
    u32 count, row_bytes;
};

// Puts staged rows in their places: a warp a row.
KERNEL(256, place_rows, PlaceArgs) {
    u32 n = blockIdx.x * warps_of() + warp_of();
    if (n >= a.count) return;
    const u8* from = a.staged + (u64)a.taken[n] * a.row_bytes;
    u8* to = a.rows + (u64)a.places[n] * a.row_bytes;
    for (u32 i = lane_of(); i < a.row_bytes; i += 32) to[i] = from[i];
}

struct FetchArgs {
    const u8* host;    // rows, in memory of the host
    const i64* wanted; // [count] which of them
    u8* rows;          // [count, row_bytes]
    u32 count, row_bytes;
};

// Reads of a lane that are under way together.
#define AHEAD 4u

template <class Word> DEVICE void fetch(const Word* from, Word* to, u32 words) {
    for (u32 first = lane_of(); first < words; first += 32 * AHEAD) {
        Word read[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (first + 32 * i < words) read[i] = from_host(from + first + 32 * i);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (first + 32 * i < words) to[first + 32 * i] = read[i];
    }
}

// Rows of the host side by side: a warp a row, so that all are under way at once, by reads of a whole line each.
KERNEL(256, fetch_rows, FetchArgs) {
    u32 n = blockIdx.x * warps_of() + warp_of();
    if (n >= a.count) return;
    const u8* from = a.host + (u64)a.wanted[n] * a.row_bytes;
    u8* to = a.rows + (u64)n * a.row_bytes;
    if (((u64)a.host | a.row_bytes) % 4 == 0) fetch((const u32*)from, (u32*)to, a.row_bytes / 4);
    else fetch(from, to, a.row_bytes);
}

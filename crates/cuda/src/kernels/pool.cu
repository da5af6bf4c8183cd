// Embedding bags: one warp per bag, for rows of every format; also uploads of rows to their places, and downloads of results.
#include "platform.cuh"

struct PoolArgs {
    const u8* rows;
    const i64* ids;       // rows of all bags; negative ids add nothing
    const u32* offsets;   // [bags + 1]
    const float* weights; // one per id, or null
    float* sums;          // [bags, stride], of which columns `column` to `column + width` are written
    const u8* staged;     // rows uploaded with the ids: id `resident + n` is the n-th staged row
    u64 resident;
    u32 bags, width, row_bytes, stride, column;
    u32 is_mean;
};

enum RowFormat { F32, F16, BF16, INT8, INT4, INT2 };

// Number of adjacent numbers of a row that are read together.
#define EACH 4u

// Bits per stored number.
template <int FORMAT> DEVICE constexpr u32 bits_of() {
    return FORMAT == F32 ? 32 : FORMAT == F16 || FORMAT == BF16 ? 16 : FORMAT == INT8 ? 8 : FORMAT == INT4 ? 4 : 2;
}

// Four adjacent numbers of a row in storage format.
struct Stored {
    u32 words[EACH];
};

// Reads four numbers from column `first` on. If rows are multiples of four numbers at aligned addresses, this is one load. A null
// row reads as zero.
template <int FORMAT, bool IS_WHOLE> DEVICE Stored stored(const u8* row, u32 first, u32 width) {
    Stored s = {{0, 0, 0, 0}};
    if (!row) return s;
    const u32 bits = bits_of<FORMAT>();
    const u8* codes = row + (FORMAT >= INT8 ? 4 : 0);
    if (IS_WHOLE) {
        if (FORMAT == F32) {
            uint4 all = __ldg((const uint4*)codes + first / 4);
            s.words[0] = all.x, s.words[1] = all.y, s.words[2] = all.z, s.words[3] = all.w;
        } else if (FORMAT == F16 || FORMAT == BF16) {
            uint2 all = __ldg((const uint2*)codes + first / 4);
            s.words[0] = all.x, s.words[1] = all.y;
        } else {
            s.words[0] = FORMAT == INT8   ? __ldg((const u32*)codes + first / 4)
                         : FORMAT == INT4 ? __ldg((const u16*)codes + first / 4)
                                          : codes[first / 4];
        }
        return s;
    }
    // Rows with an odd number of bytes are unaligned.
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u32 at = first + i, number;
        if (at >= width) continue;
        if (FORMAT == F32) number = *(const u32*)(codes + 4 * (u64)at);
        else if (FORMAT == F16 || FORMAT == BF16) number = *(const u16*)(codes + 2 * (u64)at);
        else number = codes[at * bits / 8] >> (at * bits % 8) & (u32)((1ull << bits) - 1);
        s.words[i * bits / 32] |= number << (i * bits % 32);
    }
    return s;
}

// Scale and bias in front of quantized numbers.
template <int FORMAT, bool IS_WHOLE> DEVICE u32 head_of(const u8* row) {
    if (FORMAT < INT8 || !row) return 0;
    if (IS_WHOLE) return __ldg((const u32*)row);
    return row[0] | row[1] << 8 | row[2] << 16 | (u32)row[3] << 24;
}

template <int FORMAT> DEVICE float number_of(u32 head, const Stored& s, u32 i) {
    const u32 bits = bits_of<FORMAT>();
    u32 number = s.words[i * bits / 32] >> (i * bits % 32) & (u32)((1ull << bits) - 1);
    if (FORMAT == F32) return __uint_as_float(number);
    if (FORMAT == F16) return half_to_float((u16)number);
    if (FORMAT == BF16) return bf16_to_float((u16)number);
    return __fadd_rn(__fmul_rn(half_to_float((u16)head), (float)number), half_to_float((u16)(head >> 16)));
}

// Rows of a table, and how a bag of rows is pooled.
struct Pooled {
    const u8* rows;
    const u8* staged; // rows from number `resident` on
    const float* weights; // one per place, or null
    u64 resident;
    u32 width, row_bytes, is_mean;
};

// Pools the rows at places `begin` to `end` by a complete warp. A lane handles FOURS groups of four numbers of a row:
// more groups per lane mean fewer instructions to find a row. `row_of` returns the row of a place; a negative row adds
// nothing.
template <int FORMAT, bool IS_WHOLE, u32 FOURS, class RowOf>
DEVICE void pool_rows(const Pooled& a, u32 begin, u32 end, RowOf row_of, float* out) {
    const u32 ROWS_AHEAD = FOURS > 1 ? 2 : 4; // under way together
    // Narrow rows share a warp: each part of the warp processes every `parts`-th row.
    u32 lanes = 32;
    while (lanes > 1 && (lanes / 2) * FOURS * EACH >= a.width) lanes /= 2;
    u32 parts = 32 / lanes, part = lane_of() / lanes, within = lane_of() % lanes;
    for (u32 first = 0; first < a.width; first += lanes * FOURS * EACH) {
        u32 column = first + within * EACH; // column of the lane's first group of four; its other groups are `lanes` groups apart
        float sums[FOURS][EACH] = {};
        for (u32 from = begin + part; from < end; from += parts * ROWS_AHEAD) {
            const u8* rows[ROWS_AHEAD];
            float weights[ROWS_AHEAD];
#pragma unroll
            for (u32 r = 0; r < ROWS_AHEAD; r++) {
                u32 n = from + r * parts;
                i64 row = n < end ? row_of(n) : -1;
                weights[r] = a.weights && n < end ? a.weights[n] : 1.0f;
                bool is_staged = (u64)row >= a.resident;
                rows[r] = row < 0    ? nullptr
                          : is_staged ? a.staged + ((u64)row - a.resident) * a.row_bytes
                                      : a.rows + (u64)row * a.row_bytes;
            }
            Stored read[ROWS_AHEAD][FOURS];
            u32 heads[ROWS_AHEAD];
#pragma unroll
            for (u32 r = 0; r < ROWS_AHEAD; r++) {
                heads[r] = head_of<FORMAT, IS_WHOLE>(rows[r]);
#pragma unroll
                for (u32 f = 0; f < FOURS; f++) {
                    u32 at = column + f * lanes * EACH;
                    read[r][f] = stored<FORMAT, IS_WHOLE>(at < a.width ? rows[r] : nullptr, at, a.width);
                }
            }
#pragma unroll
            for (u32 r = 0; r < ROWS_AHEAD; r++) {
                if (!rows[r]) continue;
#pragma unroll
                for (u32 f = 0; f < FOURS; f++) {
#pragma unroll
                    for (u32 i = 0; i < EACH; i++)
                        if (column + f * lanes * EACH + (IS_WHOLE ? 0 : i) < a.width)
                            sums[f][i] = __fmaf_rn(weights[r], number_of<FORMAT>(heads[r], read[r][f], i), sums[f][i]);
                }
            }
        }
        for (u32 step = lanes; step < 32; step <<= 1) {
#pragma unroll
            for (u32 n = 0; n < FOURS * EACH; n++) sums[n / EACH][n % EACH] += __shfl_xor_sync(EVERY_LANE, sums[n / EACH][n % EACH], step);
        }
        float factor = a.is_mean && end > begin ? __fdiv_rn(1.0f, (float)(end - begin)) : 1.0f;
        // If each lane wrote a single number, every memory sector would be written in several parts.
        bool is_aligned = IS_WHOLE && (u64)out % 16 == 0;
#pragma unroll
        for (u32 f = 0; f < FOURS; f++) {
            u32 at = column + f * lanes * EACH;
            if (part > 0 || at >= a.width) continue;
            float four[EACH];
#pragma unroll
            for (u32 i = 0; i < EACH; i++) four[i] = __fmul_rn(sums[f][i], factor);
            if (is_aligned) {
                *(float4*)(out + at) = float4{four[0], four[1], four[2], four[3]};
                continue;
            }
#pragma unroll
            for (u32 i = 0; i < EACH; i++)
                if (at + i < a.width) out[at + i] = four[i];
        }
    }
}

template <int FORMAT, u32 FOURS, class RowOf> DEVICE void pool_bag(const Pooled& a, u32 begin, u32 end, RowOf row_of, float* out) {
    // Codes of four bits are stored in pairs of bytes after a head of four bytes.
    u32 aligned = FORMAT == F32 ? 16 : FORMAT == F16 || FORMAT == BF16 ? 8 : 4;
    if (a.width % EACH == 0 && a.row_bytes % aligned == 0 && ((u64)a.rows | (u64)a.staged) % aligned == 0)
        pool_rows<FORMAT, true, FOURS>(a, begin, end, row_of, out);
    else pool_rows<FORMAT, false, 1>(a, begin, end, row_of, out);
}

template <int FORMAT> DEVICE void pool(const PoolArgs& a) {
    u32 bag = blockIdx.x * warps_of() + warp_of();
    if (bag >= a.bags) return;
    Pooled of = {a.rows, a.staged, a.weights, a.resident, a.width, a.row_bytes, a.is_mean};
    float* out = a.sums + (u64)bag * a.stride + a.column;
    pool_bag<FORMAT, FORMAT >= INT8 ? 4 : 1>(of, a.offsets[bag], a.offsets[bag + 1], [&](u32 n) { return a.ids[n]; }, out);
}

KERNEL(256, pool_f32, PoolArgs) { pool<F32>(a); }
KERNEL(256, pool_f16, PoolArgs) { pool<F16>(a); }
KERNEL(256, pool_bf16, PoolArgs) { pool<BF16>(a); }
KERNEL(256, pool_int8, PoolArgs) { pool<INT8>(a); }
KERNEL(256, pool_int4, PoolArgs) { pool<INT4>(a); }
KERNEL(256, pool_int2, PoolArgs) { pool<INT2>(a); }

struct SlotBagsArgs {
    const u8* rows;
    const u32* keys;    // rows of the table, NO_ROW adds nothing; null: slot n uses row n
    const u32* offsets; // [slots + 1] start of each slot's keys; null: one key per slot
    const u32* slots;   // [queries, stride]
    const u32* counts;  // [queries]
    float* out;         // [queries, stride, out_stride], of which columns `column` to `column + width` are written
    u32 width, row_bytes, format, stride, out_stride, column;
    u32 is_mean, unused;
};

#define NO_ROW 0xffffffffu

template <int FORMAT> DEVICE void pool_slot(const SlotBagsArgs& a, u32 slot, float* out) {
    u32 begin = a.offsets ? a.offsets[slot] : slot, end = a.offsets ? a.offsets[slot + 1] : slot + 1;
    auto row_of = [&](u32 n) { return !a.keys ? (i64)n : a.keys[n] == NO_ROW ? (i64)-1 : (i64)a.keys[n]; };
    pool_bag<FORMAT, 1>({a.rows, nullptr, nullptr, ~0ull, a.width, a.row_bytes, a.is_mean}, begin, end, row_of, out);
}

// Pools the looked-up rows of candidates: grid (parts, queries), one warp per candidate.
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
    const u32* taken;  // [count] staged row of each copy
    const u32* places; // [count] destination row of each copy
    u8* rows;
    u32 count, row_bytes;
};

// Copies staged rows to their places: one warp per row.
KERNEL(256, place_rows, PlaceArgs) {
    u32 n = blockIdx.x * warps_of() + warp_of();
    if (n >= a.count) return;
    const u8* from = a.staged + (u64)a.taken[n] * a.row_bytes;
    u8* to = a.rows + (u64)a.places[n] * a.row_bytes;
    for (u32 i = lane_of(); i < a.row_bytes; i += 32) to[i] = from[i];
}

struct FetchArgs {
    const u8* host;    // rows in host memory
    const i64* wanted; // [count] requested rows
    u8* rows;          // [count, row_bytes]
    u32 count, row_bytes;
};

// Number of loads that a lane has in progress at a time.
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

// Gathers rows in host memory: one warp per row, so that all rows are read at once, in complete lines.
KERNEL(256, fetch_rows, FetchArgs) {
    u32 n = blockIdx.x * warps_of() + warp_of();
    if (n >= a.count) return;
    const u8* from = a.host + (u64)a.wanted[n] * a.row_bytes;
    u8* to = a.rows + (u64)n * a.row_bytes;
    if (((u64)a.host | a.row_bytes) % 4 == 0) fetch((const u32*)from, (u32*)to, a.row_bytes / 4);
    else fetch(from, to, a.row_bytes);
}

#define RESULTS_MAX 16

struct ResultAt {
    const u32* from;
    u32* to; // pinned host memory
    u64 bytes;
};

struct ResultsArgs {
    ResultAt results[RESULTS_MAX];
};

// Copies results to pinned host memory: grid (parts, results), one word per thread.
KERNEL(256, send_results, ResultsArgs) {
    const ResultAt& result = a.results[blockIdx.y];
    u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x, whole = result.bytes / 4;
    if (n < whole) result.to[n] = result.from[n];
    else if (n == whole)
        for (u64 i = 4 * whole; i < result.bytes; i++) ((u8*)result.to)[i] = ((const u8*)result.from)[i];
}

// Embedding tables in training: pooled lookups, and the backward pass fused with the optimizer, in the order of sums of
// `crates/kernels/src/cpu/update`, so that rows and state get the same bits. There are no atomics.
//
// That order suits a GPU: a column belongs to one lane, so that a run of SUM_RUN gradients is added one by one with several loads
// in flight, and a block of 16 columns to four lanes, whose tree of sums is two shuffles. Runs of 32, a warp each, would spread
// rows of medium frequency over more warps, but change the bits: a run of 256 waits for 64 rounds of loads from the L2 cache,
// about 20 us, beside the other rows.
//
// A *slot* is a row of gradients: of a bag, or of an id of a sequence. An *occurrence* is an id of a slot that has a row. Rows of
// all tables are numbered together.
#include "platform.cuh"

// Feature that reads a table. Its slots are consecutive.
struct Feature {
    u64 values; // first number of its first slot, in outputs and in gradients
    u32 first_slot, table;
    u32 stride; // numbers between slots
    u32 is_mean;
};

enum Rule { SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM };
enum Decay { NO_DECAY, L2, DECOUPLED };

// Table: each row is followed by its optimizer state.
struct Master {
    float* stretches;
    u32 first_row, width, stride;
    u32 rule, decay;
    float rate, epsilon, beta1, beta2, lambda;
    float max_norm, clip; // 0: no limit
};

// Id without a row.
#define NO_ROW 0xffffffffu
// Adjacent columns of a lane.
#define EACH 4u
// Columns whose squares are added as a tree, on four lanes.
#define BLOCK 16u
// Occurrences that are added one by one; longer sums add such runs.
#define SUM_RUN 256u
// Occurrences per sum of a run in the buffer of these. A row with more than SUM_RUN occurrences has two such places at least for each
// of its runs, so that rows need no numbers of their runs: the runs of a row from occurrence `start` on take the places from
// `start / SUM_PLACE` on.
#define SUM_PLACE 128u
// Loads of a lane in flight together.
#define AHEAD 4u

// Returns the last of `count` numbers at which the rising `at` is at most `value`. The first one always is.
template <class At> DEVICE u32 last_upto(u32 count, u32 value, At at) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (at(middle) <= value) low = middle;
        else high = middle;
    }
    return low;
}

// Reads four adjacent columns, zeros beyond the width. WHOLE rows are multiples of four numbers at aligned addresses.
template <bool WHOLE> DEVICE void read_four(const float* row, u32 column, u32 width, float (&x)[EACH]) {
    if (WHOLE) {
        float4 four = column < width ? *(const float4*)(row + column) : float4{0, 0, 0, 0};
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < EACH; i++) x[i] = column + i < width ? row[column + i] : 0.0f;
}

template <bool WHOLE> DEVICE void write_four(float* row, u32 column, u32 width, const float (&x)[EACH]) {
    if (WHOLE) {
        if (column < width) *(float4*)(row + column) = float4{x[0], x[1], x[2], x[3]};
        return;
    }
#pragma unroll
    for (u32 i = 0; i < EACH; i++)
        if (column + i < width) row[column + i] = x[i];
}

// Lanes of a warp that share a row: at least those of a block.
DEVICE u32 lanes_a_row(u32 width) {
    u32 lanes = 32;
    while (lanes > BLOCK / EACH && lanes / 2 * EACH >= width) lanes /= 2;
    return lanes;
}

struct LookUpArgs {
    const Feature* features; // [features + 1]
    const Master* masters;
    const u32* rows;      // of all slots; NO_ROW adds nothing
    const float* weights; // one per row, or null
    const u32* offsets;   // [slots + 1]
    float* values;
};

template <bool WHOLE> DEVICE void pool_slot(const LookUpArgs& a, const Master& m, u32 begin, u32 end, u32 first_column, u32 step, float factor, float* out) {
    for (u32 column = first_column; column < m.width; column += step) {
        float sum[EACH] = {0, 0, 0, 0};
        for (u32 from = begin; from < end; from += AHEAD) {
            float read[AHEAD][EACH], weights[AHEAD];
            bool has_row[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                u32 n = from + i, row = n < end ? a.rows[n] : NO_ROW;
                has_row[i] = row != NO_ROW;
                weights[i] = a.weights && n < end ? a.weights[n] : 1.0f;
                if (has_row[i]) read_four<WHOLE>(m.stretches + (u64)row * m.stride, column, m.width, read[i]);
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                if (!has_row[i]) continue;
#pragma unroll
                for (u32 c = 0; c < EACH; c++) sum[c] = __fmaf_rn(weights[i], read[i][c], sum[c]);
            }
        }
#pragma unroll
        for (u32 c = 0; c < EACH; c++) sum[c] = __fmul_rn(sum[c], factor);
        write_four<WHOLE>(out, column, m.width, sum);
    }
}

// Pools the rows of each slot, in their order. Grid (parts, features), a group of lanes per slot.
KERNEL(256, look_up, LookUpArgs) {
    const Feature& f = a.features[blockIdx.y];
    const Master& m = a.masters[f.table];
    u32 lanes = lanes_a_row(m.width), groups = blockDim.x / lanes, slots = a.features[blockIdx.y + 1].first_slot - f.first_slot;
    u32 step = lanes * EACH, first_column = threadIdx.x % lanes * EACH;
    bool is_whole = m.width % EACH == 0 && m.stride % EACH == 0 && f.stride % EACH == 0 && f.values % EACH == 0;
    for (u32 slot = blockIdx.x * groups + threadIdx.x / lanes; slot < slots; slot += gridDim.x * groups) {
        u32 begin = a.offsets[f.first_slot + slot], end = a.offsets[f.first_slot + slot + 1];
        float factor = f.is_mean && end > begin ? __fdiv_rn(1.0f, (float)(end - begin)) : 1.0f;
        float* out = a.values + f.values + (u64)slot * f.stride;
        if (is_whole) pool_slot<true>(a, m, begin, end, first_column, step, factor, out);
        else pool_slot<false>(a, m, begin, end, first_column, step, factor, out);
    }
}

// Where the gradient of a slot is, and its factor.
struct SlotAt {
    u64 values;
    float factor;
    u32 unused;
};

struct PairArgs {
    const Feature* features; // [features + 1], those of tables that learn
    const Master* masters;
    const u32* rows;
    const u32* offsets;
    u32* keys;    // [occurrences] number of the row among those of all tables, or `no_key` without one
    u32* values;  // [occurrences] slot, or number of the occurrence if there are weights
    u32* slot_of; // [occurrences], or null without weights
    SlotAt* slots;
    u32 feature_count, slot_count, count, no_key;
};

// Describes the slots: one thread per slot.
KERNEL(256, describe_slots, PairArgs) {
    for (u32 slot = blockIdx.x * blockDim.x + threadIdx.x; slot < a.slot_count; slot += gridDim.x * blockDim.x) {
        const Feature& f = a.features[last_upto(a.feature_count, slot, [&](u32 n) { return a.features[n].first_slot; })];
        u32 length = a.offsets[slot + 1] - a.offsets[slot];
        float factor = f.is_mean && length > 0 ? __fdiv_rn(1.0f, (float)length) : 1.0f;
        a.slots[slot] = SlotAt{f.values + (u64)(slot - f.first_slot) * f.stride, factor, 0};
    }
}

// Makes the pairs to be sorted: one thread per id.
KERNEL(256, make_pairs, PairArgs) {
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < a.count; n += gridDim.x * blockDim.x) {
        // Of several slots with this offset, all but the last are empty.
        u32 slot = last_upto(a.slot_count, n, [&](u32 s) { return a.offsets[s]; });
        const Feature& f = a.features[last_upto(a.feature_count, slot, [&](u32 i) { return a.features[i].first_slot; })];
        u32 row = a.rows[n];
        a.keys[n] = row == NO_ROW ? a.no_key : a.masters[f.table].first_row + row;
        a.values[n] = a.slot_of ? n : slot;
        if (a.slot_of) a.slot_of[n] = slot;
    }
}

#define SORT_DIGITS 256u
#define TILE_WARPS 8u
#define ITEMS 8u
// Pairs of a block. A warp has consecutive ones.
#define TILE (TILE_WARPS * 32 * ITEMS)

struct SortArgs {
    const u32* keys;
    const u32* values;
    u32* keys_out;
    u32* values_out;
    u32* counts; // [digits, tiles]
    u32* totals; // [digits]
    u32 count, tiles, shift, bits;
};

// Returns the number of equal digits before that of the lane, among those of the warp's earlier calls and of lower lanes.
// `counts` are those of the warp. Called by the complete warp.
DEVICE u32 rank_of(u32 digit, bool has_one, u32 bits, u32* counts) {
    u32 equal = __ballot_sync(EVERY_LANE, has_one);
    for (u32 b = 0; b < bits; b++) {
        u32 votes = __ballot_sync(EVERY_LANE, digit >> b & 1);
        equal &= digit >> b & 1 ? votes : ~votes;
    }
    u32 earlier = has_one ? counts[digit] : 0, before = __popc(equal & lanes_before());
    __syncwarp();
    if (has_one && before == 0) counts[digit] = earlier + __popc(equal);
    __syncwarp();
    return earlier + before;
}

// Loads the keys of a tile and ranks their digits, warp by warp. Returns with the counts of all warps in shared memory, after a
// barrier.
DEVICE void rank_tile(const SortArgs& a, u32* counts, u32 (&keys)[ITEMS], u32 (&ranks)[ITEMS]) {
    for (u32 n = threadIdx.x; n < TILE_WARPS * SORT_DIGITS; n += blockDim.x) counts[n] = 0;
    __syncthreads();
    u32 first = blockIdx.x * TILE + warp_of() * 32 * ITEMS + lane_of();
#pragma unroll
    for (u32 i = 0; i < ITEMS; i++) keys[i] = first + 32 * i < a.count ? a.keys[first + 32 * i] : 0;
#pragma unroll
    for (u32 i = 0; i < ITEMS; i++) {
        u32 digit = keys[i] >> a.shift & ((1u << a.bits) - 1);
        ranks[i] = rank_of(digit, first + 32 * i < a.count, a.bits, counts + warp_of() * SORT_DIGITS);
    }
    __syncthreads();
}

// Counts the digits of each tile: one block per tile.
KERNEL(256, count_tile, SortArgs) {
    u32* counts = (u32*)shared_memory(); // [warps, digits]
    u32 keys[ITEMS], ranks[ITEMS], sum = 0;
    rank_tile(a, counts, keys, ranks);
    for (u32 w = 0; w < TILE_WARPS; w++) sum += counts[w * SORT_DIGITS + threadIdx.x];
    if (threadIdx.x >> a.bits == 0) a.counts[(u64)threadIdx.x * a.tiles + blockIdx.x] = sum;
}

// Exclusive prefix sum over the threads of a block of TILE_WARPS warps. `sums` has a number per warp; the total is the sum of
// them. Called by the complete block, which must reach a barrier before `sums` is written again.
DEVICE u32 before_in_block(u32 value, u32* sums) {
    u32 upto = lanes_upto(value);
    if (lane_of() == 31) sums[warp_of()] = upto;
    __syncthreads();
    u32 before = upto - value;
    for (u32 w = 0; w < warp_of(); w++) before += sums[w];
    return before;
}

// Turns counts of tiles into the counts of the tiles before: one block per digit.
KERNEL(256, sum_tiles, SortArgs) {
    u32* sums = (u32*)shared_memory(); // [warps]
    u32* counts = a.counts + (u64)blockIdx.x * a.tiles;
    u32 earlier = 0;
    for (u32 first = 0; first < a.tiles; first += blockDim.x) {
        u32 n = first + threadIdx.x, count = n < a.tiles ? counts[n] : 0, before = before_in_block(count, sums);
        if (n < a.tiles) counts[n] = earlier + before;
        for (u32 w = 0; w < TILE_WARPS; w++) earlier += sums[w];
        __syncthreads();
    }
    if (threadIdx.x == 0) a.totals[blockIdx.x] = earlier;
}

// Moves the pairs to their places by one digit; equal digits keep their order. One block per tile.
KERNEL(256, sort_tile, SortArgs) {
    u32* counts = (u32*)shared_memory(); // [warps, digits]
    u32* sums = counts + TILE_WARPS * SORT_DIGITS;
    u32 keys[ITEMS], ranks[ITEMS], digit = threadIdx.x;
    bool is_digit = digit >> a.bits == 0;
    rank_tile(a, counts, keys, ranks);
    u32 place = before_in_block(is_digit ? a.totals[digit] : 0, sums) + (is_digit ? a.counts[(u64)digit * a.tiles + blockIdx.x] : 0);
    for (u32 w = 0; w < TILE_WARPS; w++) {
        u32 count = counts[w * SORT_DIGITS + digit];
        counts[w * SORT_DIGITS + digit] = place;
        place += count;
    }
    __syncthreads();
    u32 first = blockIdx.x * TILE + warp_of() * 32 * ITEMS + lane_of();
#pragma unroll
    for (u32 i = 0; i < ITEMS; i++) {
        u32 n = first + 32 * i;
        if (n >= a.count) continue;
        u32 to = counts[warp_of() * SORT_DIGITS + (keys[i] >> a.shift & ((1u << a.bits) - 1))] + ranks[i];
        a.keys_out[to] = keys[i];
        a.values_out[to] = a.values[n];
    }
}

struct HeadArgs {
    const u32* keys; // [occurrences] rising
    u32* counts;     // [tiles] heads, then heads of the tiles before
    const u32* total;
    u32* starts; // [rows + 1] first occurrence of each distinct row
    u32 count, no_key;
};

DEVICE bool is_head(const HeadArgs& a, u32 n) {
    return n < a.count && a.keys[n] != a.no_key && (n == 0 || a.keys[n - 1] != a.keys[n]);
}

// Heads of the warp's occurrences of a tile, and those before it in the tile. Called by the complete block.
DEVICE u32 heads_of(const HeadArgs& a, u32 (&votes)[ITEMS], u32* sums) {
    u32 first = blockIdx.x * TILE + warp_of() * 32 * ITEMS + lane_of(), heads = 0;
#pragma unroll
    for (u32 i = 0; i < ITEMS; i++) {
        votes[i] = __ballot_sync(EVERY_LANE, is_head(a, first + 32 * i));
        heads += __popc(votes[i]);
    }
    if (lane_of() == 0) sums[warp_of()] = heads;
    __syncthreads();
    u32 before = 0;
    for (u32 w = 0; w < warp_of(); w++) before += sums[w];
    return before;
}

// Counts the distinct rows that begin in each tile: one block per tile.
KERNEL(256, count_heads, HeadArgs) {
    u32* sums = (u32*)shared_memory(); // [warps]
    u32 votes[ITEMS], before = heads_of(a, votes, sums);
    if (threadIdx.x == blockDim.x - 1) a.counts[blockIdx.x] = before + sums[warp_of()];
}

// Lists the first occurrences of the distinct rows, and the end of the last: one block per tile.
KERNEL(256, place_heads, HeadArgs) {
    u32* sums = (u32*)shared_memory(); // [warps]
    u32 votes[ITEMS], place = heads_of(a, votes, sums) + a.counts[blockIdx.x];
    u32 first = blockIdx.x * TILE + warp_of() * 32 * ITEMS + lane_of();
    for (u32 i = 0; i < ITEMS; i++) {
        u32 n = first + 32 * i;
        if (votes[i] >> lane_of() & 1) a.starts[place + __popc(votes[i] & lanes_before())] = n;
        place += __popc(votes[i]);
        bool is_last = n < a.count && a.keys[n] != a.no_key && (n + 1 == a.count || a.keys[n + 1] == a.no_key);
        if (is_last) a.starts[*a.total] = n + 1;
    }
}

// Sorted occurrences with their gradients.
struct Sorted {
    const u32* keys;
    const u32* values;    // slot, or number of the occurrence if there are weights
    const u32* slot_of;   // null without weights
    const float* weights; // null without weights
    const SlotAt* slots;
    const float* gradients;
    const u32* starts; // [rows + 1]
    const u32* row_count;
    float* runs; // [places, run_stride]
    u32 run_stride;
    u32 unused;
};

// Sums the gradients of consecutive occurrences, in their order.
template <bool WHOLE, u32 FOURS> DEVICE void sum_run(const Sorted& s, u32 begin, u32 end, u32 width, u32 first_column, u32 step, float (&sum)[FOURS][EACH]) {
#pragma unroll
    for (u32 f = 0; f < FOURS; f++) sum[f][0] = sum[f][1] = sum[f][2] = sum[f][3] = 0;
    for (u32 from = begin; from < end; from += AHEAD) {
        float read[AHEAD][FOURS][EACH], factors[AHEAD], weights[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            // Beyond the end the last one is read again.
            u32 value = s.values[min(from + i, end - 1)];
            weights[i] = s.weights ? s.weights[value] : 1.0f;
            const SlotAt& at = s.slots[s.slot_of ? s.slot_of[value] : value];
            factors[i] = at.factor;
#pragma unroll
            for (u32 f = 0; f < FOURS; f++) read_four<WHOLE>(s.gradients + at.values, first_column + f * step, width, read[i][f]);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (from + i >= end) continue;
#pragma unroll
            for (u32 n = 0; n < FOURS * EACH; n++) {
                float gradient = __fmul_rn(weights[i], __fmul_rn(read[i][n / EACH][n % EACH], factors[i]));
                sum[n / EACH][n % EACH] = __fadd_rn(sum[n / EACH][n % EACH], gradient);
            }
        }
    }
}

struct UpdateArgs {
    Sorted of;
    const Master* masters;
    u32* touched; // [rows] number of each distinct row, with REJECTED if it is not written
    u32 master_count;
    u32 first_row, end_row; // rows of this launch, among those of all tables
    u32 lanes, is_whole;
    float component_max;
};

#define REJECTED 0x80000000u

DEVICE const Master& master_of(const UpdateArgs& a, u32 key) {
    return a.masters[last_upto(a.master_count, key, [&](u32 n) { return a.masters[n].first_row; })];
}

// Returns the number of distinct rows below a row.
DEVICE u32 rows_below(const Sorted& s, u32 row) {
    u32 low = 0, high = *s.row_count;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (s.keys[s.starts[middle]] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Sums the runs of rows with more than SUM_RUN occurrences: one warp per place in `runs`.
KERNEL(256, sum_runs, UpdateArgs) {
    const Sorted& s = a.of;
    u32 place = blockIdx.x * warps_of() + warp_of(), rows = *s.row_count;
    if (rows == 0) return;
    // A row with runs here is the last one that starts before the next place.
    u32 row = last_upto(rows, place * SUM_PLACE + SUM_PLACE - 1, [&](u32 n) { return s.starts[n]; });
    u32 start = s.starts[row], end = s.starts[row + 1], run = place - start / SUM_PLACE;
    if (end - start <= SUM_RUN || run * SUM_RUN >= end - start) return;
    const Master& m = master_of(a, s.keys[start]);
    u32 begin = start + run * SUM_RUN;
    // Up to the widest table, so that columns beyond this one are zeros.
    for (u32 column = lane_of() * EACH; column < s.run_stride; column += 32 * EACH) {
        float sum[1][EACH];
        // Rows of both kinds may be here; only their few gradients matter.
        sum_run<false, 1>(s, begin, min(begin + SUM_RUN, end), m.width, column, 0, sum);
        write_four<false>(s.runs + (u64)place * s.run_stride, column, s.run_stride, sum[0]);
    }
}

// Lanes that share a row. The first lane of them is `first`.
struct Lanes {
    u32 count, within, first, mask;
};

DEVICE Lanes lanes_of(u32 count) {
    u32 first = lane_of() / count * count;
    return {count, lane_of() - first, first, count == 32 ? EVERY_LANE : ((1u << count) - 1) << first};
}

// Returns the sum of squares of a row: of each block as a tree, whose upper half is added to the lower one, then block by block.
template <u32 FOURS> DEVICE float square_sum(const Lanes& l, const float (&x)[FOURS][EACH]) {
    float blocks[FOURS], sum = 0;
#pragma unroll
    for (u32 f = 0; f < FOURS; f++) {
        float four[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            float square = __fmul_rn(x[f][i], x[f][i]);
            float eight = __fadd_rn(square, __shfl_xor_sync(l.mask, square, 2));
            four[i] = __fadd_rn(eight, __shfl_xor_sync(l.mask, eight, 1));
        }
        blocks[f] = __fadd_rn(__fadd_rn(four[0], four[2]), __fadd_rn(four[1], four[3]));
    }
#pragma unroll
    for (u32 f = 0; f < FOURS; f++)
        for (u32 lane = 0; lane < l.count; lane += BLOCK / EACH) sum = __fadd_rn(sum, __shfl_sync(l.mask, blocks[f], (int)(l.first + lane)));
    return sum;
}

// Scales a row down to a maximum norm.
template <u32 FOURS> DEVICE void scale_to(const Lanes& l, float (&x)[FOURS][EACH], float norm_max) {
    float norm = __fsqrt_rn(square_sum(l, x));
    if (!(norm > norm_max)) return;
    float factor = __fdiv_rn(norm_max, norm);
#pragma unroll
    for (u32 n = 0; n < FOURS * EACH; n++) x[n / EACH][n % EACH] = __fmul_rn(x[n / EACH][n % EACH], factor);
}

// `w -= factor g`.
template <u32 FOURS> DEVICE void descend(float (&w)[FOURS][EACH], float factor, const float (&g)[FOURS][EACH]) {
#pragma unroll
    for (u32 n = 0; n < FOURS * EACH; n++) w[n / EACH][n % EACH] = __fsub_rn(w[n / EACH][n % EACH], __fmul_rn(factor, g[n / EACH][n % EACH]));
}

// Returns `1 / (1 - beta^updates)`, by repeated squaring in double precision.
DEVICE float bias_correction(float beta, u32 updates) {
    double base = beta, power = 1.0;
    for (u32 exponent = updates; exponent; exponent >>= 1) {
        if (exponent & 1) power = __dmul_rn(power, base);
        base = __dmul_rn(base, base);
    }
    return __double2float_rn(__ddiv_rn(1.0, __dsub_rn(1.0, power)));
}

template <bool WHOLE, u32 FOURS> DEVICE void read_row(const Lanes& l, const float* row, u32 width, float (&x)[FOURS][EACH]) {
#pragma unroll
    for (u32 f = 0; f < FOURS; f++) read_four<WHOLE>(row, (l.within + f * l.count) * EACH, width, x[f]);
}

template <bool WHOLE, u32 FOURS> DEVICE void write_row(const Lanes& l, float* row, u32 width, const float (&x)[FOURS][EACH]) {
#pragma unroll
    for (u32 f = 0; f < FOURS; f++) write_four<WHOLE>(row, (l.within + f * l.count) * EACH, width, x[f]);
}

// Sums the gradients of a row over its occurrences.
template <bool WHOLE, u32 FOURS> DEVICE void sum_row(const Sorted& s, const Lanes& l, u32 start, u32 end, u32 width, float (&g)[FOURS][EACH]) {
    if (end - start <= SUM_RUN) {
        sum_run<WHOLE, FOURS>(s, start, end, width, l.within * EACH, l.count * EACH, g);
        return;
    }
    const float* runs = s.runs + (u64)(start / SUM_PLACE) * s.run_stride;
    read_row<true, FOURS>(l, runs, s.run_stride, g);
    for (u32 at = start + SUM_RUN; at < end; at += SUM_RUN) {
        float run[FOURS][EACH];
        runs += s.run_stride;
        read_row<true, FOURS>(l, runs, s.run_stride, run);
#pragma unroll
        for (u32 n = 0; n < FOURS * EACH; n++) g[n / EACH][n % EACH] = __fadd_rn(g[n / EACH][n % EACH], run[n / EACH][n % EACH]);
    }
}

// Applies the rule to a row and its state. Returns false and leaves both if the result would not be finite or would exceed the
// limits. Called by all lanes of the row.
template <bool WHOLE, u32 FOURS> DEVICE bool update_row(const Lanes& l, const Master& m, float* stretch, float (&w)[FOURS][EACH], float (&g)[FOURS][EACH], float component_max) {
    const float largest = __uint_as_float(0x7f7fffffu);
    float* state = stretch + m.width;
    if (m.clip > 0) scale_to(l, g, m.clip);
    if (m.decay == L2) {
#pragma unroll
        for (u32 n = 0; n < FOURS * EACH; n++) g[n / EACH][n % EACH] = __fadd_rn(g[n / EACH][n % EACH], __fmul_rn(m.lambda, w[n / EACH][n % EACH]));
    }
    if (m.decay == DECOUPLED) {
        float keep = __fsub_rn(1.0f, __fmul_rn(m.rate, m.lambda));
#pragma unroll
        for (u32 n = 0; n < FOURS * EACH; n++) w[n / EACH][n % EACH] = __fmul_rn(keep, w[n / EACH][n % EACH]);
    }
    float first[FOURS][EACH], second[FOURS][EACH], number = 0;
    u32 updates = 0;
    bool is_valid = true;
    if (m.rule == SGD) {
        descend(w, m.rate, g);
    } else if (m.rule == ROWWISE_ADAGRAD) {
        number = __fadd_rn(state[0], __fdiv_rn(square_sum(l, g), (float)m.width));
        descend(w, __fdiv_rn(m.rate, __fadd_rn(__fsqrt_rn(number), m.epsilon)), g);
    } else if (m.rule == ADAGRAD) {
        read_row<WHOLE>(l, state, m.width, first);
#pragma unroll
        for (u32 n = 0; n < FOURS * EACH; n++) {
            float gradient = g[n / EACH][n % EACH], moment = __fadd_rn(first[n / EACH][n % EACH], __fmul_rn(gradient, gradient));
            float change = __fdiv_rn(__fmul_rn(m.rate, gradient), __fadd_rn(__fsqrt_rn(moment), m.epsilon));
            first[n / EACH][n % EACH] = moment;
            w[n / EACH][n % EACH] = __fsub_rn(w[n / EACH][n % EACH], change);
            is_valid = is_valid && fabsf(moment) <= largest;
        }
    } else {
        bool has_row_moment = m.rule == ROWWISE_ADAM;
        float* numbers = state + (has_row_moment ? 1 : 2) * m.width; // the second moment of the row, then the number of updates
        u32 had = __float_as_uint(numbers[has_row_moment ? 1 : 0]);
        updates = had == 0xffffffffu ? had : had + 1;
        // Double precision is rare on some GPUs: a lane computes one of the corrections.
        float correction = bias_correction(l.within % 2 == 0 ? m.beta1 : m.beta2, updates);
        float c1 = __shfl_sync(l.mask, correction, (int)l.first), c2 = __shfl_sync(l.mask, correction, (int)l.first + 1);
        float a1 = __fsub_rn(1.0f, m.beta1), a2 = __fsub_rn(1.0f, m.beta2);
        read_row<WHOLE>(l, state, m.width, first);
#pragma unroll
        for (u32 n = 0; n < FOURS * EACH; n++) {
            float moment = __fadd_rn(__fmul_rn(m.beta1, first[n / EACH][n % EACH]), __fmul_rn(a1, g[n / EACH][n % EACH]));
            first[n / EACH][n % EACH] = moment;
            is_valid = is_valid && fabsf(moment) <= largest;
        }
        if (has_row_moment) {
            float mean = __fdiv_rn(square_sum(l, g), (float)m.width);
            number = __fadd_rn(__fmul_rn(m.beta2, numbers[0]), __fmul_rn(a2, mean));
            float root = __fadd_rn(__fsqrt_rn(__fmul_rn(c2, number)), m.epsilon);
            descend(w, __fdiv_rn(__fmul_rn(m.rate, c1), root), first);
        } else {
            number = __uint_as_float(updates);
            read_row<WHOLE>(l, state + m.width, m.width, second);
#pragma unroll
            for (u32 n = 0; n < FOURS * EACH; n++) {
                float gradient = g[n / EACH][n % EACH];
                float moment = __fadd_rn(__fmul_rn(m.beta2, second[n / EACH][n % EACH]), __fmul_rn(a2, __fmul_rn(gradient, gradient)));
                float root = __fadd_rn(__fsqrt_rn(__fmul_rn(c2, moment)), m.epsilon);
                float change = __fdiv_rn(__fmul_rn(m.rate, __fmul_rn(c1, first[n / EACH][n % EACH])), root);
                second[n / EACH][n % EACH] = moment;
                w[n / EACH][n % EACH] = __fsub_rn(w[n / EACH][n % EACH], change);
                is_valid = is_valid && fabsf(moment) <= largest;
            }
        }
    }
    if (m.max_norm > 0) scale_to(l, w, m.max_norm);
#pragma unroll
    for (u32 n = 0; n < FOURS * EACH; n++) is_valid = is_valid && fabsf(w[n / EACH][n % EACH]) <= component_max;
    // Every lane has read the state before one of them writes it.
    is_valid = __ballot_sync(l.mask, is_valid && isfinite(number)) == l.mask;
    if (!is_valid) return false;
    write_row<WHOLE>(l, stretch, m.width, w);
    if (m.rule == ADAGRAD || m.rule == ADAM || m.rule == ROWWISE_ADAM) write_row<WHOLE>(l, state, m.width, first);
    if (m.rule == ADAM) write_row<WHOLE>(l, state + m.width, m.width, second);
    if (l.within > 0) return true;
    if (m.rule == ROWWISE_ADAGRAD) state[0] = number;
    if (m.rule == ADAM) state[2 * m.width] = number;
    if (m.rule == ROWWISE_ADAM) {
        state[m.width] = number;
        state[m.width + 1] = __uint_as_float(updates);
    }
    return true;
}

template <bool WHOLE, u32 FOURS> DEVICE void update_rows(const UpdateArgs& a) {
    const Sorted& s = a.of;
    Lanes l = lanes_of(a.lanes);
    u32 groups = blockDim.x / a.lanes, end = rows_below(s, a.end_row);
    for (u32 n = rows_below(s, a.first_row) + blockIdx.x * groups + threadIdx.x / a.lanes; n < end; n += gridDim.x * groups) {
        u32 start = s.starts[n], key = s.keys[start];
        const Master& m = master_of(a, key);
        float* stretch = m.stretches + (u64)(key - m.first_row) * m.stride;
        float w[FOURS][EACH], g[FOURS][EACH];
        read_row<WHOLE>(l, stretch, m.width, w);
        sum_row<WHOLE, FOURS>(s, l, start, s.starts[n + 1], m.width, g);
        bool is_written = update_row<WHOLE, FOURS>(l, m, stretch, w, g, a.component_max);
        if (l.within == 0) a.touched[n] = is_written ? key : key | REJECTED;
    }
}

// Updates the distinct rows of tables of some widths: a group of lanes per row.
KERNEL(256, update_narrow, UpdateArgs) {
    if (a.is_whole) update_rows<true, 1>(a);
    else update_rows<false, 1>(a);
}

// Rows of more than 128 numbers.
KERNEL(256, update_wide, UpdateArgs) {
    if (a.is_whole) update_rows<true, 2>(a);
    else update_rows<false, 2>(a);
}

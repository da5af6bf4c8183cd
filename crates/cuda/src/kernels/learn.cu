// Embedding tables in training: pooled lookups, and the backward pass fused with the optimizer. Gradients are added in
// the order of `crates/kernels/src/cpu/update`, so that rows and optimizer state are bit-identical on CPU and GPU.
// There are no atomics.
//
// This order suits a GPU. A column belongs to one lane, so that each group of SUM_RUN consecutive gradients is added
// one by one with several loads in progress. A block of 16 columns belongs to four lanes, whose tree of sums takes two
// shuffles. Groups of 32 gradients, a warp each, would spread rows of medium frequency over more warps, but change the
// bits: a group of 256 waits for 64 rounds of loads from the L2 cache, about 20 us, while other rows are processed.
#include "learn.cuh"

// Number of adjacent columns of a lane.
#define EACH 4u
// Number of columns whose squares are added as a tree, on four lanes.
#define BLOCK 16u
// Number of occurrences that are added one by one (a run); longer sums add the sums of such runs.
#define SUM_RUN 256u
// Number of occurrences per place in the buffer of the sums of runs. The runs of a row whose first occurrence is
// `start` take the places from `start / SUM_PLACE` on. A row with more than SUM_RUN occurrences has more places than
// runs, so that rows do not collide.
#define SUM_PLACE 128u
// Number of loads that a lane has in progress at a time.
#define AHEAD 4u

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

// Returns the number of lanes of a warp that share a row, at least the lanes of a block of columns.
DEVICE u32 lanes_a_row(u32 width) {
    u32 lanes = 32;
    while (lanes > BLOCK / EACH && lanes / 2 * EACH >= width) lanes /= 2;
    return lanes;
}

struct LookUpArgs {
    const Feature* features; // [features + 1]
    const Master* masters;
    const u32* rows;      // row of each id of all slots; NO_ROW adds nothing
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

// Pools the rows of each slot, in the order of the slot's ids. Grid (parts, features), a group of lanes per slot.
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

// Occurrences sorted by row, with their gradients.
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

// Sums the gradients of consecutive occurrences one by one, in the sorted order.
template <bool WHOLE, u32 FOURS> DEVICE void sum_run(const Sorted& s, u32 begin, u32 end, u32 width, u32 first_column, u32 step, float (&sum)[FOURS][EACH]) {
#pragma unroll
    for (u32 f = 0; f < FOURS; f++) sum[f][0] = sum[f][1] = sum[f][2] = sum[f][3] = 0;
    for (u32 from = begin; from < end; from += AHEAD) {
        float read[AHEAD][FOURS][EACH], factors[AHEAD], weights[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            // Past the end, the last occurrence is read again.
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
    u32* touched; // [rows] number of each distinct row; REJECTED is set if the row's update is not written
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
    // The row with this place is the last one whose occurrences start before the next place.
    u32 row = last_upto(rows, place * SUM_PLACE + SUM_PLACE - 1, [&](u32 n) { return s.starts[n]; });
    u32 start = s.starts[row], end = s.starts[row + 1], run = place - start / SUM_PLACE;
    if (end - start <= SUM_RUN || run * SUM_RUN >= end - start) return;
    const Master& m = master_of(a, s.keys[start]);
    u32 begin = start + run * SUM_RUN;
    // Covers columns up to the widest table, so that columns beyond this table's width become zeros.
    for (u32 column = lane_of() * EACH; column < s.run_stride; column += 32 * EACH) {
        float sum[1][EACH];
        // Rows may be WHOLE or not, so gradients are read one by one.
        sum_run<false, 1>(s, begin, min(begin + SUM_RUN, end), m.width, column, 0, sum);
        write_four<false>(s.runs + (u64)place * s.run_stride, column, s.run_stride, sum[0]);
    }
}

// Group of lanes that share a row; `first` is the warp's index of the group's first lane.
struct Lanes {
    u32 count, within, first, mask;
};

DEVICE Lanes lanes_of(u32 count) {
    u32 first = lane_of() / count * count;
    return {count, lane_of() - first, first, count == 32 ? EVERY_LANE : ((1u << count) - 1) << first};
}

// Returns the sum of squares of a row: in each block of columns as a tree that adds the upper half to the lower half,
// then block by block.
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

// Scales a row down to a maximum norm if its norm is larger.
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

// Sums the gradients of a row over all occurrences of the row.
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

// Applies the optimizer's rule to a row and its state. Returns false and leaves both unchanged if the result would not
// be finite or would exceed the limits. Called by all lanes of the row.
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
        float* numbers = state + (has_row_moment ? 1 : 2) * m.width; // number of updates; for ROWWISE_ADAM, second moment first
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
    // The vote ensures that every lane has read the state before any lane writes it.
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

// Updates the distinct rows of tables wider than 128 columns.
KERNEL(256, update_wide, UpdateArgs) {
    if (a.is_whole) update_rows<true, 2>(a);
    else update_rows<false, 2>(a);
}

// Int8 product of a block of 16 items with a query, and the collection of scored items.
#pragma once
#include "platform.cuh"

// Query quantized to two rows of int8: a number is `scale (128 high + low)`.
struct QueryHead {
    float scale;
    i32 high_correction, low_correction;
    // Number of bins per unit of score; see `bin_of`.
    float bins_per_score;
};

#define BINS 2048u

// Returns the inclusive prefix sum over the threads of a block, and sets `all` to the total. Called by the complete
// block; `sums` is [warps] of shared memory, which must not be written again before a later barrier of all threads.
DEVICE u32 sum_upto(u32 value, u32* sums, u32* all) {
    value = lanes_upto(value);
    if (lane_of() == 31) sums[warp_of()] = value;
    __syncthreads();
    *all = 0;
    for (u32 w = 0; w < warps_of(); w++) {
        if (w == warp_of()) value += *all;
        *all += sums[w];
    }
    return value;
}

// Queries of a launch, and the candidates that they collect.
struct Candidates {
    // [queries, 2, groups] words of four codes, and the query heads.
    const u32* rows;
    const QueryHead* heads;
    // [queries, room] ordered keys and slots; the first `counts` are filled.
    u32* keys;
    u32* slots;
    u32* counts;
    // [queries, BINS] number of candidates per score bin, and the lowest bin that a candidate must reach.
    u32* histogram;
    u32* bars;
    // [queries] number of candidates to select.
    const u32* wanted;
    // Excluded slots, ascending; query q excludes those from excluded_starts[q] to excluded_starts[q + 1].
    const u32* excluded;
    const u32* excluded_starts;
    // [queries] number of scored items.
    u32* survivors;
    u32 room;
    u32 groups;
    // Number of candidates of a query after which its threshold is raised again.
    u32 raise_every;
    u32 unused;
};

// Returns the histogram bin of a score. Bins ascend with scores, so a candidate below the bin of the K-th best is never
// needed.
DEVICE u32 bin_of(float score, float bins_per_score) {
    float place = fminf(fmaxf(__fmaf_rn(score, bins_per_score, 0.5f * BINS), 0.0f), BINS - 1.0f);
    return (u32)place;
}

// Number of bins that a lane sums at a time.
#define BINS_EACH 8u

// Raises the threshold of a query to the bin of the query's K-th best candidate so far, if there are K candidates.
// Called by the complete warp.
DEVICE void raise_bar(const Candidates& to, u32 query) {
    const u32* histogram = to.histogram + (u64)query * BINS;
    u32 wanted = to.wanted[query], above = 0;
    for (u32 top = BINS; top > 0; top -= 32 * BINS_EACH) {
        u32 first = top - 1 - BINS_EACH * lane_of(), here[BINS_EACH], sum = 0;
#pragma unroll
        for (u32 n = 0; n < BINS_EACH; n++) here[n] = fresh(histogram + first - n);
#pragma unroll
        for (u32 n = 0; n < BINS_EACH; n++) sum += here[n];
        u32 upto = lanes_upto(sum);
        u32 enough = __ballot_sync(EVERY_LANE, above + upto >= wanted);
        if (enough) {
            if (lane_of() == (u32)__ffsll((i64)(u64)enough) - 1) {
                u32 reached = above + upto - sum, bin = first;
#pragma unroll
                for (u32 n = 0; n < BINS_EACH; n++) {
                    if (reached < wanted) bin = first - n;
                    reached += here[n];
                }
                atomicMax(to.bars + query, bin);
            }
            return;
        }
        above += __shfl_sync(EVERY_LANE, upto, 31);
    }
}

// Returns the index of the first excluded slot of a query that is not below `slot`.
DEVICE u32 first_excluded(const Candidates& to, u32 query, u32 slot) {
    u32 low = to.excluded_starts[query], high = to.excluded_starts[query + 1];
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (to.excluded[middle] < slot) low = middle + 1;
        else high = middle;
    }
    return low;
}

DEVICE bool is_excluded(const Candidates& to, u32 query, u32 slot) {
    u32 place = first_excluded(to, query, slot);
    return place < to.excluded_starts[query + 1] && to.excluded[place] == slot;
}

// Buffer of a warp for candidates of one query that are not yet written, with room for the results of two calls.
struct Found {
    u32* all; // keys [FOUND_MAX], slots [FOUND_MAX], in the warp's own shared memory
    u32 count;
};

#define FOUND_MAX 64u

// Writes the buffered candidates, with one atomic addition to the count. Called by the complete warp.
DEVICE void write_found(const Candidates& to, u32 query, Found& found) {
    u32 base = 0, count = found.count;
    if (count == 0) return;
    if (lane_of() == 0) base = atomicAdd(to.counts + query, count);
    __syncwarp();
    base = __shfl_sync(EVERY_LANE, base, 0);
    for (u32 n = lane_of(); n < count && base + n < to.room; n += 32) {
        to.keys[(u64)query * to.room + base + n] = found.all[n];
        to.slots[(u64)query * to.room + base + n] = found.all[FOUND_MAX + n];
    }
    __syncwarp();
    found.count = 0;
    if (base / to.raise_every != (base + count) / to.raise_every) raise_bar(to, query);
}

// Writes the scored items of the lanes that have an item, if the score reaches the threshold. Called by the complete
// warp, for one query.
DEVICE void keep_now(const Candidates& to, u32 query, bool has_one, float score, u32 slot, u32 bar, float bins_per_score) {
    u32 bin = bin_of(score, bins_per_score);
    bool kept = has_one && bin >= bar && !is_excluded(to, query, slot);
    u32 votes = __ballot_sync(EVERY_LANE, kept);
    if (votes == 0) return;
    u32 base = 0, count = __popc(votes);
    if (lane_of() == 0) base = atomicAdd(to.counts + query, count);
    base = __shfl_sync(EVERY_LANE, base, 0);
    u32 place = base + __popc(votes & lanes_before());
    if (kept && place < to.room) {
        to.keys[(u64)query * to.room + place] = ordered(score);
        to.slots[(u64)query * to.room + place] = slot;
        atomicAdd(to.histogram + (u64)query * BINS + bin, 1u);
    }
    if (base / to.raise_every != (base + count) / to.raise_every) raise_bar(to, query);
}

// Does the same as `keep_now`, but buffers items and writes many at once, because atomics on a count that many blocks
// use are slow.
DEVICE void keep(const Candidates& to, u32 query, bool has_one, float score, u32 slot, u32 bar, float bins_per_score, Found& found) {
    u32 bin = bin_of(score, bins_per_score);
    bool kept = has_one && bin >= bar && !is_excluded(to, query, slot);
    u32 votes = __ballot_sync(EVERY_LANE, kept);
    if (votes == 0) return;
    if (kept) {
        u32 place = found.count + __popc(votes & lanes_before());
        found.all[place] = ordered(score);
        found.all[FOUND_MAX + place] = slot;
        atomicAdd(to.histogram + (u64)query * BINS + bin, 1u);
    }
    found.count += __popc(votes);
    if (found.count > FOUND_MAX - 32) write_found(to, query, found);
}

DEVICE float score_of(i32 high, i32 low, const QueryHead& head, float scale) {
    float dot = __fadd_rn(__fmul_rn((float)(high - head.high_correction), 128.0f), (float)(low - head.low_correction));
    return __fmul_rn(__fmul_rn(dot, scale), head.scale);
}

// Returns the index of the item whose sums a lane holds after `block_sums`; lanes 4 apart hold the same sums.
DEVICE u32 item_of_lane() { return 4 * (lane_of() & 3) + 2 * (lane_of() >> 4 & 1) + (lane_of() >> 3 & 1); }

// Number of steps of 8 groups whose codes a lane loads before it multiplies any codes.
#define STEPS_AHEAD 4u

// Computes the products of the 16 items of each of several blocks with both rows of a query, by a complete warp, with
// all loads in progress together. Lane l reads four items from 4 (l % 4) on of group l / 4, so that each load of a warp
// covers 512 consecutive bytes.
template <u32 COUNT>
DEVICE void block_sums(const u8* blocks, const u32 (&numbers)[COUNT], const u32* row, u32 groups, i32 (&made)[COUNT][2]) {
    i32 sums[COUNT][2][4] = {};
    for (u32 first = lane_of() >> 2; first < groups; first += 8 * STEPS_AHEAD) {
        uint4 codes[STEPS_AHEAD][COUNT];
#pragma unroll
        for (u32 step = 0; step < STEPS_AHEAD; step++) {
            u32 group = first + 8 * step;
#pragma unroll
            for (u32 b = 0; b < COUNT; b++) {
                codes[step][b] = uint4{0, 0, 0, 0};
                const uint4* of_group = (const uint4*)(blocks + ((u64)numbers[b] * groups + group) * 64);
                if (group < groups) codes[step][b] = __ldg(of_group + (lane_of() & 3));
            }
        }
#pragma unroll
        for (u32 step = 0; step < STEPS_AHEAD; step++) {
            u32 group = first + 8 * step;
            if (group >= groups) continue;
            u32 query[2] = {row[group], row[groups + group]};
#pragma unroll
            for (u32 b = 0; b < COUNT; b++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    i32(&of)[4] = sums[b][r];
                    of[0] = dot4(codes[step][b].x, query[r], of[0]);
                    of[1] = dot4(codes[step][b].y, query[r], of[1]);
                    of[2] = dot4(codes[step][b].z, query[r], of[2]);
                    of[3] = dot4(codes[step][b].w, query[r], of[3]);
                }
            }
        }
    }
    // Lanes exchange halves, so that 8 shuffles do the work of 24: first over the items, then over the other groups.
    bool is_upper = lane_of() & 16, is_odd = lane_of() & 8;
#pragma unroll
    for (u32 b = 0; b < COUNT; b++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const i32(&of)[4] = sums[b][r];
            i32 first = is_upper ? of[0] : of[2], second = is_upper ? of[1] : of[3];
            i32 mine = is_upper ? of[2] : of[0], next = is_upper ? of[3] : of[1];
            mine += __shfl_xor_sync(EVERY_LANE, first, 16);
            next += __shfl_xor_sync(EVERY_LANE, second, 16);
            i32 kept = is_odd ? next : mine;
            kept += __shfl_xor_sync(EVERY_LANE, is_odd ? mine : next, 8);
            made[b][r] = kept + __shfl_xor_sync(EVERY_LANE, kept, 4);
        }
    }
}

// Sorts the occurrences of a batch in training by row, with a stable radix sort, and finds the first occurrence of each
// distinct row. There are no atomics.
#include "learn.cuh"

struct PairArgs {
    const Feature* features; // [features + 1], features of the tables in training
    const Master* masters;
    const u32* rows;
    const u32* offsets;
    u32* keys;    // [occurrences] number of the row among the rows of all tables, or `no_key` for an id without a row
    u32* values;  // [occurrences] slot, or number of the occurrence if there are weights
    u32* slot_of; // [occurrences], or null without weights
    SlotAt* slots;
    u32 feature_count, slot_count, count, no_key;
};

// Computes the location and the factor of each slot's gradient: one thread per slot.
KERNEL(256, describe_slots, PairArgs) {
    for (u32 slot = blockIdx.x * blockDim.x + threadIdx.x; slot < a.slot_count; slot += gridDim.x * blockDim.x) {
        const Feature& f = a.features[last_upto(a.feature_count, slot, [&](u32 n) { return a.features[n].first_slot; })];
        u32 length = a.offsets[slot + 1] - a.offsets[slot];
        float factor = f.is_mean && length > 0 ? __fdiv_rn(1.0f, (float)length) : 1.0f;
        a.slots[slot] = SlotAt{f.values + (u64)(slot - f.first_slot) * f.stride, factor, 0};
    }
}

// Makes the pairs of key and value to be sorted: one thread per id.
KERNEL(256, make_pairs, PairArgs) {
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < a.count; n += gridDim.x * blockDim.x) {
        // If several slots have this offset, all but the last of these slots are empty.
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
// Number of pairs of a block. Each warp has consecutive pairs.
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

// Returns how many equal digits precede the lane's digit, in earlier calls of the warp and in lower lanes. `counts` has
// the warp's counts of each digit. Called by the complete warp.
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

// Returns the exclusive prefix sum over the threads of a block of TILE_WARPS warps. `sums` has a number per warp; the
// sum of these numbers is the total. Called by the complete block, which must reach a barrier before `sums` is written
// again.
DEVICE u32 before_in_block(u32 value, u32* sums) {
    u32 upto = lanes_upto(value);
    if (lane_of() == 31) sums[warp_of()] = upto;
    __syncthreads();
    u32 before = upto - value;
    for (u32 w = 0; w < warp_of(); w++) before += sums[w];
    return before;
}

// Turns the count of each tile into the sum of counts of earlier tiles: one block per digit.
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

// Moves pairs to their places by one digit; pairs with equal digits keep their order. One block per tile.
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
    const u32* keys; // [occurrences] ascending
    u32* counts;     // [tiles] number of heads (first occurrences of a distinct row), then of heads in earlier tiles
    const u32* total;
    u32* starts; // [rows + 1] first occurrence of each distinct row
    u32 count, no_key;
};

DEVICE bool is_head(const HeadArgs& a, u32 n) {
    return n < a.count && a.keys[n] != a.no_key && (n == 0 || a.keys[n - 1] != a.keys[n]);
}

// Marks the heads among the warp's occurrences of a tile, and returns the number of heads in the tile's earlier warps.
// Called by the complete block.
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

// Lists the first occurrence of each distinct row, and the end of the last row: one block per tile.
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

// The exact K best of any number of scored items, K from 1 on: a radix selection over ordered scores, then over the ids of
// those that tie with the last one. What is selected does not depend on the order in which it came.
#include "platform.cuh"

struct TopArgs {
    const u32* keys;  // [rows, stride] ordered scores
    const u32* slots; // [rows, stride], or null: then a place is its own
    const u32* counts; // [rows], or null: then `count`
    const u32* wanted; // [rows] K of each
    // What equal scores rank by, the lowest first: ids[map[slot]]; without a map ids[slot], without ids the slot.
    const i64* ids;
    const u32* map; // [rows, map_stride]
    u32* keys_out;  // [rows, stride_out]
    u32* slots_out;
    u32* counts_out; // [rows]
    u32* ties;       // [rows, stride], places of items that tie with the last one
    u32 count, stride, stride_out, map_stride;
};

#define DIGIT_BITS 11u
#define DIGITS (1u << DIGIT_BITS)

DEVICE u64 rank_of(const TopArgs& a, u32 row, u32 slot) {
    u32 at = a.map ? a.map[(u64)row * a.map_stride + slot] : slot;
    return a.ids ? (u64)a.ids[at] ^ 1ull << 63 : (u64)at;
}

// Finds the digit at which `wanted` items are reached, from the top digit down or from the lowest one up. A whole block.
DEVICE u32 reached(const u32* histogram, u32* sums, u32& wanted, bool from_top) {
    u32 each = DIGITS / blockDim.x, first = threadIdx.x * each, sum = 0;
    for (u32 n = first; n < first + each; n++) sum += histogram[from_top ? DIGITS - 1 - n : n];
    u32 upto = sum;
    for (u32 step = 1; step < 32; step <<= 1) {
        u32 before = __shfl_up_sync(EVERY_LANE, upto, step);
        if (lane_of() >= step) upto += before;
    }
    if (lane_of() == 31) sums[warp_of()] = upto;
    __syncthreads();
    u32 above = upto - sum;
    for (u32 w = 0; w < warp_of(); w++) above += sums[w];
    u32* found = sums + 32;
    if (above < wanted && wanted <= above + sum) {
        for (u32 n = first; n < first + each; n++) {
            u32 digit = from_top ? DIGITS - 1 - n : n;
            if (wanted <= above + histogram[digit]) {
                found[0] = digit;
                found[1] = wanted - above;
                break;
            }
            above += histogram[digit];
        }
    }
    __syncthreads();
    u32 digit = found[0];
    wanted = found[1];
    __syncthreads();
    return digit;
}

// Appends the items of the lanes that have one. A whole warp.
DEVICE void append(const TopArgs& a, u32 row, u32* filled, bool has_one, u32 key, u32 slot) {
    u32 votes = __ballot_sync(EVERY_LANE, has_one), base = 0;
    if (votes == 0) return;
    if (lane_of() == 0) base = atomicAdd(filled, (u32)__popc(votes));
    base = __shfl_sync(EVERY_LANE, base, 0);
    u64 place = (u64)row * a.stride_out + base + __popc(votes & lanes_before());
    if (has_one) {
        a.keys_out[place] = key;
        a.slots_out[place] = slot;
    }
}

DEVICE void clear(u32* histogram) {
    for (u32 n = threadIdx.x; n < DIGITS; n += blockDim.x) histogram[n] = 0;
    __syncthreads();
}

// Selects the best of each row, in no order: a block a row.
KERNEL(1024, select_top, TopArgs) {
    u32* histogram = (u32*)shared_memory(); // [DIGITS]
    u32* sums = histogram + DIGITS;         // [32] and what `reached` found
    u32* filled = sums + 36;
    u32* tied = filled + 1;
    u32 row = blockIdx.x, count = a.counts ? min(a.counts[row], a.stride) : a.count;
    u32 wanted = min(min(a.wanted[row], count), a.stride_out);
    const u32* keys = a.keys + (u64)row * a.stride;
    const u32* slots = a.slots ? a.slots + (u64)row * a.stride : nullptr;
    u32* ties = a.ties + (u64)row * a.stride;
    if (threadIdx.x == 0) {
        *filled = 0;
        *tied = 0;
        a.counts_out[row] = wanted;
    }
    __syncthreads();
    u32 last = 0, left = wanted;
    bool takes_all = wanted == count;
    if (!takes_all && wanted > 0) {
        u32 decided = 0;
        for (i32 shift = 21; shift >= -1; shift -= 11) {
            // 11, 11 and the last 10 bits.
            u32 low = (u32)max(shift, 0), bits = (u32)((i32)DIGIT_BITS + min(shift, 0));
            clear(histogram);
            for (u32 n = threadIdx.x; n < count; n += blockDim.x)
                if ((keys[n] & decided) == last) atomicAdd(histogram + (keys[n] >> low & ((1u << bits) - 1)), 1u);
            __syncthreads();
            u32 digit = reached(histogram, sums, left, true);
            last |= digit << low;
            decided |= ((1u << bits) - 1) << low;
        }
    }
    // Everything above the last score is taken; what equals it is put aside.
    u32 whole = (count + blockDim.x - 1) / blockDim.x * blockDim.x;
    for (u32 n = threadIdx.x; n < whole && wanted > 0; n += blockDim.x) {
        u32 key = n < count ? keys[n] : 0, slot = n < count ? (slots ? slots[n] : n) : 0;
        append(a, row, filled, n < count && (takes_all || key > last), key, slot);
        if (n < count && !takes_all && key == last) ties[atomicAdd(tied, 1u)] = slot;
    }
    __syncthreads();
    if (takes_all || wanted == 0) return;
    u32 ties_count = *tied;
    u64 last_rank = ~0ull;
    if (ties_count > left) {
        u64 decided = 0, prefix = 0;
        for (i32 shift = 53; shift > -11; shift -= 11) {
            u32 low = (u32)max(shift, 0), bits = (u32)((i32)DIGIT_BITS + min(shift, 0));
            clear(histogram);
            for (u32 n = threadIdx.x; n < ties_count; n += blockDim.x) {
                u64 rank = rank_of(a, row, ties[n]);
                if ((rank & decided) == prefix) atomicAdd(histogram + ((u32)(rank >> low) & ((1u << bits) - 1)), 1u);
            }
            __syncthreads();
            u64 digit = reached(histogram, sums, left, false);
            prefix |= digit << low;
            decided |= (u64)((1u << bits) - 1) << low;
        }
        last_rank = prefix;
    }
    whole = (ties_count + blockDim.x - 1) / blockDim.x * blockDim.x;
    for (u32 n = threadIdx.x; n < whole; n += blockDim.x) {
        bool has_one = n < ties_count && (last_rank == ~0ull || rank_of(a, row, ties[n]) <= last_rank);
        append(a, row, filled, has_one, last, n < ties_count ? ties[n] : 0);
    }
}

struct SortArgs {
    TopArgs of; // keys_out, slots_out, counts_out, ids and map say what is sorted
    u32* keys;  // [rows, stride_out] where it goes
    u32* slots;
    // Length of the runs that are sorted already and are merged in pairs.
    u32 run;
    u32 unused;
};

#define RUN 1024u

// Whether one item ranks before another.
DEVICE bool before(const TopArgs& a, u32 row, u32 key, u32 slot, u32 other_key, u32 other_slot) {
    if (key != other_key) return key > other_key;
    return slot != other_slot && rank_of(a, row, slot) < rank_of(a, row, other_slot);
}

// Sorts runs of RUN items, best first: grid (runs, rows), a bitonic network in shared memory.
KERNEL(512, sort_runs, SortArgs) {
    u32* keys = (u32*)shared_memory(); // [RUN]
    u32* slots = keys + RUN;
    u32 row = blockIdx.y, first = blockIdx.x * RUN, count = a.of.counts_out[row];
    u64 base = (u64)row * a.of.stride_out + first;
    if (first >= count) return;
    u32 here = min(RUN, count - first);
    for (u32 n = threadIdx.x; n < RUN; n += blockDim.x) {
        keys[n] = n < here ? a.of.keys_out[base + n] : 0;
        slots[n] = n < here ? a.of.slots_out[base + n] : EVERY_LANE;
    }
    __syncthreads();
    for (u32 size = 2; size <= RUN; size <<= 1) {
        for (u32 step = size >> 1; step > 0; step >>= 1) {
            for (u32 n = threadIdx.x; n < RUN / 2; n += blockDim.x) {
                u32 low = 2 * n - (n & (step - 1)), high = low + step;
                bool is_down = (low & size) == 0;
                // Places without an item come last.
                bool has_low = slots[low] != EVERY_LANE, has_high = slots[high] != EVERY_LANE;
                bool swapped = has_low && has_high ? before(a.of, row, keys[high], slots[high], keys[low], slots[low])
                                                   : has_high && !has_low;
                bool reversed = has_low && has_high ? before(a.of, row, keys[low], slots[low], keys[high], slots[high])
                                                    : has_low && !has_high;
                if (is_down ? swapped : reversed) {
                    u32 key = keys[low], slot = slots[low];
                    keys[low] = keys[high];
                    slots[low] = slots[high];
                    keys[high] = key;
                    slots[high] = slot;
                }
            }
            __syncthreads();
        }
    }
    for (u32 n = threadIdx.x; n < here; n += blockDim.x) {
        a.keys[base + n] = keys[n];
        a.slots[base + n] = slots[n];
    }
}

// Merges pairs of sorted runs: each item finds its place by a search in the other run. Grid (parts, rows).
KERNEL(256, merge_runs, SortArgs) {
    u32 row = blockIdx.y, count = a.of.counts_out[row];
    const u32* keys = a.of.keys_out + (u64)row * a.of.stride_out;
    const u32* slots = a.of.slots_out + (u64)row * a.of.stride_out;
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
        u32 pair = n / (2 * a.run) * 2 * a.run, own = n / a.run * a.run;
        u32 begin = own == pair ? min(pair + a.run, count) : pair, end = own == pair ? min(pair + 2 * a.run, count) : own;
        u32 low = begin, high = end;
        while (low < high) {
            u32 middle = low + (high - low) / 2;
            if (before(a.of, row, keys[middle], slots[middle], keys[n], slots[n])) low = middle + 1;
            else high = middle;
        }
        u64 place = (u64)row * a.of.stride_out + pair + (n - own) + (low - begin);
        a.keys[place] = keys[n];
        a.slots[place] = slots[n];
    }
}

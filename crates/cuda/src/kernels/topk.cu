// Exact selection of the K best of any number of scored items, for K from 1 on: a radix selection over ordered keys,
// then over the ids of the items that tie with the K-th best. The result does not depend on the order of the items.
#include "digits.cuh"

struct TopArgs {
    const u32* keys;  // [rows, stride] ordered keys
    const u32* slots; // [rows, stride], or null: the slot of an item is its index
    const u32* counts; // [rows], or null: every row has `count` items
    const u32* wanted; // [rows] K of each row
    // Ties go to the lowest number: ids[map[slot]]; without a map ids[slot], without ids the slot.
    const i64* ids;
    const u32* map; // [rows, map_stride]
    u32* keys_out;  // [rows, stride_out]
    u32* slots_out;
    u32* counts_out; // [rows]
    u32* ties;       // [rows, stride] indexes of items that tie with the K-th best
    u32 count, stride, stride_out, map_stride;
};

DEVICE u64 rank_of(const TopArgs& a, u32 row, u32 slot) {
    u32 at = a.map ? a.map[(u64)row * a.map_stride + slot] : slot;
    return a.ids ? (u64)a.ids[at] ^ 1ull << 63 : (u64)at;
}

// Appends the items of the lanes that have an item. Called by the complete warp.
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

// Appends the items of a block that rank above the K-th best, and stores the items that tie with the K-th best: every
// `stride`-th item from `first` on. The next item is loaded while the current one is compared.
DEVICE void sort_out(const TopArgs& a, u32 row, u32* filled, u32* tied, u32 first, u32 stride, u32 count, u32 last, bool takes_all) {
    u64 base = (u64)row * a.stride;
    u32 whole = (count + blockDim.x - 1) / blockDim.x * blockDim.x;
    u32 next_key = first < count ? a.keys[base + first] : 0, next_slot = first < count && a.slots ? a.slots[base + first] : first;
    for (u32 n = first; n < whole; n += stride) {
        u32 key = next_key, slot = next_slot, next = n + stride;
        if (next < count) {
            next_key = a.keys[base + next];
            next_slot = a.slots ? a.slots[base + next] : next;
        }
        append(a, row, filled, n < count && (takes_all || key > last), key, slot);
        if (n < count && !takes_all && key == last) a.ties[base + atomicAdd(tied, 1u)] = slot;
    }
}

// Appends the first `left` of the items that tie with the K-th best. Called by the complete block.
DEVICE void take_ties(const TopArgs& a, u32 row, u32* filled, u32 count, u32 last, u32 left, u32* histogram) {
    const u32* ties = a.ties + (u64)row * a.stride;
    u64 last_rank = ~0ull;
    if (count > left) {
        u64 decided = 0;
        last_rank = 0;
        for (i32 shift = 53; shift > -11; shift -= 11) {
            u32 low, bits;
            digit_at(shift, low, bits);
            clear(histogram);
            for (u32 n = threadIdx.x; n < count; n += blockDim.x) {
                u64 rank = rank_of(a, row, ties[n]);
                if ((rank & decided) == last_rank) atomicAdd(histogram + ((u32)(rank >> low) & ((1u << bits) - 1)), 1u);
            }
            __syncthreads();
            last_rank |= (u64)reached(histogram, histogram + DIGITS, left, false) << low;
            decided |= (u64)((1u << bits) - 1) << low;
        }
    }
    u32 whole = (count + blockDim.x - 1) / blockDim.x * blockDim.x;
    for (u32 n = threadIdx.x; n < whole; n += blockDim.x) {
        bool has_one = n < count && rank_of(a, row, ties[n]) <= last_rank;
        append(a, row, filled, has_one, last, n < count ? ties[n] : 0);
    }
}

DEVICE u32 count_of(const TopArgs& a, u32 row) { return a.counts ? min(a.counts[row], a.stride) : a.count; }

// Selects the K best items of each row, unsorted: one block per row.
KERNEL(1024, select_top, TopArgs) {
    u32* histogram = (u32*)shared_memory();
    u32* filled = histogram + DESCENT_WORDS;
    u32* tied = filled + 1;
    u32 row = blockIdx.x, count = count_of(a, row), wanted = min(min(a.wanted[row], count), a.stride_out);
    if (threadIdx.x == 0) {
        *filled = 0;
        *tied = 0;
        a.counts_out[row] = wanted;
    }
    if (wanted == 0) return;
    bool takes_all = wanted == count;
    u32 left = wanted, last = takes_all ? 0 : kth(a.keys + (u64)row * a.stride, count, left, histogram);
    __syncthreads();
    sort_out(a, row, filled, tied, threadIdx.x, blockDim.x, count, last, takes_all);
    __syncthreads();
    if (!takes_all) take_ties(a, row, filled, *tied, last, left, histogram);
}

// Shared progress of several blocks on one row. All fields are initially 0.
struct Descent {
    u32 last, decided, left;
    u32 arrived, filled, tied;
    u32 unused[2];
    u32 histogram[DIGITS];
};

struct ManyArgs {
    TopArgs of;
    Descent* descents; // [rows]
    i32 shift;         // lowest bit of the current digit; negative for the last, narrower digit
    u32 unused;
};

// Finds the next digit of the K-th largest key of each row: grid (parts, rows). The last block of a row to finish uses
// the histogram of all blocks.
KERNEL(512, narrow_keys, ManyArgs) {
    u32* histogram = (u32*)shared_memory();
    u32* flag = histogram + DESCENT_WORDS;
    u32 row = blockIdx.y, count = count_of(a.of, row), wanted = min(min(a.of.wanted[row], count), a.of.stride_out);
    if (wanted == 0 || wanted == count) return;
    Descent& state = a.descents[row];
    u32 low, bits, last = state.last, decided = state.decided;
    digit_at(a.shift, low, bits);
    clear(histogram);
    const u32* keys = a.of.keys + (u64)row * a.of.stride;
    u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    count_digits(keys, first, gridDim.x * blockDim.x, count, histogram, [&](u32 key) { return (key & decided) == last; }, low, bits);
    __syncthreads();
    for (u32 n = threadIdx.x; n < DIGITS; n += blockDim.x)
        if (histogram[n]) atomicAdd(state.histogram + n, histogram[n]);
    if (!is_last_of(gridDim.x, &state.arrived, flag)) return;
    for (u32 n = threadIdx.x; n < DIGITS; n += blockDim.x) {
        histogram[n] = fresh(state.histogram + n);
        state.histogram[n] = 0;
    }
    __syncthreads();
    u32 left = decided ? state.left : wanted, digit = reached(histogram, histogram + DIGITS, left, true);
    if (threadIdx.x == 0) {
        state.last = last | digit << low;
        state.decided = decided | ((1u << bits) - 1) << low;
        state.left = left;
        state.arrived = 0;
    }
}

// Collects the items above the K-th largest key of each row, and the first of the items with that key: grid (parts,
// rows).
KERNEL(512, take_best, ManyArgs) {
    u32* histogram = (u32*)shared_memory();
    u32* flag = histogram + DESCENT_WORDS;
    u32 row = blockIdx.y, count = count_of(a.of, row), wanted = min(min(a.of.wanted[row], count), a.of.stride_out);
    if (threadIdx.x == 0 && blockIdx.x == 0) a.of.counts_out[row] = wanted;
    if (wanted == 0) return;
    Descent& state = a.descents[row];
    bool takes_all = wanted == count;
    u32 last = state.last, left = state.left;
    u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    sort_out(a.of, row, &state.filled, &state.tied, first, gridDim.x * blockDim.x, count, last, takes_all);
    if (takes_all || !is_last_of(gridDim.x, &state.arrived, flag)) return;
    take_ties(a.of, row, &state.filled, fresh(&state.tied), last, left, histogram);
}

struct SortArgs {
    TopArgs of; // keys_out, slots_out, counts_out, ids and map describe the input of the sort
    u32* keys;  // [rows, stride_out] destination
    u32* slots;
    // Length of the sorted runs that are merged in pairs.
    u32 run;
    u32 unused;
};

#define RUN 1024u

// Returns whether one item ranks before another.
DEVICE bool before(const TopArgs& a, u32 row, u32 key, u32 slot, u32 other_key, u32 other_slot) {
    if (key != other_key) return key > other_key;
    return slot != other_slot && rank_of(a, row, slot) < rank_of(a, row, other_slot);
}

// Sorts groups of RUN consecutive items (runs), best first: grid (runs, rows), a bitonic network with one item per
// thread. Items at a distance of less than a warp are compared by shuffles, others through shared memory.
KERNEL(1024, sort_runs, SortArgs) {
    u32* keys = (u32*)shared_memory(); // [RUN]
    u32* slots = keys + RUN;
    u32 row = blockIdx.y, first = blockIdx.x * RUN, count = a.of.counts_out[row], n = threadIdx.x;
    u64 base = (u64)row * a.of.stride_out + first;
    if (first >= count) return;
    u32 here = min(RUN, count - first), padded = 32;
    while (padded < here) padded *= 2;
    // Places without an item sort last.
    u32 key = n < here ? a.of.keys_out[base + n] : 0, slot = n < here ? a.of.slots_out[base + n] : EVERY_LANE;
    for (u32 size = 2; size <= padded; size <<= 1) {
        for (u32 step = size >> 1; step > 0; step >>= 1) {
            u32 other_key, other_slot;
            if (step >= 32) {
                __syncthreads();
                keys[n] = key;
                slots[n] = slot;
                __syncthreads();
                other_key = keys[n ^ step];
                other_slot = slots[n ^ step];
            } else {
                other_key = __shfl_xor_sync(EVERY_LANE, key, step);
                other_slot = __shfl_xor_sync(EVERY_LANE, slot, step);
            }
            bool has_one = slot != EVERY_LANE, has_other = other_slot != EVERY_LANE;
            bool keeps_first = ((n & step) == 0) == ((n & size) == 0), is_other_first = has_other && !has_one, is_first = has_one && !has_other;
            if (has_one && has_other) {
                is_other_first = before(a.of, row, other_key, other_slot, key, slot);
                is_first = before(a.of, row, key, slot, other_key, other_slot);
            }
            if (keeps_first ? is_other_first : is_first) {
                key = other_key;
                slot = other_slot;
            }
        }
    }
    if (n < here) {
        a.keys[base + n] = key;
        a.slots[base + n] = slot;
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

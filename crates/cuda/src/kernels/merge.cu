// Merges the candidates of several queries of a request into one list.
#include "platform.cuh"

struct MergeArgs {
    const u32* slots;     // [requests, queries, stride], sorted by descending slot per query
    const u32* keys;      // [requests, queries, stride] ordered keys of the slots
    const u32* counts;    // [requests, queries]
    const float* weights; // [queries]
    u32* slots_out;       // [requests, stride_out]
    u32* keys_out;
    u32* counts_out; // [requests], initially 0
    u32 queries, stride, stride_out;
    u32 needs_all; // whether an item must be a candidate of all queries, with added scores; otherwise the largest score counts
};

// Returns the index of a slot among descending slots; `count` if the slot is missing.
DEVICE u32 place_of(const u32* slots, u32 count, u32 slot) {
    u32 low = 0, high = count;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if (slots[middle] > slot) low = middle + 1;
        else high = middle;
    }
    return low < count && slots[low] == slot ? low : count;
}

// Writes each distinct item once, with its merged score: grid (parts, requests x queries), one thread per candidate of
// a query.
KERNEL(256, merge_queries, MergeArgs) {
    u32 request = blockIdx.y / a.queries, own = blockIdx.y % a.queries, count = a.counts[blockIdx.y];
    u32 whole = (count + 31) / 32 * 32;
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < whole; n += gridDim.x * blockDim.x) {
        u32 slot = 0, found = 0;
        float score = 0;
        bool stays = n < count;
        if (stays) slot = a.slots[(u64)blockIdx.y * a.stride + n];
        for (u32 query = 0; query < a.queries && stays; query++) {
            u64 row = (u64)request * a.queries + query, base = row * a.stride;
            u32 at = query == own ? n : place_of(a.slots + base, a.counts[row], slot);
            if (at == a.counts[row]) continue;
            // Only the first query with an item writes it.
            if (query < own) stays = false;
            float weighted = finite(__fmul_rn(a.weights[query], unordered(a.keys[base + at])));
            score = found == 0 ? weighted : a.needs_all ? __fadd_rn(score, weighted) : fmaxf(score, weighted);
            found++;
        }
        stays = stays && (found == a.queries || !a.needs_all);
        u32 votes = __ballot_sync(EVERY_LANE, stays), first = 0;
        if (lane_of() == 0 && votes) first = atomicAdd(a.counts_out + request, (u32)__popc(votes));
        first = __shfl_sync(EVERY_LANE, first, 0);
        u64 place = (u64)request * a.stride_out + first + __popc(votes & lanes_before());
        if (stays) {
            a.slots_out[place] = slot;
            a.keys_out[place] = ordered(finite(score));
        }
    }
}

// When a filtered search ends, as `crates/index/src/ivf/filtered.rs` and `crates/index/src/ivf/ahead.rs` say, a look at a time.
#include "digits.cuh"

// What a search is judged by.
struct Judged {
    double passing; // items that pass, scanned or not: an estimate
    double left;    // of the best, how many may be expected ahead
    u32 enough;     // survivors that must be found where a search ends by what the last lists brought
    u32 found;      // and where by what is ahead; the score of the last of them is the threshold
    u32 is_gain;    // whether a search ends by what the last lists brought, for want of margins
    // Survivors that are enough after so many lists, whatever is ahead; 0 lists for none.
    u32 suffices, suffices_at;
    u32 least; // survivors below which a search does not end by what is ahead
};

#define RANGES 128u
#define KINSHIP_MAX 3.0
#define FOUND_MIN 10.0

// What is known of a search so far.
struct Sighted {
    u64 ahead[RANGES]; // items of the lists in each range of scores that were not scanned
    double scanned[RANGES]; // items that passed of those that were
    u64 items_ahead;
    u64 items_before; // at the last look
    float low, step;
    u32 survivors_before, kept_before;
    u32 threshold; // ordered; 0 while none is known
    u32 unused;
};

struct LookArgs {
    const Judged* judged;   // [queries]
    Sighted* sighted;       // [queries]
    const u32* looks;       // [rounds + 1, queries] after how many lists each look is
    const double* gains;    // [rounds + 1, queries] what a chunk of lists must bring for a search to go on
    const u32* list_keys;   // [queries, lists] ordered scores
    const u32* order;       // [queries, stride] lists, best first
    const u32* lengths;     // [lists]
    const float* vectors;   // [queries, dimension]
    const float* margins;   // [margin_count] rising
    const u32* keys;        // [queries, room] ordered scores of candidates
    const u32* counts;      // [queries]
    const u32* survivors;   // [queries]
    u32* begins;            // [queries] the lists that were scanned last, and those that are next
    u32* ends;
    u64* items;             // [queries] of all lists that were scanned
    u32 round, lists, stride, dimension, margin_count, room;
    float slope; // the share of its list's score that an item is expected to have
    u32 unused;
};

DEVICE u32 range_of(float score, float low, float step) {
    float place = __fdiv_rn(__fadd_rn(score, -low), step);
    return place > 0 ? min((u32)fminf(place, 1e6f), RANGES - 1) : 0;
}

// The share of items whose margin is larger, for a query of length 1: `Margins::share_above`.
DEVICE double share_above(const LookArgs& a, float margin) {
    const float least = 1.17549435e-38f;
    if (a.margin_count < 2) return 0.5;
    u32 place = 0, high = a.margin_count;
    while (place < high) {
        u32 middle = place + (high - place) / 2;
        if (a.margins[middle] <= margin) place = middle + 1;
        else high = middle;
    }
    if (place == 0) return 1.0;
    bool is_beyond = place == a.margin_count;
    u32 from = is_beyond ? place - 2 : place - 1;
    float start = is_beyond ? a.margins[place - 1] : a.margins[from];
    float width = fmaxf(__fadd_rn(a.margins[from + 1], -a.margins[from]), least);
    float halvings = __fadd_rn((float)(place - 1), __fdiv_rn(__fadd_rn(margin, -start), width));
    halvings = fminf(halvings, 1000.0f);
    u32 whole = (u32)halvings;
    return exp2(-(double)whole) * (1.0 - (double)__fadd_rn(halvings, -(float)whole) / 2.0);
}

// The length of a query. A whole warp.
DEVICE float length_of(const LookArgs& a, u32 query) {
    float sum = 0;
    for (u32 d = lane_of(); d < a.dimension; d += 32) {
        float x = a.vectors[(u64)query * a.dimension + d];
        sum = __fmaf_rn(x, x, sum);
    }
    for (u32 step = 16; step; step >>= 1) sum += __shfl_xor_sync(EVERY_LANE, sum, step);
    return fmaxf(sqrtf(sum), 1.17549435e-38f);
}

// All lists are ahead. A whole block, which waits for itself before it reads what is seen; `items` are two more numbers than ranges.
DEVICE void begin(const LookArgs& a, u32 query, Sighted& seen, u32* extremes, u32* items) {
    const u32* keys = a.list_keys + (u64)query * a.lists;
    if (threadIdx.x == 0) {
        extremes[0] = EVERY_LANE;
        extremes[1] = 0;
        items[RANGES] = 0;
    }
    for (u32 n = threadIdx.x; n < RANGES; n += blockDim.x) items[n] = 0;
    __syncthreads();
    u32 low = EVERY_LANE, high = 0;
    for (u32 n = threadIdx.x; n < a.lists; n += blockDim.x) {
        low = min(low, keys[n]);
        high = max(high, keys[n]);
    }
    low = __reduce_min_sync(EVERY_LANE, low);
    high = __reduce_max_sync(EVERY_LANE, high);
    if (lane_of() == 0) {
        atomicMin(extremes, low);
        atomicMax(extremes + 1, high);
    }
    __syncthreads();
    float least = unordered(extremes[0]);
    float step = fmaxf(__fdiv_rn(__fadd_rn(unordered(extremes[1]), -least), (float)RANGES), 1.17549435e-38f);
    // Slots are numbers of 32 bits, and so are sums of items.
    u32 all = 0;
    for (u32 n = threadIdx.x; n < a.lists; n += blockDim.x) {
        u32 length = a.lengths[n];
        atomicAdd(items + range_of(unordered(keys[n]), least, step), length);
        all += length;
    }
    all = __reduce_add_sync(EVERY_LANE, all);
    if (lane_of() == 0) atomicAdd(items + RANGES, all);
    __syncthreads();
    for (u32 n = threadIdx.x; n < RANGES; n += blockDim.x) {
        seen.ahead[n] = items[n];
        seen.scanned[n] = 0;
    }
    if (threadIdx.x == 0) {
        seen.items_ahead = items[RANGES];
        seen.low = least;
        seen.step = step;
        seen.items_before = 0;
        seen.survivors_before = 0;
        seen.kept_before = 0;
        seen.threshold = 0;
    }
}

// How many items that pass are expected ahead above the threshold: `Ahead::expected`. A whole block; thread 0 has it.
DEVICE double expected(const LookArgs& a, u32 query, const Sighted& seen, u32 survivors, double lately, double* terms) {
    double* past = terms + RANGES;
    float scale = length_of(a, query), threshold = unordered(seen.threshold);
    for (u32 n = threadIdx.x; n < RANGES; n += blockDim.x) {
        float score = __fadd_rn(seen.low, __fmul_rn((float)n + 0.5f, seen.step));
        float above = __fadd_rn(threshold, -__fmul_rn(a.slope, score));
        double share = share_above(a, __fdiv_rn(above, scale));
        terms[n] = (double)seen.ahead[n] * share;
        past[n] = seen.scanned[n] * share;
    }
    __syncthreads();
    if (threadIdx.x > 0) return 0;
    double above = 0, scanned = 0;
    for (u32 n = 0; n < RANGES; n++) {
        above += terms[n];
        scanned += past[n];
    }
    const double least = 2.2250738585072014e-308;
    double rest = a.judged[query].passing - (double)survivors;
    double density = fmin((rest > 0 ? rest : 0.0) / (double)(seen.items_ahead ? seen.items_ahead : 1), 1.0);
    double kinship = fmin(fmax(lately / fmax(density, least), 1.0), KINSHIP_MAX);
    double surprise = fmax(((double)a.judged[query].found + FOUND_MIN) / (scanned + FOUND_MIN), 1.0);
    return fmax(density, lately) * kinship * surprise * above;
}

// Looks whether each search goes on, and with which lists: a block a query.
KERNEL(1024, look_ahead, LookArgs) {
    u32* histogram = (u32*)shared_memory();
    double* terms = (double*)(histogram + DESCENT_WORDS);
    u32* fresh = (u32*)(terms + 2 * RANGES); // items of the lists that were scanned last, in each range of scores
    u32* scanned = fresh + RANGES;           // and all of them
    u32* gained = scanned + 1;
    u32* extremes = gained + 1;
    u32 query = blockIdx.x, queries = gridDim.x, first = a.begins[query], done = a.ends[query];
    if (first == done) return;
    const Judged& judged = a.judged[query];
    Sighted& seen = a.sighted[query];
    if (a.round == 0) begin(a, query, seen, extremes, fresh);
    for (u32 n = threadIdx.x; n < RANGES; n += blockDim.x) fresh[n] = 0;
    if (threadIdx.x == 0) {
        *scanned = 0;
        *gained = 0;
    }
    __syncthreads();
    for (u32 n = first + threadIdx.x; n < done; n += blockDim.x) {
        u32 list = a.order[(u64)query * a.stride + n];
        u32 length = a.lengths[list];
        u32 range = range_of(unordered(a.list_keys[(u64)query * a.lists + list]), seen.low, seen.step);
        atomicAdd(scanned, length);
        atomicAdd(fresh + range, length);
    }
    const u32* keys = a.keys + (u64)query * a.room;
    u32 kept = min(a.counts[query], a.room), survivors = a.survivors[query], known = seen.threshold;
    if (judged.is_gain || known) {
        u32 mine = 0;
        for (u32 n = seen.kept_before + threadIdx.x; n < kept; n += blockDim.x) mine += keys[n] >= known;
        if (mine) atomicAdd(gained, mine);
    }
    __syncthreads();
    u32 next = a.looks[(a.round + 1) * queries + query];
    u64 items = a.items[query] + *scanned;
    double lately = (double)(survivors - seen.survivors_before) / (double)(*scanned ? *scanned : 1);
    for (u32 n = threadIdx.x; n < RANGES; n += blockDim.x) {
        seen.ahead[n] -= fresh[n];
        seen.scanned[n] += (double)fresh[n] * lately;
    }
    bool has_enough = survivors >= judged.found && kept >= judged.found && judged.found > 0;
    bool is_over = next <= done, suffices = judged.suffices_at == done;
    bool brings_little = (double)*gained < a.gains[a.round * queries + query];
    if (judged.is_gain) is_over |= first > 0 && survivors >= judged.enough && brings_little;
    if (suffices) is_over = next <= done || survivors >= judged.suffices;
    u32 threshold = known;
    if (!is_over && has_enough) {
        u32 wanted = judged.found;
        threshold = kth(keys, kept, wanted, histogram);
    }
    if (threadIdx.x == 0) {
        seen.threshold = threshold;
        seen.items_ahead -= *scanned;
    }
    __syncthreads();
    bool is_judged = !is_over && !suffices && !judged.is_gain && has_enough && survivors >= judged.least && (!known || brings_little);
    double ahead = is_judged ? expected(a, query, seen, survivors, lately, terms) : 0;
    if (threadIdx.x > 0) return;
    is_over |= is_judged && ahead <= judged.left;
    seen.survivors_before = survivors;
    seen.items_before = items;
    seen.kept_before = kept;
    a.items[query] = items;
    a.begins[query] = done;
    if (!is_over) a.ends[query] = next;
}

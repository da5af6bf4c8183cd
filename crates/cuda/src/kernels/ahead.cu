// Termination check of filtered searches, as in `crates/index/src/ivf/filtered.rs` and `crates/index/src/ivf/termination.rs`, one check
// per launch.
#include "digits.cuh"

// Termination criteria of a search.
struct Judged {
    double passing; // estimated number of items that pass the filter, scanned or not
    double left;    // a search ends when at most this number of best items is expected in unscanned lists
    u32 enough;     // survivors to find before a search may end by the yield of its last lists
    u32 found;      // survivors to find before a search may end by its unscanned lists; their worst score is the threshold
    u32 is_gain;    // whether a search ends by the yield of its last lists, for lack of score-residual quantiles
    // Number of survivors that end a search after `suffices_at` lists, regardless of unscanned lists; `suffices_at` 0
    // disables this.
    u32 suffices, suffices_at;
    u32 least; // survivors below which a search does not end by its unscanned lists
};

#define RANGES 128u
#define KINSHIP_MAX 3.0
#define FOUND_MIN 10.0

// State of a search.
struct Sighted {
    u64 ahead[RANGES]; // items of unscanned lists in each range of list scores
    double scanned[RANGES]; // passing items of scanned lists in each range
    u64 items_ahead;
    u64 items_before; // items of all scanned lists, at the last check
    float low, step;
    u32 survivors_before, kept_before;
    u32 threshold; // ordered key; 0 if unknown
    u32 unused;
};

struct LookArgs {
    const Judged* judged;   // [queries]
    Sighted* sighted;       // [queries]
    const u32* looks;       // [rounds + 1, queries] number of lists before each check
    const double* gains;    // [rounds + 1, queries] minimum yield of a chunk of lists for a search to continue
    const u32* list_keys;   // [queries, lists] ordered keys
    const u32* order;       // [queries, stride] lists, best first
    const u32* lengths;     // [lists]
    const float* vectors;   // [queries, dimension]
    const float* margins;   // [margin_count] ascending
    const u32* keys;        // [queries, room] ordered keys of candidates
    const u32* counts;      // [queries]
    const u32* survivors;   // [queries]
    u32* begins;            // [queries] range of the lists that were scanned last; then of the next lists
    u32* ends;
    u64* items;             // [queries] items of all scanned lists
    u32 round, lists, stride, dimension, margin_count, room;
    float slope; // regression slope of item score on list score
    u32 unused;
};

DEVICE u32 range_of(float score, float low, float step) {
    float place = __fdiv_rn(__fadd_rn(score, -low), step);
    return place > 0 ? min((u32)fminf(place, 1e6f), RANGES - 1) : 0;
}

// Returns the fraction of items with a larger score residual, for a query of length 1, as `Margins::share_above`.
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

// Returns the length of a query. Called by the complete warp.
DEVICE float length_of(const LookArgs& a, u32 query) {
    float sum = 0;
    for (u32 d = lane_of(); d < a.dimension; d += 32) {
        float x = a.vectors[(u64)query * a.dimension + d];
        sum = __fmaf_rn(x, x, sum);
    }
    for (u32 step = 16; step; step >>= 1) sum += __shfl_xor_sync(EVERY_LANE, sum, step);
    return fmaxf(sqrtf(sum), 1.17549435e-38f);
}

// Marks all lists as unscanned. Called by the complete block, which must reach a barrier before it reads the state;
// `items` has RANGES + 2 numbers.
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
    // Slots are 32-bit numbers, so sums of items fit 32 bits.
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

// Returns the expected number of passing items above the threshold in unscanned lists, as `Ahead::expected`. Called by
// the complete block; only thread 0 gets the result.
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

// Checks whether each search continues, and with which lists: one block per query.
KERNEL(1024, look_ahead, LookArgs) {
    u32* histogram = (u32*)shared_memory();
    double* terms = (double*)(histogram + DESCENT_WORDS);
    u32* fresh = (u32*)(terms + 2 * RANGES); // items of the lists that were scanned last, in each range of scores
    u32* scanned = fresh + RANGES;           // items of the lists that were scanned last, in all ranges
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

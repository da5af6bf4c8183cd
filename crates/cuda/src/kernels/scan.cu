// Int8 scans: centroids, lists of one query with dp4a, lists of many queries on tensor cores, and the related counts.
#include "scan.cuh"

struct QuantizeArgs {
    const float* vectors; // [queries, dimension]
    u32* rows;            // [queries, 2, groups]
    QueryHead* heads;
    u32 dimension, groups;
    // Largest norm of an item; this norm times the query's norm bounds every score.
    float norm_max;
    u32 unused;
};

// Quantizes the queries, one warp each, bit-identical to `crates/index/src/ivf/quantize.rs`.
KERNEL(128, quantize_queries, QuantizeArgs) {
    const float* vector = a.vectors + (u64)blockIdx.x * a.dimension;
    if (warp_of() > 0) return;
    float most = 0, square = 0;
    for (u32 d = lane_of(); d < a.dimension; d += 32) {
        most = fmaxf(most, fabsf(vector[d]));
        square = __fmaf_rn(vector[d], vector[d], square);
    }
    for (u32 step = 16; step; step >>= 1) {
        most = fmaxf(most, __shfl_xor_sync(EVERY_LANE, most, step));
        square += __shfl_xor_sync(EVERY_LANE, square, step);
    }
    const float codes_max = 127 * 128;
    float scale = __fdiv_rn(most, codes_max);
    float inverse = scale > 0 && isfinite(__fdiv_rn(1.0f, scale)) ? __fdiv_rn(1.0f, scale) : 0.0f;
    u32* high_row = a.rows + (u64)blockIdx.x * 2 * a.groups;
    u32* low_row = high_row + a.groups;
    i32 high_sum = 0, low_sum = 0;
    for (u32 group = lane_of(); group < a.groups; group += 32) {
        u32 high_word = 0, low_word = 0;
        for (u32 i = 0; i < 4 && group * 4 + i < a.dimension; i++) {
            float x = fminf(fmaxf(__fmul_rn(vector[group * 4 + i], inverse), -codes_max), codes_max);
            // Rounds to the nearest integer, ties to even, as the host does.
            const float shift = 12582912.0f;
            i32 code = (i32)(__float_as_uint(__fadd_rn(x, shift)) - __float_as_uint(shift));
            i32 high = (code + 64) >> 7;
            i32 low = code - 128 * high;
            high_sum += high;
            low_sum += low;
            high_word |= (u32)(u8)(i8)high << (8 * i);
            low_word |= (u32)(u8)(i8)low << (8 * i);
        }
        high_row[group] = high_word;
        low_row[group] = low_word;
    }
    for (u32 step = 16; step; step >>= 1) {
        high_sum += __shfl_xor_sync(EVERY_LANE, high_sum, step);
        low_sum += __shfl_xor_sync(EVERY_LANE, low_sum, step);
    }
    if (lane_of() == 0) {
        float bound = sqrtf(square) * a.norm_max;
        float bins = bound > 0 && isfinite(bound) ? 0.5f * BINS / bound : 0.0f;
        a.heads[blockIdx.x] = QueryHead{scale, 128 * high_sum, 128 * low_sum, isfinite(bins) ? bins : 0.0f};
    }
}

struct CentroidArgs {
    const u8* codes; // centroids as blocks, one list per slot
    const float* scales;
    const float* penalties; // [lists], or null
    const u32* rows;
    const QueryHead* heads;
    u32* keys; // [queries, lists]
    u32 lists, groups;
};

// Computes the ordered keys of all list scores: grid (parts, queries), one warp per block of 16.
KERNEL(256, score_lists, CentroidArgs) {
    u32* row = (u32*)shared_memory();
    u32 query = blockIdx.y;
    for (u32 n = threadIdx.x; n < 2 * a.groups; n += blockDim.x) row[n] = a.rows[(u64)query * 2 * a.groups + n];
    __syncthreads();
    QueryHead head = a.heads[query];
    u32 blocks = (a.lists + 15) / 16;
    for (u32 block = blockIdx.x * warps_of() + warp_of(); block < blocks; block += gridDim.x * warps_of()) {
        i32 sums[1][2];
        block_sums(a.codes, {block}, row, a.groups, sums);
        u32 list = block * 16 + item_of_lane();
        if ((lane_of() & 4) == 0 && list < a.lists) {
            float score = score_of(sums[0][0], sums[0][1], head, a.scales[list]);
            if (a.penalties) score = __fadd_rn(score, -a.penalties[list]);
            a.keys[(u64)query * a.lists + list] = ordered(score);
        }
    }
}

// Number of lists to probe for a query that is out of distribution.
struct Further {
    u32 probes;
    float reach;
};

struct FurtherArgs {
    const u32* keys; // [queries, lists] ordered keys
    const u32* rows;
    const QueryHead* heads;
    const Further* further; // [queries]
    u32* probes;            // [queries]
    u32 lists, groups;
};

// Replaces the number of probed lists of each query whose best list score is less than the query's reach times its
// length; one warp per query. The length is computed as in `crates/index/src/ivf/quantize.rs`.
KERNEL(128, probe_further, FurtherArgs) {
    u32 query = blockIdx.x, best = 0;
    if (warp_of() > 0) return;
    i32 square = 0;
    for (u32 list = lane_of(); list < a.lists; list += 32) best = max(best, a.keys[(u64)query * a.lists + list]);
    for (u32 group = lane_of(); group < a.groups; group += 32) {
        u32 word = a.rows[(u64)query * 2 * a.groups + group];
        for (u32 i = 0; i < 4; i++) {
            i32 code = (i8)(u8)(word >> (8 * i));
            square += code * code;
        }
    }
    for (u32 step = 16; step; step >>= 1) {
        best = max(best, __shfl_xor_sync(EVERY_LANE, best, step));
        square += __shfl_xor_sync(EVERY_LANE, square, step);
    }
    if (lane_of() == 0) {
        float length = __fmul_rn(__fmul_rn(a.heads[query].scale, 128.0f), sqrtf((float)square));
        Further further = a.further[query];
        if (unordered(best) < __fmul_rn(further.reach, length)) a.probes[query] = further.probes;
    }
}

// Lists of an index.
struct Lists {
    const u8* codes; // [blocks, groups, 16, 4]
    const float* scales;
    const u32* offsets; // [lists + 1] first slots
    const u32* lengths; // [lists] items
};

struct ScanArgs {
    Lists lists;
    Candidates to;
    // [queries, stride] lists to scan; query q scans begins[q] (0 if null) to ends[q].
    const u32* order;
    const u32* begins;
    const u32* ends;
    // Filter bitmap, one bit per item: the words of list l of query q start at words[q][firsts[l]]; null if all are eligible.
    const u64* const* words;
    const u32* firsts;
    u32 stride, unused;
};

// Mask of the first `count` bits.
DEVICE u64 first_bits(u32 count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

// Returns the number of eligible items of a list that are excluded.
DEVICE u32 excluded_of(const Candidates& to, u32 query, u32 first_slot, u32 length, const u64* words) {
    u32 end = to.excluded_starts[query + 1], count = 0;
    for (u32 n = first_excluded(to, query, first_slot); n < end && to.excluded[n] < first_slot + length; n++) {
        u32 bit = to.excluded[n] - first_slot;
        count += (u32)(words[bit / 64] >> (bit % 64)) & 1;
    }
    return count;
}

// Block of items, and one bit for each eligible item of the block.
struct Pick {
    u32 block, items;
};

// Scores the items of several blocks together, by a complete warp.
template <u32 COUNT>
DEVICE void score_picks(const ScanArgs& a, u32 query, const Pick (&picks)[COUNT], const u32* row, const QueryHead& head, Found& found) {
    u32 bar = fresh(a.to.bars + query), blocks[COUNT], item = item_of_lane();
    bool has_one[COUNT];
    float scales[COUNT];
#pragma unroll
    for (u32 b = 0; b < COUNT; b++) {
        blocks[b] = picks[b].block;
        has_one[b] = (lane_of() & 4) == 0 && (picks[b].items >> item & 1);
        scales[b] = has_one[b] ? a.lists.scales[blocks[b] * 16 + item] : 0.0f;
    }
    i32 sums[COUNT][2];
    block_sums(a.lists.codes, blocks, row, a.to.groups, sums);
#pragma unroll
    for (u32 b = 0; b < COUNT; b++) {
        float score = has_one[b] ? score_of(sums[b][0], sums[b][1], head, scales[b]) : 0.0f;
        keep(a.to, query, has_one[b], score, blocks[b] * 16 + item, bar, head.bins_per_score, found);
    }
}

// List of a query: the end of the list's words among the words of all lists of the query, and the list's size.
struct Span {
    u32 end, first_slot, length, first_word;
};

// Number of lists that a block looks up together, one per thread.
#define SPANS 256u
// Number of words that a warp processes together, one per lane, with four blocks each.
#define WORDS_TOGETHER 32u

// Returns the eligible items of word `n` among the words of several lists, and sets the first block of that word.
DEVICE u64 word_of(const Span* spans, u32 lists, u32 n, const u64* words, u32* first_block) {
    u32 low = 0, high = lists - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (spans[middle].end <= n) low = middle + 1;
        else high = middle;
    }
    Span of = spans[low];
    u32 word = n - (low ? spans[low - 1].end : 0);
    *first_block = of.first_slot / 16 + 4 * word;
    u64 bits = first_bits(of.length - 64 * word);
    return words ? bits & words[of.first_word + word] : bits;
}

// Scans lists for one query each: grid (parts, queries). The words of a query's lists are distributed evenly over all warps of
// its blocks, regardless of list lengths, and the best lists come first, so that all warps end together. Each warp collects the
// blocks that contain eligible items, so that no time is spent on others.
KERNEL_OF_THREE(256, scan_lists, ScanArgs) {
    u32 groups = a.to.groups, query = blockIdx.y;
    Span* spans = (Span*)shared_memory();               // [SPANS]
    QueryHead* head = (QueryHead*)(spans + SPANS);      // head of the query
    Pick* all_picks = (Pick*)(head + 1);                // [warps, 4 WORDS_TOGETHER]
    u32* finds = (u32*)(all_picks + 4 * WORDS_TOGETHER * warps_of()); // [warps, 2, FOUND_MAX]
    u32* sums = finds + 2 * FOUND_MAX * warps_of();     // [warps]
    u32* row = sums + warps_of();                       // [2, groups]
    Pick* picks = all_picks + 4 * WORDS_TOGETHER * warp_of();
    Found found = {finds + 2 * FOUND_MAX * warp_of(), 0};
    for (u32 n = threadIdx.x; n < 2 * groups; n += blockDim.x) row[n] = a.to.rows[(u64)query * 2 * groups + n];
    if (threadIdx.x == 0) *head = a.to.heads[query];
    const u64* words = a.words ? a.words[query] : nullptr;
    u32 scored = 0, end = a.ends[query];
    for (u32 first = a.begins ? a.begins[query] : 0; first < end; first += SPANS) {
        u32 lists = min(end - first, SPANS);
        Span mine = {0, 0, 0, 0};
        if (threadIdx.x < lists) {
            u32 list = a.order[(u64)query * a.stride + first + threadIdx.x];
            mine = {0, a.lists.offsets[list], a.lists.lengths[list], a.firsts ? a.firsts[list] : 0};
        }
        u32 all;
        mine.end = sum_upto((mine.length + 63) / 64, sums, &all);
        spans[threadIdx.x] = mine;
        __syncthreads();
        u32 warps = gridDim.x * warps_of(), turns = (all + WORDS_TOGETHER * warps - 1) / (WORDS_TOGETHER * warps);
        u32 each = turns ? (all + turns * warps - 1) / (turns * warps) : 0;
        for (u32 from = each * (blockIdx.x * warps_of() + warp_of()); from < all; from += each * warps) {
            u32 n = from + lane_of(), first_block = 0;
            u64 bits = lane_of() < each && n < all ? word_of(spans, lists, n, words, &first_block) : 0;
            scored += __popcll(bits);
            u32 count = 0;
#pragma unroll
            for (u32 quarter = 0; quarter < 4; quarter++) {
                u32 items = (u32)(bits >> (16 * quarter)) & 0xffff, some = __ballot_sync(EVERY_LANE, items != 0);
                if (items) picks[count + __popc(some & lanes_before())] = Pick{first_block + quarter, items};
                count += __popc(some);
            }
            __syncwarp();
            u32 p = 0;
            for (; p + 1 < count; p += 2) score_picks(a, query, {picks[p], picks[p + 1]}, row, *head, found);
            if (p < count) score_picks(a, query, {picks[p]}, row, *head, found);
            __syncwarp();
        }
        if (words && blockIdx.x == 0 && threadIdx.x < lists) {
            mine = spans[threadIdx.x];
            scored -= excluded_of(a.to, query, mine.first_slot, mine.length, words + mine.first_word);
        }
        __syncthreads();
    }
    write_found(a.to, query, found);
    scored = __reduce_add_sync(EVERY_LANE, scored);
    if (lane_of() == 0 && scored) atomicAdd(a.to.survivors + query, scored);
}

struct SharedScanArgs {
    Lists lists;
    Candidates to;
    // Queries of each list: list l is probed by askers[starts[l]] .. askers[starts[l + 1]].
    const u32* starts;
    const u32* askers;
    // Live bitmap, one bit per item: the words of list l start at words[firsts[l]]; null if all are live.
    const u64* words;
    const u32* firsts;
    u32 list_count;
    u32 unused;
};

// Counts the live items of a list, by all lanes of a warp; if `words` is null, all items are live.
DEVICE u32 live_of(const u64* words, u32 length) {
    if (!words) return length;
    u32 count = 0;
    for (u32 w = lane_of(); w * 64 < length; w += 32) count += __popcll(words[w] & first_bits(length - w * 64));
    return __reduce_add_sync(EVERY_LANE, count);
}

// Queries per tile: 4 tiles of 8 columns, each with 4 queries of two rows.
#define TILE_QUERIES 16u

// Scans each list for all queries that probe it, on tensor cores: grid (parts of lists), one warp per block of 16 items.
// Fragments of codes are loaded directly from memory: register words are words of the stored layout.
KERNEL(256, scan_shared, SharedScanArgs) {
    u32 groups = a.to.groups, padded = (groups + 7) / 8 * 8;
    u32* rows = (u32*)shared_memory(); // [TILE_QUERIES, 2, padded + 4]; the padding of 4 words makes columns use different banks
    u32 row_words = padded + 4;
    u32 within = lane_of() & 3, group_of = lane_of() >> 2;
    for (u32 list = blockIdx.x; list < a.list_count; list += gridDim.x) {
        u32 length = a.lists.lengths[list], first_slot = a.lists.offsets[list];
        u32 begin = a.starts[list], end = a.starts[list + 1];
        const u64* words = a.words ? a.words + a.firsts[list] : nullptr;
        // The complete first warp counts the live items, because the lanes of this warp update the counts of queries.
        u32 live = warp_of() == 0 && begin < end ? live_of(words, length) : 0;
        for (u32 tile = begin; tile < end; tile += TILE_QUERIES) {
            u32 queries = min(TILE_QUERIES, end - tile);
            __syncthreads();
            for (u32 n = threadIdx.x; n < TILE_QUERIES * 2 * row_words; n += blockDim.x) {
                u32 column = n / row_words, word = n % row_words;
                bool is_filled = column / 2 < queries && word < groups;
                u64 query = is_filled ? a.askers[tile + column / 2] : 0;
                rows[n] = is_filled ? a.to.rows[(query * 2 + column % 2) * groups + word] : 0;
            }
            __syncthreads();
            if (threadIdx.x < queries) atomicAdd(a.to.survivors + a.askers[tile + threadIdx.x], live);
            for (u32 b = warp_of(); b * 16 < length; b += warps_of()) {
                u32 items = words ? (u32)(words[b / 4] >> (16 * (b % 4))) & 0xffff : 0xffff;
                if (items == 0) continue;
                const u8* block = a.lists.codes + (u64)(first_slot / 16 + b) * groups * 64;
                i32 sums[4][4] = {};
                for (u32 g = 0; g < padded; g += 8) {
                    const u32* near = (const u32*)(block + (u64)(g + within) * 64);
                    const u32* far = near + 4 * 16;
                    bool has_near = g + within < groups, has_far = g + within + 4 < groups;
                    u32 codes[4] = {has_near ? __ldg(near + group_of) : 0, has_near ? __ldg(near + group_of + 8) : 0,
                                    has_far ? __ldg(far + group_of) : 0, has_far ? __ldg(far + group_of + 8) : 0};
#pragma unroll
                    for (u32 t = 0; t < 4; t++) {
                        const u32* row = rows + (t * 8 + group_of) * row_words + g + within;
                        u32 query[2] = {row[0], row[4]};
                        mma_u8_s8(sums[t], codes, query);
                    }
                }
#pragma unroll
                for (u32 t = 0; t < 4; t++) {
                    // Each quarter of the warp holds a different query; a pair of columns is the two rows of one query.
                    u32 n = t * 4 + within;
                    u32 query = n < queries ? a.askers[tile + n] : EVERY_LANE;
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        u32 within_block = group_of + 8 * half, item = b * 16 + within_block, slot = first_slot + item;
                        // The first lanes broadcast their query, even if their own item is not live.
                        bool has_query = query != EVERY_LANE && item < length;
                        bool has_one = has_query && (items >> within_block & 1);
                        float score = 0, bins = 0;
                        u32 bar = 0;
                        if (has_query) {
                            QueryHead head = a.to.heads[query];
                            score = score_of(sums[t][2 * half], sums[t][2 * half + 1], head, a.lists.scales[slot]);
                            bins = head.bins_per_score;
                            bar = fresh(a.to.bars + query);
                        }
                        bool reaches = has_one && bin_of(score, bins) >= bar;
                        u32 some = __ballot_sync(EVERY_LANE, reaches);
                        // Processes one query after the other; most blocks have no candidate for most queries.
                        for (u32 w = 0; w < 4; w++) {
                            if ((some & (0x11111111u << w)) == 0) continue;
                            u32 of = __shfl_sync(EVERY_LANE, query, w);
                            float of_bins = __shfl_sync(EVERY_LANE, bins, w);
                            keep_now(a.to, of, reaches && within == w, score, slot, bar, of_bins);
                        }
                    }
                }
            }
        }
    }
}

struct SumArgs {
    const u32* order; // [queries, stride]
    const u32* counts;
    const u32* lengths; // [lists]
    u64* items;         // [queries]
    u32 stride, unused;
};

// Counts the items of the lists of each query: grid (queries).
KERNEL(256, sum_lengths, SumArgs) {
    u64* sum = (u64*)shared_memory();
    if (threadIdx.x == 0) *sum = 0;
    __syncthreads();
    u64 mine = 0;
    for (u32 n = threadIdx.x; n < a.counts[blockIdx.x]; n += blockDim.x)
        mine += a.lengths[a.order[(u64)blockIdx.x * a.stride + n]];
    if (mine) atomicAdd(sum, mine);
    __syncthreads();
    if (threadIdx.x == 0) a.items[blockIdx.x] = *sum;
}

struct InvertArgs {
    const u32* order; // [queries, stride]
    const u32* counts;
    u32* starts; // [lists + 1]: number of queries of each list, then the start of each list's queries
    u32* filled; // [lists]
    u32* askers;
    u32 queries, stride, lists, unused;
};

// Counts the queries of each list: grid (queries).
KERNEL(256, count_askers, InvertArgs) {
    for (u32 n = threadIdx.x; n < a.counts[blockIdx.x]; n += blockDim.x)
        atomicAdd(a.starts + 1 + a.order[(u64)blockIdx.x * a.stride + n], 1u);
}

// Converts numbers of queries to starts: one block.
KERNEL(1024, start_askers, InvertArgs) {
    u32* sums = (u32*)shared_memory(); // [warps]
    u32 carried = 0;
    for (u32 first = 0; first < a.lists; first += blockDim.x) {
        u32 list = first + threadIdx.x, all;
        u32 upto = sum_upto(list < a.lists ? a.starts[1 + list] : 0, sums, &all);
        if (list < a.lists) a.starts[1 + list] = carried + upto;
        carried += all;
        __syncthreads();
    }
}

// Groups the queries by list: grid (queries).
KERNEL(256, place_askers, InvertArgs) {
    for (u32 n = threadIdx.x; n < a.counts[blockIdx.x]; n += blockDim.x) {
        u32 list = a.order[(u64)blockIdx.x * a.stride + n];
        a.askers[a.starts[list] + atomicAdd(a.filled + list, 1u)] = blockIdx.x;
    }
}

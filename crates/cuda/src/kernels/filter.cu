// Filters: programs over Bloom planes and posting lists, with 64 items per word and one word per thread. Items for
// which planes give only a possible match are checked exactly.
#include "platform.cuh"

#define NO_PLANE 0xffffffffu

// Step of a program. Steps over words are those of `crates/index/src/filter/program.rs`; steps over items push one bit.
enum Operation {
    EVERY, NONE, PUSH, KEEP, ADD, BLOOM, NUMBER, COMPARE, AND, OR,
    HAS_TERM, HOLDS
};

struct FilterStep {
    u32 operation, is_negated;
    u32 plane;  // PUSH, KEEP, ADD
    u32 column; // NUMBER, COMPARE, HAS_TERM, HOLDS
    // NUMBER: the value ranges of planes, those with certain matches first. HAS_TERM: the codes to find, ascending.
    u32 first, count, sure;
    // Operator of a comparison: 0 to 5 as in `crates/index/src/columns/operator.rs`, or 6 for ranges of codes.
    u32 comparison;
    // BLOOM: the hash. Comparison: the number, or two ranges [low, high) of codes, low halves first.
    u64 x, y;
};

struct FilterColumn {
    const u32* offsets; // [slots + 1], or null
    const u32* codes;
    const double* floats; // [slots], or null
};

// Program of a filter, and the destination of the filter's bitmap.
struct FilterProgram {
    const FilterStep* steps;
    const FilterStep* checks; // exact check of items, if the words are not exact
    const u32* runs;          // value ranges as pairs: a plane, and the plane to subtract or NO_PLANE
    const u32* codes;         // for HAS_TERM
    const u64* every;         // [words]
    u64* out;                 // [words]
    u32 step_count, check_count;
};

struct FilterArgs {
    const FilterProgram* programs;
    const FilterColumn* columns;
    const u64* planes; // [planes, words]
    const u64* bloom;
    const u64* bloom_starts; // [lists]
    const u32* widths;       // [lists]
    const u32* firsts;       // [lists + 1] first word of each list
    const u32* word_lists;   // [words]
    const u32* word_slots;   // [words]
    u32 words, hashes;
};

DEVICE bool number_holds(u32 comparison, double value, double number) {
    switch (comparison) {
    case 0: return value < number;
    case 1: return value <= number;
    case 2: return value > number;
    case 3: return value >= number;
    case 4: return value == number;
    default: return value < number || value > number;
    }
}

DEVICE double number_of(u64 bits) {
#ifdef STERLING_EMULATED
    double number;
    std::memcpy(&number, &bits, 8);
    return number;
#else
    return __longlong_as_double((i64)bits);
#endif
}

// Returns whether a comparison holds for any value of a slot.
DEVICE bool compares(const FilterStep& step, const FilterColumn& column, u32 slot) {
    if (step.comparison < 6) return number_holds(step.comparison, column.floats[slot], number_of(step.x));
    for (u32 n = column.offsets[slot]; n < column.offsets[slot + 1]; n++) {
        u32 code = column.codes[n];
        if ((code >= (u32)step.x && code < (u32)(step.x >> 32)) || (code >= (u32)step.y && code < (u32)(step.y >> 32)))
            return true;
    }
    return false;
}

DEVICE bool has_term(const FilterStep& step, const u32* wanted, const FilterColumn& column, u32 slot) {
    for (u32 n = column.offsets[slot]; n < column.offsets[slot + 1]; n++) {
        u32 code = column.codes[n], low = step.first, high = step.first + step.count;
        while (low < high) {
            u32 middle = low + (high - low) / 2;
            if (wanted[middle] < code) low = middle + 1;
            else high = middle;
        }
        if (low < step.first + step.count && wanted[low] == code) return true;
    }
    return false;
}

// Returns whether an item passes the filter's exact check.
DEVICE bool passes(const FilterArgs& a, const FilterProgram& program, u32 slot) {
    u64 stack = 0;
    for (u32 n = 0; n < program.check_count; n++) {
        const FilterStep& step = program.checks[n];
        if (step.operation == AND) stack = (stack >> 1 & ~1ull) | (stack & stack >> 1 & 1);
        else if (step.operation == OR) stack = (stack >> 1 & ~1ull) | ((stack | stack >> 1) & 1);
        else {
            bool holds = step.operation == EVERY;
            if (step.operation == HAS_TERM) holds = has_term(step, program.codes, a.columns[step.column], slot);
            else if (step.operation == HOLDS) holds = compares(step, a.columns[step.column], slot);
            stack = stack << 1 | (holds != (step.is_negated != 0));
        }
    }
    return stack & 1;
}

// Returns the bitmap of the items of `asked` that satisfy a comparison, or its complement if the step is negated.
DEVICE u64 holding(const FilterArgs& a, const FilterStep& step, u32 word, u64 asked) {
    u64 held = 0;
    for (u64 left = asked; left; left &= left - 1) {
        u32 bit = __ffsll((i64)left) - 1;
        if (compares(step, a.columns[step.column], a.word_slots[word] + bit) != (step.is_negated != 0)) held |= 1ull << bit;
    }
    return held;
}

DEVICE u64 run_of(const FilterArgs& a, const FilterProgram& program, u32 run, u32 word) {
    u32 plane = program.runs[2 * run], earlier = program.runs[2 * run + 1];
    u64 bits = a.planes[(u64)plane * a.words + word];
    return earlier == NO_PLANE ? bits : bits & ~a.planes[(u64)earlier * a.words + word];
}

// Loads the plane of a step. Callers load the plane of the next step during the current one.
DEVICE u64 plane_of(const FilterArgs& a, const FilterProgram& program, u32 step, u32 word) {
    if (step >= program.step_count || program.steps[step].plane == NO_PLANE) return 0;
    return a.planes[(u64)program.steps[step].plane * a.words + word];
}

// Returns the eligible items of a word. `stack` is the thread's own part of [depth, threads].
DEVICE u64 eligible(const FilterArgs& a, const FilterProgram& program, u32 word, u64* stack) {
    u64 top = 0, every = program.every[word], ahead = plane_of(a, program, 0, word);
    u32 height = 0;
    for (u32 n = 0; n < program.step_count; n++) {
        const FilterStep& step = program.steps[n];
        u64 flip = step.is_negated ? ~0ull : 0, plane = ahead;
        ahead = plane_of(a, program, n + 1, word);
        switch (step.operation) {
        case EVERY:
        case NONE:
        case PUSH:
            if (height++ > 0) stack[(height - 2) * blockDim.x] = top;
            top = step.operation == NONE ? 0 : step.operation == EVERY ? every : every & (plane ^ flip);
            break;
        case KEEP: top &= plane ^ flip; break;
        case ADD: top |= plane; break;
        case BLOOM: {
            u32 list = a.word_lists[word], first = a.firsts[list], list_words = a.firsts[list + 1] - first;
            u64 width = a.widths[list];
            if (width == 0) top = 0;
            for (u32 h = 0; h < a.hashes && top; h++) {
                u64 position = __umul64hi(step.x + step.y * h, width);
                top &= a.bloom[a.bloom_starts[list] + position * list_words + (word - first)];
            }
            break;
        }
        case NUMBER: {
            u64 sure = 0, open = 0;
            for (u32 r = 0; r < step.count; r++) {
                if (r < step.sure) sure |= run_of(a, program, step.first + r, word);
                else open |= run_of(a, program, step.first + r, word);
            }
            top = (top & (sure ^ flip) & ~open) | holding(a, step, word, top & open);
            break;
        }
        case COMPARE: top = holding(a, step, word, top); break;
        case AND:
        case OR: {
            u64 below = stack[(--height - 1) * blockDim.x];
            top = step.operation == AND ? top & below : top | below;
            break;
        }
        }
    }
    if (program.check_count) {
        for (u64 left = top; left; left &= left - 1)
            if (!passes(a, program, a.word_slots[word] + (u32)__ffsll((i64)left) - 1)) top &= ~(left & (0 - left));
    }
    return top;
}

// Evaluates each filter over all lists: grid (parts, filters), one thread per word.
KERNEL(256, filter_words, FilterArgs) {
    u64* stack = (u64*)shared_memory() + threadIdx.x;
    const FilterProgram program = a.programs[blockIdx.y];
    for (u32 word = blockIdx.x * blockDim.x + threadIdx.x; word < a.words; word += gridDim.x * blockDim.x)
        program.out[word] = eligible(a, program, word, stack);
}

#define NO_FILTER 0xffffffffu

struct FilterListsArgs {
    FilterArgs of;
    const u32* filters; // [queries], or NO_FILTER
    const u32* order;   // [queries, stride] lists; query q uses begins[q] (0 if null) to ends[q]
    const u32* begins;
    const u32* ends;
    u32 stride, unused;
};

// Evaluates the filter of each query over its next lists: grid (parts, queries), one warp per list. Queries with the same filter
// write the same words.
KERNEL(256, filter_lists, FilterListsArgs) {
    u64* stack = (u64*)shared_memory() + threadIdx.x;
    u32 query = blockIdx.y, filter = a.filters[query];
    if (filter == NO_FILTER) return;
    const FilterProgram program = a.of.programs[filter];
    u32 first = (a.begins ? a.begins[query] : 0) + blockIdx.x * warps_of() + warp_of();
    for (u32 n = first; n < a.ends[query]; n += gridDim.x * warps_of()) {
        u32 list = a.order[(u64)query * a.stride + n], end = a.of.firsts[list + 1];
        for (u32 word = a.of.firsts[list] + lane_of(); word < end; word += 32)
            program.out[word] = eligible(a.of, program, word, stack);
    }
}

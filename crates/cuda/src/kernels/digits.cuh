// Radix search of the K-th largest of many numbers, digit by digit.
#pragma once
#include "platform.cuh"

#define DIGIT_BITS 11u
#define DIGITS (1u << DIGIT_BITS)
// Number of words of shared memory of a search: a histogram, and the results of the warps and of `reached`.
#define DESCENT_WORDS (DIGITS + 36u)

// Sets the lowest bit and the width of each digit of a key: 11, 11 and the last 10 bits.
DEVICE void digit_at(i32 shift, u32& low, u32& bits) {
    low = (u32)max(shift, 0);
    bits = (u32)((i32)DIGIT_BITS + min(shift, 0));
}

// Returns the digit at which `wanted` items are reached, counted from the top digit down or from the lowest digit up.
// Called by the complete block, which must reach a barrier before `sums` is written again.
DEVICE u32 reached(const u32* histogram, u32* sums, u32& wanted, bool from_top) {
    u32 each = DIGITS / blockDim.x, first = threadIdx.x * each, sum = 0;
    for (u32 n = first; n < first + each; n++) sum += histogram[from_top ? DIGITS - 1 - n : n];
    u32 upto = lanes_upto(sum);
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
    wanted = found[1];
    return found[0];
}

DEVICE void clear(u32* histogram) {
    for (u32 n = threadIdx.x; n < DIGITS; n += blockDim.x) histogram[n] = 0;
    __syncthreads();
}

// Number of keys that a thread loads together.
#define KEYS_AHEAD 4u

// Counts the digits of every `stride`-th key for which a condition holds.
template <class Holds>
DEVICE void count_digits(const u32* keys, u32 first, u32 stride, u32 count, u32* histogram, Holds holds, u32 low, u32 bits) {
    for (u32 n = first; n < count; n += KEYS_AHEAD * stride) {
        u32 here[KEYS_AHEAD];
#pragma unroll
        for (u32 i = 0; i < KEYS_AHEAD; i++) here[i] = n + i * stride < count ? keys[n + i * stride] : 0;
#pragma unroll
        for (u32 i = 0; i < KEYS_AHEAD; i++)
            if (n + i * stride < count && holds(here[i])) atomicAdd(histogram + (here[i] >> low & ((1u << bits) - 1)), 1u);
    }
}

// Returns the `wanted`-th largest of at least that many keys; `wanted` becomes the number of keys equal to the result
// that are needed. Called by the complete block.
DEVICE u32 kth(const u32* keys, u32 count, u32& wanted, u32* histogram) {
    u32 last = 0, decided = 0;
    for (i32 shift = 21; shift >= -1; shift -= 11) {
        u32 low, bits;
        digit_at(shift, low, bits);
        clear(histogram);
        count_digits(keys, threadIdx.x, blockDim.x, count, histogram, [&](u32 key) { return (key & decided) == last; }, low, bits);
        __syncthreads();
        last |= reached(histogram, histogram + DIGITS, wanted, true) << low;
        decided |= ((1u << bits) - 1) << low;
    }
    return last;
}

// Addresses of the numbers and factors of dense graphs.
#pragma once
#include "platform.cuh"

// Strided numbers of a step. Consecutive requests are `request` numbers apart; 0 if all requests share the numbers.
struct Numbers {
    float* at;
    u64 request;
    u32 row, outer, inner, unused;
};

DEVICE const float* row_at(const Numbers& of, u32 request, u32 row) {
    return of.at + request * of.request + (u64)row * of.row;
}

// Factor of a product: rows of `depth` numbers, and a matrix in panels of 32 columns.
struct Factor {
    Numbers rows, matrix;
    u32 depth, row_stride, panel_stride, unused;
};

struct ProductOfArgs {
    Factor parts[16];
    Numbers bias; // null address for none
    Numbers out;
    const u32* counts; // [requests] number of rows
    u32 part_count, runs, columns, is_rectified;
};

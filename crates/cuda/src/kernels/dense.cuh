// Where the numbers and the factors of dense programs lie.
#pragma once
#include "platform.cuh"

// Numbers of a step: those of a request start `request` after those of the one before, 0 where all share them.
struct Numbers {
    float* at;
    u64 request;
    u32 row, outer, inner, unused;
};

DEVICE const float* row_at(const Numbers& of, u32 request, u32 row) {
    return of.at + request * of.request + (u64)row * of.row;
}

// A factor of a product: rows of `depth` and a matrix in panels of 32 columns.
struct Factor {
    Numbers rows, matrix;
    u32 depth, row_stride, panel_stride, unused;
};

struct ProductOfArgs {
    Factor parts[16];
    Numbers bias; // a null address where there is none
    Numbers out;
    const u32* counts; // [requests] rows of each
    u32 part_count, runs, columns, is_rectified;
};

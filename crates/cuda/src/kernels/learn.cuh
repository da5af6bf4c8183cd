// Tables, features and slots of a training step.
//
// A *slot* is a row of gradients: of a bag, or of an id of a sequence. An *occurrence* is an id of a slot that has a row. Rows of
// all tables are numbered together.
#pragma once
#include "platform.cuh"

// Feature that reads a table. Its slots are consecutive.
struct Feature {
    u64 values; // first number of its first slot, in outputs and in gradients
    u32 first_slot, table;
    u32 stride; // numbers between slots
    u32 is_mean;
};

enum Rule { SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM };
enum Decay { NO_DECAY, L2, DECOUPLED };

// Table: each row is followed by its optimizer state.
struct Master {
    float* stretches;
    u32 first_row, width, stride;
    u32 rule, decay;
    float rate, epsilon, beta1, beta2, lambda;
    float max_norm, clip; // 0: no limit
};

// Id without a row.
#define NO_ROW 0xffffffffu

// Returns the last of `count` numbers at which the rising `at` is at most `value`. The first one always is.
template <class At> DEVICE u32 last_upto(u32 count, u32 value, At at) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (at(middle) <= value) low = middle;
        else high = middle;
    }
    return low;
}

// Where the gradient of a slot is, and its factor.
struct SlotAt {
    u64 values;
    float factor;
    u32 unused;
};

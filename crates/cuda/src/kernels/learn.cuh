// Tables, features and slots of a training step.
//
// A *slot* is a row of gradients: for a bag, or for one id of a sequence. An *occurrence* is an id of a slot that has a
// row in the table. Rows of all tables are numbered together.
#pragma once
#include "platform.cuh"

// Feature that reads a table. The slots of a feature are consecutive.
struct Feature {
    u64 values; // index of the first number of the feature's first slot, in outputs and in gradients
    u32 first_slot, table;
    u32 stride; // distance of consecutive slots, in numbers
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

// Row number of an id that has no row in the table.
#define NO_ROW 0xffffffffu

// Returns the last index below `count` at which the ascending function `at` is at most `value`. `at(0)` must be at most
// `value`.
template <class At> DEVICE u32 last_upto(u32 count, u32 value, At at) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (at(middle) <= value) low = middle;
        else high = middle;
    }
    return low;
}

// Location of the gradient of a slot, and the factor that the gradient is multiplied by.
struct SlotAt {
    u64 values;
    float factor;
    u32 unused;
};

// Value model, and the columns of the best candidates.
#include "platform.cuh"

enum ValueOperation {
    NUMBER, INPUT, CONSTANT, NEGATE, LOG, EXP, SQRT, SIGMOID, ABS,
    ADD, SUBTRACT, MULTIPLY, DIVIDE, POWER, MIN, MAX, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, EQUAL, NOT_EQUAL,
    CHOOSE
};

// Kind of a model input: scores of a task, column of the items, or the retrieval score.
enum InputKind { TASK, COLUMN, SIMILARITY };

struct ValueStep {
    u32 operation;
    u32 operand; // bits of a number, or index of an input or constant
};

struct ValueInput {
    u32 kind, task;
    const float* column; // [slots]
};

struct ValueArgs {
    const ValueStep* steps;
    const ValueInput* inputs;
    const float* constants; // [queries, constants]
    const float* logits;    // [queries, stride, logit_stride]; null without a reranker
    const u32* slots;       // [queries, stride]
    const u32* similarity;  // [queries, stride] ordered keys
    const u32* counts;      // [queries]
    float* tasks;           // [queries, stride, tasks] scores
    u32* keys;              // [queries, stride] ordered keys of the values
    u32* bad;               // [queries] number of candidates with a task score that is NaN
    u32 stride, step_count, constant_count, task_count, logit_stride, unused;
};

DEVICE float value_unary(u32 f, float x) {
    switch (f) {
    case NEGATE: return -x;
    case LOG: return logf(x);
    case EXP: return expf(x);
    case SQRT: return sqrtf(x);
    case SIGMOID: return __fdiv_rn(1.0f, 1.0f + expf(-x));
    default: return fabsf(x);
    }
}

DEVICE float value_binary(u32 f, float a, float b) {
    switch (f) {
    case ADD: return __fadd_rn(a, b);
    case SUBTRACT: return __fadd_rn(a, -b);
    case MULTIPLY: return __fmul_rn(a, b);
    case DIVIDE: return __fdiv_rn(a, b);
    case POWER: return powf(a, b);
    case MIN: return fminf(a, b);
    case MAX: return fmaxf(a, b);
    case LESS: return a < b;
    case LESS_EQUAL: return a <= b;
    case GREATER: return a > b;
    case GREATER_EQUAL: return a >= b;
    case EQUAL: return a == b;
    default: return a != b;
    }
}

// Computes task scores and the value of each candidate: grid (parts, queries), one thread per candidate, with its stack in shared
// memory.
KERNEL(128, evaluate, ValueArgs) {
    float* stack = (float*)shared_memory() + threadIdx.x; // [depth, threads]
    u32 query = blockIdx.y, count = a.counts[query];
    const float* constants = a.constants + (u64)query * a.constant_count;
    const float largest = 3.402823466e+38f;
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x) {
        u64 place = (u64)query * a.stride + n;
        float* tasks = a.tasks + place * a.task_count;
        bool is_defined = true;
        for (u32 t = 0; t < a.task_count; t++) {
            tasks[t] = value_unary(SIGMOID, a.logits[place * a.logit_stride + t]);
            if (tasks[t] != tasks[t]) is_defined = false;
        }
        if (!is_defined) {
            atomicAdd(a.bad + query, 1u);
            a.keys[place] = ordered(-largest);
            continue;
        }
        u32 height = 0;
        for (u32 s = 0; s < a.step_count; s++) {
            ValueStep step = a.steps[s];
            float pushed = 0;
            if (step.operation == NUMBER) pushed = __uint_as_float(step.operand);
            else if (step.operation == CONSTANT) pushed = constants[step.operand];
            else if (step.operation == INPUT) {
                ValueInput input = a.inputs[step.operand];
                if (input.kind == TASK) pushed = tasks[input.task];
                else if (input.kind == COLUMN) pushed = input.column[a.slots[place]];
                else pushed = unordered(a.similarity[place]);
            } else {
                u32 below = step.operation == CHOOSE ? 2 : step.operation >= ADD ? 1 : 0;
                height -= below;
                float* top = stack + (height - 1) * blockDim.x;
                if (below == 0) *top = value_unary(step.operation, *top);
                else if (below == 1) *top = value_binary(step.operation, *top, top[blockDim.x]);
                else *top = *top != 0 && *top == *top ? top[blockDim.x] : top[2 * blockDim.x];
                continue;
            }
            stack[height++ * blockDim.x] = pushed;
        }
        float value = stack[0];
        a.keys[place] = ordered(value != value ? -largest : fminf(fmaxf(value, -largest), largest));
    }
}

struct ColumnsArgs {
    const u32* places; // [queries, top_stride] indexes among the candidates, best first
    const u32* counts; // [queries] number of results
    const u32* slots;  // [queries, stride]
    const u32* similarity;
    const float* tasks; // [queries, stride, tasks]
    u32* slots_out;     // [queries, top_stride]
    u32* similarity_out;
    float* tasks_out; // [queries, top_stride, tasks]
    u32 stride, top_stride, task_count, unused;
};

// Gathers the columns of the best candidates: grid (parts, queries).
KERNEL(256, take_columns, ColumnsArgs) {
    u32 query = blockIdx.y;
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < a.counts[query]; n += gridDim.x * blockDim.x) {
        u64 to = (u64)query * a.top_stride + n, from = (u64)query * a.stride + a.places[to];
        a.slots_out[to] = a.slots[from];
        a.similarity_out[to] = a.similarity[from];
        for (u32 t = 0; t < a.task_count; t++) a.tasks_out[to * a.task_count + t] = a.tasks[from * a.task_count + t];
    }
}

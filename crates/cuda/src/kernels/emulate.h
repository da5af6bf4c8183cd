// Runs kernels on a host processor: provides what CUDA provides to a kernel, for g++ on x86-64.
//
// Each thread of a block is a fiber. The threads of a warp, the warps of a block and the blocks of a grid are scheduled in an
// order that a seed determines; threads yield at every shuffle, vote and barrier, and sometimes at an atomic. In some blocks all
// warps are scheduled fairly, in others a warp runs as long as it can while later ones starve. Shared memory is filled with a
// pattern before each block, and allocated per block, so that an address sanitizer detects accesses beyond it. Undefined
// behaviour and deadlocks of a device are errors that name the kernel: a barrier that some threads miss, a warp operation whose
// lanes differ, a shuffle from an inactive lane.
//
// Not detected: memory ordering between blocks, races between two scheduling points (beyond the random order), bank conflicts,
// alignment traps, occupancy, and speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <sys/mman.h>

#ifndef __x86_64__
#error "the emulation switches stacks in the way of x86-64"
#endif

using std::isfinite;

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace emu {

enum class State : uint8_t { Ready, AtWarp, AtBlock, Done };

// Operand of a lane in a warp operation.
struct Slot {
    uint64_t words[6];
};

// Four words of a pending asynchronous copy to shared memory.
struct Coming {
    uint32_t* to;
    const uint32_t* from;
    unsigned turn;
};

struct Fiber {
    std::vector<Coming> coming;
    unsigned turn;
    void* stack;
    dim3 index;
    unsigned lane;
    State state;
    uint32_t mask;
    const char* operation;
    Slot brought;  // operand of this lane in the operation that it waits in
    Slot given;    // operand of this lane in the last operation that all lanes of the operation have reached
    Fiber* warp;
};

// Not a power of two: stacks at such distances would all map to the same cache sets.
constexpr size_t STACK_BYTES = (64 << 10) + 320;
constexpr unsigned THREADS_MAX = 1024;

// Counters of multiply-adds.
enum Operation { DP4A, TENSOR_INT8, TENSOR_BF16, TENSOR_TF32, SINGLE, OPERATIONS };

// Host memory that kernels may read.
struct Host {
    const uint64_t (*runs)[2]; // start and end of each range
    size_t count;
};

// Running block, one per host thread.
struct Machine {
    uint64_t operations[OPERATIONS];
    dim3 block_dim, grid_dim, block;
    std::vector<Fiber> fibers;
    void* scheduler = nullptr;
    Fiber* current = nullptr;
    char* stacks = nullptr;
    void (*body)(const void*) = nullptr;
    const void* arguments = nullptr;
    Host host = {nullptr, 0};
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    uint64_t seed = 1;
    std::string failure;

    ~Machine() {
        if (stacks) munmap(stacks, STACK_BYTES * THREADS_MAX);
    }
    unsigned random(unsigned below) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        return unsigned((seed >> 11) % below);
    }
};

extern thread_local Machine* machine;
extern "C" void emu_switch(void** save, void* load);

inline void rest() { emu_switch(&machine->current->stack, machine->scheduler); }

// Ends the launch with a reason; never returns to the kernel.
[[noreturn]] inline void fail(const std::string& why) {
    Machine& m = *machine;
    if (m.failure.empty()) {
        char where[96];
        std::snprintf(where, sizeof where, " (block %u,%u,%u thread %u)", m.block.x, m.block.y, m.block.z,
                      m.current ? m.current->index.x : 0);
        m.failure = why + where;
    }
    for (;;) rest();
}

inline void meet(uint32_t mask, const char* operation) {
    Fiber* me = machine->current;
    if (!(mask >> me->lane & 1)) fail(std::string(operation) + ": a lane that its mask leaves out");
    me->state = State::AtWarp;
    me->mask = mask;
    me->operation = operation;
    rest();
}

template <class T> inline void bring(const T& value) {
    static_assert(sizeof(T) <= sizeof(Slot), "a slot holds 48 bytes");
    std::memcpy(&machine->current->brought, &value, sizeof(T));
}
// Returns the operand of a lane in the operation that was just completed. The operand stays valid until the next
// operation, which starts only after every lane has run.
template <class T> inline T given(unsigned lane) {
    T value;
    std::memcpy(&value, &machine->current->warp[lane].given, sizeof(T));
    return value;
}

template <class T> inline T shuffle(uint32_t mask, T value, int from, const char* operation) {
    bring(value);
    meet(mask, operation);
    if (from >= 0 && !(mask >> (from & 31) & 1)) fail(std::string(operation) + ": from a lane that takes no part");
    return from < 0 ? value : given<T>(unsigned(from & 31));
}

// Lets another thread run between two atomics, at random.
inline void perhaps_rest() {
    if (machine->random(8) == 0) rest();
}

inline void entry() {
    machine->body(machine->arguments);
    machine->current->state = State::Done;
    for (;;) rest();
}

// Releases each group of lanes of a warp that all wait in the same operation. Returns whether any lane was released.
inline bool release_warp(Fiber* warp, unsigned lanes) {
    Machine& m = *machine;
    uint32_t waiting = 0;
    for (unsigned i = 0; i < lanes; i++)
        if (warp[i].state == State::AtWarp) waiting |= 1u << i;
    bool any = false;
    for (unsigned i = 0; i < lanes; i++) {
        if (warp[i].state != State::AtWarp) continue;
        uint32_t mask = lanes == 32 ? warp[i].mask : warp[i].mask & ((1u << lanes) - 1);
        if (mask & ~waiting) continue;
        for (unsigned j = 0; j < lanes; j++) {
            if (!(mask >> j & 1)) continue;
            bool same = warp[j].operation == warp[i].operation || !std::strcmp(warp[j].operation, warp[i].operation);
            if (warp[j].mask != warp[i].mask || !same) {
                m.failure = std::string(warp[i].operation) + " meets " + warp[j].operation + " in one warp";
                return false;
            }
        }
        for (unsigned j = 0; j < lanes; j++) {
            if (!(mask >> j & 1)) continue;
            warp[j].given = warp[j].brought;
            warp[j].state = State::Ready;
        }
        waiting &= ~mask;
        any = true;
    }
    return any;
}

// Runs every runnable lane of a warp once. Returns whether any lane ran.
inline bool run_warp(Fiber* warp, unsigned lanes) {
    Machine& m = *machine;
    bool moved = false;
    unsigned first = m.random(lanes), backwards = m.random(2);
    for (unsigned n = 0; n < lanes; n++) {
        unsigned lane = (n + first) % lanes;
        Fiber& f = warp[backwards ? lanes - 1 - lane : lane];
        if (f.state != State::Ready) continue;
        m.current = &f;
        emu_switch(&m.scheduler, f.stack);
        moved = true;
        if (!m.failure.empty()) return moved;
    }
    return release_warp(warp, lanes) || moved;
}

inline void run_block() {
    Machine& m = *machine;
    unsigned count = m.block_dim.x, warps = (count + 31) / 32;
    m.fibers.resize(count);
    for (unsigned i = 0; i < count; i++) {
        Fiber& f = m.fibers[i];
        f.index = dim3{i, 0, 0};
        f.lane = i & 31;
        f.state = State::Ready;
        f.coming.clear();
        f.turn = 0;
        f.operation = "";
        f.warp = &m.fibers[i & ~31u];
        void** top = reinterpret_cast<void**>(m.stacks + (size_t(i) + 1) * STACK_BYTES - 64);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&entry);
        for (int saved = 0; saved < 6; saved++) *--top = nullptr;
        f.stack = top;
    }
    std::vector<unsigned> order(warps);
    for (unsigned w = 0; w < warps; w++) order[w] = w;
    for (unsigned w = warps; w > 1; w--) std::swap(order[w - 1], order[m.random(w)]);
    // Whether the first runnable warp runs alone, while later ones wait until it blocks.
    bool starves = m.random(2);
    std::vector<bool> stuck(warps, false);
    for (;;) {
        bool moved = false;
        if (!starves) {
            for (unsigned w = warps; w > 1; w--) std::swap(order[w - 1], order[m.random(w)]);
        } else if (m.random(64) == 0) {
            std::swap(order[0], order[m.random(warps)]);
        }
        for (unsigned w : order) {
            if (stuck[w]) continue;
            bool here = run_warp(&m.fibers[w * 32], count - w * 32 < 32 ? count - w * 32 : 32);
            if (!m.failure.empty()) return;
            stuck[w] = !here;
            moved |= here;
            if (starves && here) break;
        }
        if (moved) continue;
        unsigned at_barrier = 0, done = 0;
        for (Fiber& f : m.fibers) {
            at_barrier += f.state == State::AtBlock;
            done += f.state == State::Done;
        }
        if (done == count) return;
        if (at_barrier != count) {
            m.failure = at_barrier ? "a barrier that not all threads of the block reach"
                                   : "a warp operation that not all of its lanes reach";
            return;
        }
        for (Fiber& f : m.fibers) f.state = State::Ready;
        stuck.assign(warps, false);
    }
}

struct Kernel {
    void (*body)(const void*);
    size_t argument_bytes;
};
inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}
template <class A, void (*K)(const A)> void call(const void* arguments) { K(*static_cast<const A*>(arguments)); }
template <class A, void (*K)(const A)> struct Registered {
    explicit Registered(const char* name) { kernels()[name] = Kernel{&call<A, K>, sizeof(A)}; }
};

} // namespace emu

#define threadIdx (emu::machine->current->index)
#define blockIdx (emu::machine->block)
#define blockDim (emu::machine->block_dim)
#define gridDim (emu::machine->grid_dim)

static inline unsigned char* shared_memory() { return emu::machine->shared; }
static inline void __syncthreads() {
    emu::machine->current->state = emu::State::AtBlock;
    emu::rest();
}
static inline void __syncwarp(unsigned mask = ~0u) { emu::meet(mask, "__syncwarp"); }
static inline void __threadfence() {}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int from) {
    return emu::shuffle(mask, value, from & 31, "__shfl_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int with) {
    return emu::shuffle(mask, value, int(emu::machine->current->lane) ^ with, "__shfl_xor_sync");
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    int lane = int(emu::machine->current->lane);
    return emu::shuffle(mask, value, lane >= int(by) ? lane - int(by) : -1, "__shfl_up_sync");
}
static inline unsigned __ballot_sync(unsigned mask, int vote) {
    emu::bring(vote != 0 ? 1 : 0);
    emu::meet(mask, "__ballot_sync");
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) votes |= unsigned(emu::given<int>(i)) << i;
    return votes;
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
template <class Join> static inline unsigned reduced(unsigned mask, unsigned value, const char* what, Join join) {
    emu::bring(value);
    emu::meet(mask, what);
    unsigned all = value;
    for (unsigned i = 0; i < 32; i++)
        if ((mask >> i & 1) && i != emu::machine->current->lane) all = join(all, emu::given<unsigned>(i));
    return all;
}
static inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return reduced(mask, value, "__reduce_add_sync", [](unsigned a, unsigned b) { return a + b; });
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return reduced(mask, value, "__reduce_min_sync", [](unsigned a, unsigned b) { return a < b ? a : b; });
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return reduced(mask, value, "__reduce_max_sync", [](unsigned a, unsigned b) { return a > b ? a : b; });
}

static inline void bring_four(unsigned* to, const unsigned* from) {
    emu::Fiber& me = *emu::machine->current;
    if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 16) emu::fail("a copy of four words from or to where they do not begin");
    std::memset(to, 0xCD, 16);
    me.coming.push_back({to, from, me.turn});
}
static inline void end_of_bringing() { emu::machine->current->turn++; }
template <int LATER> static inline void brought() {
    emu::Fiber& me = *emu::machine->current;
    size_t kept = 0;
    for (const emu::Coming& c : me.coming) {
        if (c.turn + LATER >= me.turn) {
            me.coming[kept++] = c;
            continue;
        }
        std::memcpy(c.to, c.from, 16);
    }
    me.coming.resize(kept);
}

template <class T> static inline T from_host(const T* p) {
    const emu::Host& host = emu::machine->host;
    uint64_t at = reinterpret_cast<uint64_t>(p);
    for (size_t n = 0; n < host.count; n++)
        if (host.runs[n][0] <= at && at + sizeof(T) <= host.runs[n][1]) return *p;
    emu::fail("a read of memory of the host that is not registered");
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline float __uint_as_float(unsigned x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned x;
    std::memcpy(&x, &f, 4);
    return x;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline float __double2float_rn(double a) { return float(a); }
static inline float __fmaf_rn(float a, float b, float c) {
    emu::machine->operations[emu::SINGLE]++;
    return std::fmaf(a, b, c);
}
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }

template <class T> static inline T atomicAdd(T* p, T value) {
    emu::perhaps_rest();
    T old = *p;
    *p = old + value;
    return old;
}
template <class T> static inline T atomicMax(T* p, T value) {
    emu::perhaps_rest();
    T old = *p;
    if (old < value) *p = value;
    return old;
}
template <class T> static inline T atomicMin(T* p, T value) {
    emu::perhaps_rest();
    T old = *p;
    if (value < old) *p = value;
    return old;
}
template <class T> static inline T atomicOr(T* p, T value) {
    emu::perhaps_rest();
    T old = *p;
    *p = old | value;
    return old;
}

// Reads a value that other blocks may be changing.
template <class T> static inline T fresh(const T* p) {
    emu::perhaps_rest();
    return *p;
}

// Adds the products of four unsigned and four signed bytes to a sum.
static inline int sum4(unsigned codes, unsigned query, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int(codes >> i & 0xff) * int(int8_t(query >> i & 0xff));
    return sum;
}
static inline int dot4(unsigned codes, unsigned query, int sum) {
    emu::machine->operations[emu::DP4A] += 4;
    return sum4(codes, query, sum);
}

// Fragment of a lane in a matrix product, in the layout of the PTX manual: rows of the left and columns of the right matrix.
struct Fragment {
    unsigned a[4], b[2];
};

// Matrix product of a warp with 16 by 8 results, four per lane. `add` accumulates a result of the upper or lower half from the
// fragments of the four lanes of its row and the four of its column.
template <class T, class Add>
static inline void mma(const char* name, T (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], Add add) {
    Fragment mine;
    std::memcpy(mine.a, a, sizeof mine.a);
    std::memcpy(mine.b, b, sizeof mine.b);
    emu::bring(mine);
    emu::meet(~0u, name);
    unsigned group = emu::machine->current->lane >> 2, within = emu::machine->current->lane & 3;
    for (unsigned i = 0; i < 4; i++) {
        Fragment row[4], column[4];
        for (unsigned k = 0; k < 4; k++) {
            row[k] = emu::given<Fragment>(group * 4 + k);
            column[k] = emu::given<Fragment>((within * 2 + (i & 1)) * 4 + k);
        }
        c[i] = add(c[i], row, column, i >> 1);
    }
}

// mma.m16n8k32 of unsigned by signed bytes.
static inline void mma_u8_s8(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    // Multiply-adds per lane: 16 * 8 * 32 / 32.
    emu::machine->operations[emu::TENSOR_INT8] += 128;
    mma("mma.m16n8k32", c, a, b, [](int sum, const Fragment* row, const Fragment* column, unsigned lower) {
        for (unsigned k = 0; k < 4; k++) {
            sum = sum4(row[k].a[lower], column[k].b[0], sum);
            sum = sum4(row[k].a[2 + lower], column[k].b[1], sum);
        }
        return sum;
    });
}

// mma.m16n8k16 of bf16 by bf16. A GPU sums in a different order.
static inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emu::machine->operations[emu::TENSOR_BF16] += 64;
    mma("mma.m16n8k16", c, a, b, [](float sum, const Fragment* row, const Fragment* column, unsigned lower) {
        for (unsigned k = 0; k < 16; k++) {
            unsigned lane = k % 8 / 2, shift = 16 * (k % 2);
            unsigned x = row[lane].a[k / 8 * 2 + lower] >> shift, y = column[lane].b[k / 8] >> shift;
            sum += __uint_as_float(x << 16) * __uint_as_float(y << 16);
        }
        return sum;
    });
}

// mma.m16n8k8 of TF32 by TF32: ignores the bits of a number beyond the first eleven, and truncates sums, as GPUs do.
static inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emu::machine->operations[emu::TENSOR_TF32] += 32;
    mma("mma.m16n8k8", c, a, b, [](float sum, const Fragment* row, const Fragment* column, unsigned lower) {
        double whole = sum;
        for (unsigned k = 0; k < 8; k++) {
            unsigned x = row[k % 4].a[k / 4 * 2 + lower] & 0xffffe000u, y = column[k % 4].b[k / 4] & 0xffffe000u;
            whole += double(__uint_as_float(x)) * double(__uint_as_float(y));
        }
        float rounded = float(whole);
        return std::fabs(rounded) > std::fabs(whole) && std::isfinite(rounded) ? std::nextafter(rounded, 0.0f) : rounded;
    });
}

// Converts IEEE half precision to single.
static inline float half_to_float(unsigned short h) {
    unsigned sign = unsigned(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        float small = float(mantissa) * 5.9604644775390625e-8f;
        return __uint_as_float(sign | __float_as_uint(small));
    }
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

#define KERNEL_OF_THREE(threads, name, Arguments) KERNEL(threads, name, Arguments)
#define KERNEL(threads, name, Arguments)                                                                               \
    static void name(const Arguments a);                                                                               \
    static emu::Registered<Arguments, &name> registered_##name(#name);                                                 \
    static void name(const Arguments a)

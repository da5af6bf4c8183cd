// All kernels as a shared library for a host processor: `g++ -std=c++17 -O1 -fPIC -shared emulated.cpp`.
#define STERLING_EMULATED
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#include "dense.cuh"
#include "digits.cuh"
#include "learn.cuh"
#include "scan.cuh"

namespace emu {
thread_local Machine* machine = nullptr;
static thread_local std::string failure;
} // namespace emu

// Saves the callee-saved registers on the stack, and switches to another stack.
__asm__(".text\n"
        ".globl emu_switch\n"
        ".type emu_switch,@function\n"
        "emu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\n"
        "movq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
        "ret\n");

namespace scan {
#include "scan.cu"
}
namespace top {
#include "topk.cu"
}
namespace merging {
#include "merge.cu"
}
namespace ahead {
#include "ahead.cu"
}
namespace bags {
#include "pool.cu"
}
namespace words {
#include "filter.cu"
}
namespace wide {
#include "rows.cu"
}
namespace steps {
#include "dense.cu"
}
namespace products {
#include "products.cu"
}
namespace worth {
#include "value.cu"
}
namespace learning {
#include "sort.cu"
#include "learn.cu"
}

// Runs a kernel over a grid, and counts its multiply-adds by kind. Returns null, or the reason of a failure.
extern "C" const char* emu_launch(const char* name, const unsigned* grid, unsigned threads, size_t shared_bytes,
                                  const void* arguments, size_t argument_bytes, emu::Host host,
                                  unsigned long long seed, unsigned long long* operations) {
    auto fails = [&](const std::string& why) {
        emu::failure = std::string("kernel `") + name + "`: " + why;
        return emu::failure.c_str();
    };
    auto found = emu::kernels().find(name);
    if (found == emu::kernels().end()) return fails("there is none of this name");
    if (found->second.argument_bytes != argument_bytes) {
        return fails("its arguments take " + std::to_string(found->second.argument_bytes) + " bytes, got " +
                     std::to_string(argument_bytes));
    }
    // The caller has checked the launch against the limits of a device.
    uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    static thread_local emu::Machine machine;
    if (!machine.stacks) {
        void* memory = mmap(nullptr, emu::STACK_BYTES * emu::THREADS_MAX, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return fails("no memory for stacks");
        machine.stacks = static_cast<char*>(memory);
    }
    emu::machine = &machine;
    machine.block_dim = dim3{threads, 1, 1};
    machine.grid_dim = dim3{grid[0], grid[1], grid[2]};
    machine.body = found->second.body;
    machine.arguments = arguments;
    machine.host = host;
    machine.shared_bytes = shared_bytes;
    machine.seed = seed * 0x9E3779B97F4A7C15ull | 1;
    machine.failure.clear();
    std::memset(machine.operations, 0, sizeof machine.operations);
    // Varies the order of blocks: every `step`-th, from a start that the seed determines.
    uint64_t step = blocks > 2 ? 1 + 2 * machine.random(unsigned(blocks < 4096 ? blocks / 2 : 2048)) : 1;
    while (true) {
        uint64_t a = step, b = blocks;
        while (b) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) break;
        step++;
    }
    uint64_t at = machine.random(unsigned(blocks < 1u << 30 ? blocks : 1u << 30));
    for (uint64_t n = 0; n < blocks && machine.failure.empty(); n++, at = (at + step) % blocks) {
        machine.block = dim3{unsigned(at % grid[0]), unsigned(at / grid[0] % grid[1]), unsigned(at / grid[0] / grid[1])};
        // Allocates exactly this size, so that a sanitizer detects accesses beyond it.
        void* shared = nullptr;
        if (posix_memalign(&shared, 16, shared_bytes ? shared_bytes : 1)) return fails("no memory for its blocks");
        machine.shared = static_cast<unsigned char*>(shared);
        std::memset(machine.shared, 0xCD, shared_bytes);
        emu::run_block();
        free(machine.shared);
        machine.shared = nullptr;
    }
    for (unsigned kind = 0; kind < emu::OPERATIONS; kind++) operations[kind] += machine.operations[kind];
    if (machine.failure.empty()) return nullptr;
    // Threads that a failure stopped leave the sanitizer's marks of their variables on stacks that are reused.
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(machine.stacks, emu::STACK_BYTES * emu::THREADS_MAX);
#endif
    return fails(machine.failure);
}

// Allocates exactly this size, so that a sanitizer detects accesses beyond it.
extern "C" void* emu_alloc(size_t bytes) {
    void* memory = malloc(bytes ? bytes : 1);
    // Not zeros: a kernel that reads uninitialised memory must fail.
    if (memory) std::memset(memory, 0xCD, bytes);
    return memory;
}
// Freed memory is overwritten with an implausible pattern: a kernel that still reads it must fail.
extern "C" void emu_poison(void* memory, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(memory, bytes);
#else
    std::memset(memory, 0xDD, bytes);
#endif
}
extern "C" void emu_free(void* memory, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
    (void)bytes;
    free(memory);
}

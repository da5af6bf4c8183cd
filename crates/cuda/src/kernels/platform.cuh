// Definitions shared by all kernels, and the only place where the device and its emulation differ.
//
// Every kernel takes one structure by value, of addresses and 32-bit numbers, with a counterpart in `crates/cuda/src/ops`. All
// shared memory is dynamic: its size is part of a launch.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef STERLING_EMULATED
#include "emulate.h"
#else
extern __shared__ __align__(16) u8 dynamic_shared[];
static __device__ __forceinline__ u8* shared_memory() { return dynamic_shared; }

// Reads a value that other blocks may be changing.
template <class T> static __device__ __forceinline__ T fresh(const T* p) { return *(const volatile T*)p; }

// Reads a number in registered host memory, which is transferred over the PCIe link and not cached for other reads.
template <class T> static __device__ __forceinline__ T from_host(const T* p) { return __ldcs(p); }

// Adds the products of four unsigned and four signed bytes to a sum.
static __device__ __forceinline__ i32 dot4(u32 codes, u32 query, i32 sum) {
    i32 result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(codes), "r"(query), "r"(sum));
    return result;
}

// mma.m16n8k32 of unsigned by signed bytes.
static __device__ __forceinline__ void mma_u8_s8(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.m16n8k16 of bf16 by bf16, accumulated in single precision.
static __device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.m16n8k8 of TF32 by TF32, which ignores the last 13 bits of each word, accumulated in single precision.
static __device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies four words to shared memory asynchronously.
static __device__ __forceinline__ void bring_four(u32* to, const u32* from) {
    u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}

// Groups the asynchronous copies of the thread since the last call.
static __device__ __forceinline__ void end_of_bringing() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for the asynchronous copies of the thread, except those of the last LATER groups.
template <int LATER> static __device__ __forceinline__ void brought() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Converts IEEE half precision to single.
static __device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// Two blocks of up to 256 threads fit on a multiprocessor: while one waits for memory the other computes.
#define KERNEL(threads, name, Arguments) \
    extern "C" __global__ void __launch_bounds__(threads, (threads) > 256 ? 1 : 2) name(const __grid_constant__ Arguments a)
// Three blocks fit for kernels that mostly wait for memory, if the compiler can use few enough registers.
#if __CUDA_ARCH__ >= 900
#define OF_THREE 3
#else
#define OF_THREE 2
#endif
#define KERNEL_OF_THREE(threads, name, Arguments) \
    extern "C" __global__ void __launch_bounds__(threads, OF_THREE) name(const __grid_constant__ Arguments a)
#endif

#define DEVICE static __device__ __forceinline__
#define EVERY_LANE 0xffffffffu

DEVICE u32 lane_of() { return threadIdx.x & 31; }
DEVICE u32 warp_of() { return threadIdx.x >> 5; }
DEVICE u32 warps_of() { return blockDim.x >> 5; }
DEVICE u32 lanes_before() { return (1u << lane_of()) - 1; }

DEVICE float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

// Returns the nearest bf16, ties to even; NaN stays NaN.
DEVICE u32 float_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Inclusive prefix sum over the lanes of a warp. Called by the complete warp.
DEVICE u32 lanes_upto(u32 value) {
    for (u32 step = 1; step < 32; step <<= 1) {
        u32 before = __shfl_up_sync(EVERY_LANE, value, step);
        if (lane_of() >= step) value += before;
    }
    return value;
}

// Returns whether a block is the last of several to arrive; the last block sees the writes of all others. Called by the
// complete block; `flag` is a number in the block's shared memory.
DEVICE bool is_last_of(u32 blocks, u32* arrived, u32* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *flag = atomicAdd(arrived, 1u) == blocks - 1;
    __syncthreads();
    __threadfence();
    return *flag;
}

// Encodes a score as bits with the same order (an ordered key); both zeros are equal.
DEVICE u32 ordered(float score) {
    u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float unordered(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// Clamps to the nearest finite number.
DEVICE float finite(float x) { return fminf(fmaxf(x, __uint_as_float(0xff7fffffu)), __uint_as_float(0x7f7fffffu)); }

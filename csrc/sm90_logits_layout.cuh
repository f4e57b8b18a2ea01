// sm90_paged_mqa_logits: sizes, the map of shared memory, and a launch's arguments.
#pragma once

#include "sm90_ptx.cuh"

#ifndef JITTER
#define JITTER 0
#endif

constexpr int HEAD_DIM = 128;
constexpr int TILE = 64;
constexpr int PAGES_PER_TILE = TILE / BLOCK_SIZE;
// N = rows * HEADS is at most 256, so eight rows of 64 heads are shared by both warpgroups.
constexpr int GROUP_ROWS = HEADS == 64 ? 4 : 8;
constexpr int THREADS = 384;
// Enough in flight to fill the memory's pipe; more only made it less even. A multiple of four, so that a
// warpgroup that takes every other pair of slots takes the same ones all through a pass, and sees each phase
// of them.
constexpr int RING = 8;

constexpr int KEY_BYTES = TILE * HEAD_DIM;
constexpr int STAGE_BYTES = 9216;  // keys and scales, rounded up to the swizzle atom of 1024
constexpr int QUERY_BYTES = HEADS * HEAD_DIM, WEIGHT_BYTES = HEADS * 4;
// The lanes of a quad read the same head of four rows: 16 bytes more from row to row keep them off each
// other's banks.
constexpr int WEIGHT_PITCH = WEIGHT_BYTES + 16;
constexpr int Q_HALF = GROUP_ROWS * QUERY_BYTES, WEIGHTS_HALF = GROUP_ROWS * WEIGHT_PITCH;

constexpr int Q_OFFSET = 0;
constexpr int RING_OFFSET = Q_OFFSET + 2 * Q_HALF;
constexpr int WEIGHTS_OFFSET = RING_OFFSET + RING * STAGE_BYTES;
constexpr int BARRIERS_OFFSET = WEIGHTS_OFFSET + 2 * WEIGHTS_HALF;
// Full and empty of each slot, then of each half of the queries.
constexpr int NUM_BARRIERS = 2 * RING + 4;
constexpr int WARP_COSTS_OFFSET = BARRIERS_OFFSET + NUM_BARRIERS * 8;
constexpr int SHARE_OFFSET = WARP_COSTS_OFFSET + THREADS / 32 * 4;
constexpr int COSTS_OFFSET = SHARE_OFFSET + 4 * 4;
constexpr int FIRST_ROWS_OFFSET = COSTS_OFFSET + MAX_REQUESTS * 4;
constexpr int TILES_OFFSET = FIRST_ROWS_OFFSET + (MAX_REQUESTS + 1) * 4;
constexpr int SHARED_BYTES = TILES_OFFSET + MAX_REQUESTS * 4;
static_assert(SHARED_BYTES <= 227 * 1024, "a CTA has 227 KiB");

constexpr int PASS_DONE = 1;  // named barrier of the scoring warpgroups; 0 is __syncthreads

#if OUT_BF16
using Logit = uint16_t;
__device__ __forceinline__ Logit to_logit(float value) {
    Logit rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
}
constexpr uint32_t MINUS_INFINITY_WORD = 0xff80ff80u;
#else
using Logit = float;
__device__ __forceinline__ Logit to_logit(float value) { return value; }
constexpr uint32_t MINUS_INFINITY_WORD = 0xff800000u;
#endif

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ void jitter() {
#if JITTER
    uint32_t mixed = (clock() ^ (threadIdx.x / 32 * 0x9e3779b9u)) * 0x85ebca6bu;
    if (mixed >> 28 < 3) __nanosleep(mixed >> 16 & 0xfff);
#endif
}

struct Launch {
    const CUtensorMap* kv_map;
    const CUtensorMap* q_map_4;  // queries in groups of four rows, and so on
    const CUtensorMap* q_map_2;
    const CUtensorMap* q_map_1;
    const uint8_t* cache;
    int64_t page_stride;
    const float* weights;
    const int* context_lens;
    const int* query_start_loc;
    const int* block_table;
    int64_t table_stride;
    Logit* out;
    int64_t out_stride;
    int table_width, width, fill_to, num_reqs, num_rows;
    bool early_kv;
};

struct Shared {
    uint32_t base;
    __device__ __forceinline__ uint32_t stage(uint32_t slot) const {
        return base + RING_OFFSET + slot * STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t full(uint32_t slot) const {
        return base + BARRIERS_OFFSET + slot * 8;
    }
    __device__ __forceinline__ uint32_t empty(uint32_t slot) const { return full(slot) + RING * 8; }
    __device__ __forceinline__ uint32_t q_full(int half) const {
        return base + BARRIERS_OFFSET + (2 * RING + half) * 8;
    }
    __device__ __forceinline__ uint32_t q_empty(int half) const { return q_full(half) + 16; }
    __device__ __forceinline__ uint32_t q(int half) const { return base + Q_OFFSET + half * Q_HALF; }
    __device__ __forceinline__ uint32_t weights(int half) const {
        return base + WEIGHTS_OFFSET + half * WEIGHTS_HALF;
    }
};

// topk: the k-th largest of a CTA's keys, and those above it in order.
#pragma once

#include "topk_row.cuh"

// Chosen is what is above `key`, and of what equals it the first `ties`.
struct Threshold {
    uint32_t key;
    int ties;

    __device__ __forceinline__ uint32_t lowest() const { return ties > 0 ? key : key + 1; }
};

// Which digit holds the rest-th largest, counted down from the highest; by one warp.
__device__ __forceinline__ void find_digit(Shared& shared, int rest) {
    constexpr int DIGITS = 256 / 32;
    int counts[DIGITS], sum = 0;
#pragma unroll
    for (int i = 0; i < DIGITS; ++i) {
        counts[i] = shared.histogram[255 - DIGITS * lane_index() - i];
        sum += counts[i];
    }
    int up_to = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, up_to, distance);
        if (lane_index() >= distance) up_to += other;
    }
    int before = up_to - sum;
    if (before < rest && rest <= up_to) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < DIGITS; ++i) {
            if (!found && rest <= before + counts[i]) {
                found = true;
                shared.digit = 255 - DIGITS * lane_index() - i;
                shared.rest = rest - before;
                shared.digit_count = counts[i];
            }
            if (!found) before += counts[i];
        }
    }
}

// Threshold of the k largest of more than k keys, by digits of eight bits. `keys` calls what it is given with
// every key of this thread, 0 for none.
template <class Keys>
__device__ __forceinline__ Threshold find_threshold(Shared& shared, Keys keys, int k) {
    uint32_t prefix = 0;
    int rest = k;
    for (int shift = 24;; shift -= 8) {
        const uint32_t above_digit = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
        if (threadIdx.x < 256) shared.histogram[threadIdx.x] = 0;
        __syncthreads();
        keys([&](uint32_t key) {
            if (((key ^ prefix) & above_digit) == 0) atomicAdd(&shared.histogram[key >> shift & 255], 1);
        });
        __syncthreads();
        if (warp_index() == 0) find_digit(shared, rest);
        __syncthreads();
        prefix |= uint32_t(shared.digit) << shift;
        rest = shared.rest;
        if (shift == 0) return {prefix, rest};
        // All with this prefix are chosen: what the further digits are does not matter.
        if (rest == shared.digit_count && prefix > 0) return {prefix - 1, 0};
    }
}

// Calls `chosen(slot, position)` for each chosen key, slots ascending with the keys' order. `ordered` calls
// what it is given with a key and its position, whole warps at a time, in order within and over the warps.
template <class Ordered, class Chosen>
__device__ __forceinline__ void take(Shared& shared, Ordered ordered, Threshold threshold, Chosen chosen) {
    int above = 0, equal = 0;
    ordered([&](uint32_t key, int) {
        above += __popc(__ballot_sync(0xffffffffu, key > threshold.key));
        equal += __popc(__ballot_sync(0xffffffffu, key == threshold.key));
    });
    if (lane_index() == 0) {
        shared.above[warp_index()] = above;
        shared.equal[warp_index()] = equal;
    }
    __syncthreads();
    above = equal = 0;
    for (int warp = 0; warp < warp_index(); ++warp) {
        above += shared.above[warp];
        equal += shared.equal[warp];
    }
    const uint32_t before_me = (1u << lane_index()) - 1;
    ordered([&](uint32_t key, int position) {
        const uint32_t larger = __ballot_sync(0xffffffffu, key > threshold.key);
        const uint32_t same = __ballot_sync(0xffffffffu, key == threshold.key);
        const int equal_before = equal + __popc(same & before_me);
        if (key > threshold.key || (key == threshold.key && equal_before < threshold.ties)) {
            chosen(above + __popc(larger & before_me) + min(equal_before, threshold.ties), position);
        }
        above += __popc(larger);
        equal += __popc(same);
    });
}

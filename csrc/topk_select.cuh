// topk: the k-th largest of a CTA's keys, and those above it in order.
#pragma once

#include "topk_keys.cuh"

// Keys that are no less and no more than any of those that may be the threshold.
struct Range {
    uint32_t low, high;
};

// Chosen is what is above `key`, and of what equals it the first `ties`.
struct Threshold {
    uint32_t key;
    int ties;
    int chosen;

    __device__ __forceinline__ uint32_t lowest() const { return ties > 0 ? key : key + 1; }
};

// Of the k-th largest: all keys, or those of what is not negative where these are k, since the keys of
// numbers on both sides of zero are far apart.
__device__ __forceinline__ Range find_range(Shared& shared, const Keys& keys, int k) {
    constexpr uint32_t KEY_OF_ZERO = 0x80000000u;
    uint32_t low = 0xffffffffu, high = 0, count = 0;
    keys.each([&](uint32_t key, int) {
        low = min(low, key - 1);  // 0, which is no key, becomes the largest
        high = max(high, key);
        count += key >> 31;
    });
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    count = __reduce_add_sync(0xffffffffu, count);
    if (lane_index() == 0) {
        shared.smallest[warp_index()] = low;
        shared.largest[warp_index()] = high;
        shared.counts[warp_index()] = count;
    }
    if (threadIdx.x < 256) shared.histogram[0][threadIdx.x] = 0;
    __syncthreads();
    const int warp = lane_index() % WARPS;
    low = __reduce_min_sync(0xffffffffu, shared.smallest[warp]) + 1;
    high = __reduce_max_sync(0xffffffffu, shared.largest[warp]);
    count = __reduce_add_sync(0xffffffffu, shared.counts[warp]) / (32 / WARPS);
    return {count >= k ? max(low, KEY_OF_ZERO) : low, high};
}

// Which of 256 counts holds the rest-th from the end; by one warp.
__device__ __forceinline__ void find_digit(Shared& shared, const int* histogram, int rest) {
    constexpr int DIGITS = 256 / 32;
    const int first = 256 - DIGITS * (lane_index() + 1);
    int counts[DIGITS], sum = 0;
#pragma unroll
    for (int i = 0; i < DIGITS; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(histogram + first + i);
        counts[i] = four.x, counts[i + 1] = four.y, counts[i + 2] = four.z, counts[i + 3] = four.w;
        sum += four.x + four.y + four.z + four.w;
    }
    const int up_to = ptx::sum_up_to_lane(sum);
    int before = up_to - sum;
    if (before < rest && rest <= up_to) {
#pragma unroll
        for (int i = DIGITS - 1; i >= 0; --i) {
            if (before < rest && rest <= before + counts[i]) {
                shared.digit = first + i;
                shared.rest = rest - before;
                shared.digit_count = counts[i];
            }
            before += counts[i];
        }
    }
}

// Threshold of the k largest of at least k keys, by 256ths of their range, of one of these, and so on; or of
// some more than k, up to `most`, if that is found sooner. The first histogram is zero.
template <class AnyKeys>
__device__ __forceinline__ Threshold find_threshold(Shared& shared, const AnyKeys& keys, Range range, int k,
                                                    int most) {
    int rest = k;
    int shift = max(0, 24 - __clz(range.high - range.low));
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
        int* const histogram = shared.histogram[turn];
        keys.each([&](uint32_t key, int) {
            if (range.low <= key && key <= range.high) atomicAdd(histogram + ((key - range.low) >> shift), 1);
        });
        __syncthreads();
        if (warp_index() == 0) find_digit(shared, histogram, rest);
        if (threadIdx.x / 256 == 1) shared.histogram[turn ^ 1][threadIdx.x - 256] = 0;
        __syncthreads();
        range.low += uint32_t(shared.digit) << shift;
        range.high = range.low + min(range.high - range.low, (1u << shift) - 1);
        rest = shared.rest;
        const int chosen = k - rest + shared.digit_count;
        if (chosen <= most) return {range.low - 1, 0, chosen};
        if (shift == 0) return {range.low, rest, k};
        shift = max(0, shift - 8);
    }
}

// Calls `chosen(slot, i)` for each chosen key, slots ascending in the keys' order.
template <class AnyKeys, class Chosen>
__device__ __forceinline__ void take(Shared& shared, const AnyKeys& keys, Threshold threshold,
                                     Chosen chosen) {
    // Counts of those above, at most MAX_CHOSEN_GROUPS, and of those that equal, in one word.
    constexpr uint32_t EQUAL = 1u << 12;
    uint32_t own = 0;
    keys.each([&](uint32_t key, int) {
        own += key > threshold.key ? 1u : 0u;
        own += key == threshold.key && threshold.ties > 0 ? EQUAL : 0u;
    });
    const uint32_t up_to = ptx::sum_up_to_lane(own);
    if (lane_index() == 31) shared.counts[warp_index()] = up_to;
    __syncthreads();
    const uint32_t of_warp = lane_index() < warp_index() ? shared.counts[lane_index() % WARPS] : 0u;
    const uint32_t before = __reduce_add_sync(0xffffffffu, of_warp) + up_to - own;
    int above = before % EQUAL, equal = before / EQUAL;
    keys.each([&](uint32_t key, int i) {
        const bool is_above = key > threshold.key;
        const bool is_equal = key == threshold.key && threshold.ties > 0;
        if (is_above || (is_equal && equal < threshold.ties)) {
            chosen(above + min(equal, threshold.ties), i);
        }
        above += is_above;
        equal += is_equal;
    });
}

// topk: the keys that are chosen among, first those of all groups, then those of the chosen groups' logits.
// `each(visit)` calls `visit(key, i)` for the keys of this thread, 0 for none; i ascends within and over
// threads, or within and over the lanes of a warp, whose keys are then all before those of the next.
#pragma once

#include "topk_row.cuh"

constexpr int KEYS_PER_THREAD = MAX_GROUPS / THREADS;
static_assert(KEPT == 32 * KEYS_PER_THREAD, "what a warp keeps fits its registers");

// In registers: a run of `per_thread` keys for each thread.
class Keys {
   public:
    __device__ __forceinline__ Keys(const uint32_t* padded_keys, int count, int thread, int per_thread)
        : per_thread_(per_thread), first_(thread * per_thread) {
#pragma unroll
        for (int i = 0; i < KEYS_PER_THREAD; ++i) {
            keys_[i] = i < per_thread && first_ + i < count ? padded_keys[padded(first_ + i)] : 0u;
        }
    }

    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (int i = 0; i < KEYS_PER_THREAD; ++i) {
            if (i >= per_thread_) break;
            visit(keys_[i], first_ + i);
        }
    }

   private:
    int per_thread_, first_;
    uint32_t keys_[KEYS_PER_THREAD];
};

__device__ __forceinline__ Keys keys_of_groups(const Shared& shared, int count) {
    return {shared.keys, count, int(threadIdx.x), (count + THREADS - 1) / THREADS};
}

// The logits of the chosen groups, a run of groups for each warp: logit i of the run, in order.
class ChosenLogits {
   public:
    __device__ __forceinline__ ChosenLogits(const Row& row, const Shared& shared, int num_groups)
        : row_(row), shared_(shared), begin_(num_groups * warp_index() / WARPS) {
        count_ = (num_groups * (warp_index() + 1) / WARPS - begin_) << row.group_shift;
    }

    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ int position(int i) const {
        const int group = shared_.groups[begin_ + (i >> row_.group_shift)];
        return (group << row_.group_shift) + (i & ((1 << row_.group_shift) - 1));
    }

    // Read anew each time: for rows with too many to keep.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const int per_lane = (count_ + 31) / 32, first = lane_index() * per_lane;
#pragma unroll 1
        for (int i = first; i < min(first + per_lane, count_); ++i) {
            const int at = position(i);
            visit(row_.has(at) ? sortable(row_.value(at)) : 0u, i);
        }
    }

   private:
    const Row& row_;
    const Shared& shared_;
    int begin_, count_;
};

// Keeps each warp's keys of at least `lowest` in order, as far as there is room, and returns how many there
// are.
__device__ __forceinline__ int keep_reaching(const Row& row, Shared& shared, const ChosenLogits& logits,
                                             uint32_t lowest) {
    constexpr int LOADS = 8;
    uint32_t* const keys = shared.kept_keys[warp_index()];
    int* const positions = shared.kept_positions[warp_index()];
    const Floor floor(lowest);
    const uint32_t before_me = (1u << lane_index()) - 1;
    int kept = 0;
#pragma unroll 1
    for (int first = 0; first < logits.count(); first += 32 * LOADS) {
        int at[LOADS];
        float values[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            at[i] = logits.position(min(first + i * 32 + lane_index(), logits.count() - 1));
#pragma unroll
        for (int i = 0; i < LOADS; ++i) values[i] = row.value(max(row.lead, min(at[i], row.end() - 1)));
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const bool reaches = floor.is_reached(values[i]) && row.has(at[i]) &&
                                 first + i * 32 + lane_index() < logits.count();
            const uint32_t lanes = __ballot_sync(0xffffffffu, reaches);
            const int place = kept + __popc(lanes & before_me);
            if (reaches && place < KEPT) {
                keys[padded(place)] = sortable(values[i]);
                positions[place] = at[i];
            }
            kept += __popc(lanes);
        }
    }
    return kept;
}

// topk: the keys that are chosen among, first those of all groups, then those of the chosen groups' logits.
// `each(visit)` calls `visit(key, i)` for the keys of this thread, 0 for none; i ascends within and over
// threads, or within and over the lanes of a warp, whose keys are then all before those of the next.
#pragma once

#include "topk_row.cuh"

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

// Keeps each warp's keys of at least a floor, in order.
class Keeper {
   public:
    __device__ __forceinline__ Keeper(const Row& row, Shared& shared, const ChosenLogits& logits,
                                      uint32_t lowest)
        : row_(row), shared_(shared), logits_(logits), floor_(lowest) {}

    // How many there are; those past KEPT are not kept.
    __device__ __forceinline__ int keep() {
        // Each group of one quad holds one.
        const bool are_found = row_.quads_shift() > 0;
        const int quads = are_found ? find_quads() : logits_.count() >> QUAD_SHIFT;
        if (quads > KEPT) return quads;
        __syncwarp();
#pragma unroll 1
        for (int first = 0; first < quads; first += 32 * LOADS) {
            int at[LOADS];
            Quad loaded[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int number = min(first + i * 32 + lane_index(), quads - 1);
                at[i] = are_found ? shared_.quads_of_warp()[number] : logits_.position(number << QUAD_SHIFT);
                loaded[i] = load(at[i]);
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                if (first + i * 32 >= quads) break;
                keep_quad(loaded[i], at[i], first + i * 32 + lane_index() < quads);
            }
        }
        return kept_;
    }

   private:
    static constexpr int LOADS = 4;

    __device__ __forceinline__ Quad load(int position) const {
        return row_.quad(min(position >> QUAD_SHIFT, row_.last_quad()));
    }

    // Where the quads begin that may hold one, most of them do not, into the warp's list; returns how many.
    __device__ __forceinline__ int find_quads() {
        int* const found = shared_.quads_of_warp();
        const uint32_t before_me = (1u << lane_index()) - 1;
        const int quads = logits_.count() >> QUAD_SHIFT;
        int hits = 0;
#pragma unroll 1
        for (int first = 0; first < quads; first += 32 * LOADS) {
            int at[LOADS];
            Quad loaded[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                at[i] = logits_.position(min(first + i * 32 + lane_index(), quads - 1) << QUAD_SHIFT);
                loaded[i] = load(at[i]);
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const Logit* const x = loaded[i].x;
                const float largest =
                    fmaxf(fmaxf(to_float(x[0]), to_float(x[1])), fmaxf(to_float(x[2]), to_float(x[3])));
                const bool is_hit = floor_.is_reached(largest) && first + i * 32 + lane_index() < quads;
                const uint32_t lanes = __ballot_sync(0xffffffffu, is_hit);
                const int place = hits + __popc(lanes & before_me);
                if (is_hit && place < KEPT) found[place] = at[i];
                hits += __popc(lanes);
            }
        }
        return hits;
    }

    // A quad of each lane's.
    __device__ __forceinline__ void keep_quad(const Quad& quad, int at, bool is_one) {
        uint32_t reaching = 0;
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            reaching |= uint32_t(floor_.is_reached(to_float(quad.x[i])) && row_.has(at + i)) << i;
        }
        if (!is_one) reaching = 0;
        // How many of the lanes before have, by the bits of their counts of up to four.
        const uint32_t before_me = (1u << lane_index()) - 1, own = __popc(reaching);
        int place = kept_;
#pragma unroll
        for (int bit = 0; bit < 3; ++bit) {
            const uint32_t lanes = __ballot_sync(0xffffffffu, own >> bit & 1);
            place += __popc(lanes & before_me) << bit;
            kept_ += __popc(lanes) << bit;
        }
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            const int at_place = place + __popc(reaching & ((1u << i) - 1));
            if ((reaching >> i & 1) && at_place < KEPT) {
                shared_.kept_keys[warp_index()][padded(at_place)] = sortable(to_float(quad.x[i]));
                shared_.kept_positions[warp_index()][at_place] = at + i;
            }
        }
    }

    const Row& row_;
    Shared& shared_;
    const ChosenLogits& logits_;
    Floor floor_;
    int kept_ = 0;
};

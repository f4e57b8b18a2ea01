// topk: the keys that are chosen among, first those of all groups, then those of the chosen groups' logits.
// `each(visit)` calls `visit(key, position)` for the keys of this thread; positions ascend within and over
// threads.
#pragma once

#include "topk_row.cuh"

// A key for each group, in registers.
class GroupKeys {
   public:
    __device__ __forceinline__ GroupKeys(const Shared& shared, int count)
        : per_thread_((count + THREADS - 1) / THREADS), first_(threadIdx.x * per_thread_) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int group = first_ + i;
            keys_[i] = i < per_thread_ && group < count ? shared.keys[padded(group)] : 0u;
        }
    }

    // Key 0 past the last group.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) visit(keys_[i], first_ + i);
    }

   private:
    static constexpr int PER_THREAD = MAX_GROUPS / THREADS;

    int per_thread_, first_;
    uint32_t keys_[PER_THREAD];
};

// The logits of the chosen groups whose keys are at least `lowest`. Each warp keeps those of its groups, and
// where one has too many, all logits of all groups are read anew each time.
class Candidates {
   public:
    __device__ __forceinline__ Candidates(const Row& row, Shared& shared, int num_groups, uint32_t lowest)
        : row_(row),
          shared_(shared),
          begin_(num_groups * warp_index() / WARPS),
          end_(num_groups * (warp_index() + 1) / WARPS) {
        gather(lowest);
        is_kept_ = !__syncthreads_or(count_ > KEPT);
        if (!is_kept_) count_ = (end_ - begin_) << row.group_shift;
    }

    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        // An odd distance from lane to lane keeps them off each other's banks.
        const int per_lane = (count_ + 31) / 32 | 1, first = lane_index() * per_lane;
#pragma unroll 1
        for (int i = first; i < min(first + per_lane, count_); ++i) {
            if (is_kept_) {
                visit(shared_.kept_keys[warp_index()][i], shared_.kept_positions[warp_index()][i]);
            } else {
                const int group = shared_.groups[begin_ + (i >> row_.group_shift)];
                const int position = (group << row_.group_shift) + (i & ((1 << row_.group_shift) - 1));
                visit(row_.has(position) ? sortable(row_.value(position)) : 0u, position);
            }
        }
    }

   private:
    __device__ __forceinline__ void gather(uint32_t lowest) {
        constexpr int LOADS = 4;
        const int shift = row_.quads_shift(), quads = (end_ - begin_) << shift;
        const Floor floor(lowest);
#pragma unroll 1
        for (int first = 0; first < quads; first += 32 * LOADS) {
            Quad loaded[LOADS];
            int numbers[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int quad = min(first + i * 32 + lane_index(), quads - 1);
                numbers[i] =
                    (shared_.groups[begin_ + (quad >> shift)] << shift) + (quad & ((1 << shift) - 1));
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) loaded[i] = row_.quad(min(numbers[i], row_.last_quad()));
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                uint32_t reaching = 0;
#pragma unroll
                for (int j = 0; j < QUAD; ++j) reaching |= floor.is_reached(to_float(loaded[i].x[j])) << j;
                if (numbers[i] == 0 || numbers[i] >= row_.last_quad()) reaching &= row_.window(numbers[i]);
                if (first + i * 32 + lane_index() >= quads) reaching = 0;
                keep(loaded[i], numbers[i], reaching);
            }
        }
    }

    // What `reaching` has a bit for, of a quad for each lane.
    __device__ __forceinline__ void keep(const Quad& quad, int number, uint32_t reaching) {
        const int own = __popc(reaching);
        const uint32_t before_me = (1u << lane_index()) - 1;
        int place = count_;
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            const uint32_t lanes = __ballot_sync(0xffffffffu, own > i);
            if (lanes == 0) break;
            place += __popc(lanes & before_me);
            count_ += __popc(lanes);
        }
        if (reaching == 0) return;
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            if ((reaching >> i & 1) == 0) continue;
            if (place < KEPT) {
                shared_.kept_keys[warp_index()][place] = sortable(to_float(quad.x[i]));
                shared_.kept_positions[warp_index()][place] = number * QUAD + i;
            }
            ++place;
        }
    }

    const Row& row_;
    Shared& shared_;
    int begin_, end_, count_ = 0;
    bool is_kept_;
};

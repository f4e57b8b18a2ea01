// sm90_paged_mqa_logits: the scoring warpgroups.
#pragma once

#include "sm90_logits_schedule.cuh"
#include "sm90_wgmma.cuh"

// A thread's place in a tile of scores: its lane in a quad, and the first of its two tokens, eight apart.
__device__ __forceinline__ int quad_lane() { return threadIdx.x & 3; }
__device__ __forceinline__ int tile_token() { return (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7); }

__device__ __forceinline__ float load_scale(uint32_t stage, int token) {
    const int offset = token * 4;
    // Row 65 of the box has its 16-byte chunks swapped in pairs by the swizzle, row 64 has them in place.
    return ptx::load_shared(stage + KEY_BYTES + (PAGES_PER_TILE > 1 ? offset : offset ^ (token >> 5 << 4)));
}

// Four, two or one rows whose heads are dealt to the lanes of a quad: lane l has heads [part * n, (part + 1)
// * n) of row l / LANES, where part = l % LANES and n = HEADS / LANES (the order in which feed_queries lays
// them down).
//
// A row is summed in four quarters of its heads, (0 + 1) + (2 + 3), whether one lane holds them all or four
// lanes one each: a logit's bits do not depend on the depth.
template <int ROWS>
class RowGroup {
   public:
    static constexpr int SCORES = ROWS * HEADS / 2;  // of a thread: two tokens' scores of its heads

    __device__ __forceinline__ void open(const Launch& launch, uint32_t weights, int first_row) {
        const int row = quad_lane() / LANES, part = quad_lane() % LANES;
#pragma unroll
        for (int i = 0; i < LANE_HEADS; i += 4) {
            ptx::load_shared_4(weights + row * WEIGHT_PITCH + (part * LANE_HEADS + i) * 4, weights_ + i);
        }
#pragma unroll
        for (int i = 0; i < LANE_HEADS; ++i) weights_[i] *= doubles(i) ? 0.5f : 1.f;
        // Which of the two tokens' sums the lane is left with; four rows leave it with both.
        second_token_ = ROWS < 4 && quad_lane() & 1;
        const int first_token = tile_token() + 8 * second_token_;
        const bool stores = ROWS > 1 || quad_lane() < 2;
        length_ = launch.context_lens[first_row + row] - first_token;
        room_ = stores ? launch.width - first_token : 0;
        out_ = launch.out + static_cast<int64_t>(first_row + row) * launch.out_stride + first_token;
    }

    __device__ __forceinline__ void store(const float* scores, const float (&scales)[2],
                                          int tile_start) const {
        float sums[2];
        sum_heads(scores, sums);
        Logit* const out = out_ + tile_start;
        if constexpr (ROWS == 4) {
            put(out, tile_start, sums[0] * scales[0]);
            put(out + 8, tile_start + 8, sums[1] * scales[1]);
        } else {
            float sum =
                (second_token_ ? sums[1] : sums[0]) + ptx::shuffle_xor(second_token_ ? sums[0] : sums[1], 1);
            if constexpr (ROWS == 1) sum += ptx::shuffle_xor(sum, 2);
            put(out, tile_start, sum * (second_token_ ? scales[1] : scales[0]));
        }
    }

   private:
    static constexpr int LANES = 4 / ROWS, LANE_HEADS = HEADS / LANES, QUARTER = HEADS / 4;

    // While the tensor cores run, maxima (one pipe) wait for register ports and sums (another) take theirs:
    // of three heads one is rectified as x + |x|, which doubles it, against half its weight. The products are
    // the same, bit for bit.
    static __device__ __forceinline__ constexpr bool doubles(int head) { return head % 3 == 0; }
    static __device__ __forceinline__ float rectified(float score, int head) {
        return doubles(head) ? score + fabsf(score) : fmaxf(score, 0.f);
    }

    __device__ __forceinline__ void sum_heads(const float* scores, float (&sums)[2]) const {
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            float quarters[ROWS];
#pragma unroll
            for (int quarter = 0; quarter < ROWS; ++quarter) {
                float sum = 0.f;
#pragma unroll
                for (int i = quarter * QUARTER; i < (quarter + 1) * QUARTER; ++i) {
                    sum = fmaf(rectified(scores[i / 2 * 4 + token * 2 + i % 2], i), weights_[i], sum);
                }
                quarters[quarter] = sum;
            }
            sums[token] = quarters[0];
            if constexpr (ROWS >= 2) sums[token] += quarters[1];
            if constexpr (ROWS == 4) sums[token] += quarters[2] + quarters[3];
        }
    }

    __device__ __forceinline__ void put(Logit* out, int token, float logit) const {
        ptx::store_if(token < room_, out, to_logit(token < length_ ? logit : minus_infinity()));
    }

    float weights_[LANE_HEADS];
    Logit* out_;
    int length_, room_;
    bool second_token_;
};

template <>
class RowGroup<0> {
   public:
    static constexpr int SCORES = 0;
    __device__ __forceinline__ void open(const Launch&, uint32_t, int) {}
    __device__ __forceinline__ void store(const float*, const float (&)[2], int) const {}
};

// The rows of one warpgroup in a pass: their queries, their groups, and the tiles of the ring that it scores
// them against.
template <int ROWS>
class Scorer {
   public:
    static constexpr int N = ROWS * HEADS;

    __device__ __forceinline__ Scorer(const Launch& launch, const Shared& shared, const Pass& pass, int group,
                                      int half, uint32_t index)
        : shared_(shared),
          queries_(ptx::swizzled_rows_descriptor(shared.q(half))),
          index_(index),
          tile_begin_(pass.tile_begin),
          arrivals_(pass.splits_rows() ? 1 : 2) {
        const int row = pass.row + pass.group_row(group);
        const uint32_t weights = shared.weights(half);
#pragma unroll
        for (int i = 0; i < FOURS; ++i) fours_[i].open(launch, weights + 4 * i * WEIGHT_PITCH, row + 4 * i);
        pair_.open(launch, weights + 4 * FOURS * WEIGHT_PITCH, row + 4 * FOURS);
        one_.open(launch, weights + (ROWS - ONE) * WEIGHT_PITCH, row + ROWS - ONE);
    }

    // Scores COUNT tiles of the pass, whose products are under way together.
    template <int COUNT>
    __device__ __forceinline__ void score(int tile) const {
        float scores[COUNT][N / 2], scales[COUNT][2];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            jitter();
            ptx::mbarrier_wait(shared_.full(slot(tile + i)), (index_ + tile + i) / RING & 1);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const uint64_t keys = ptx::swizzled_rows_descriptor(shared_.stage(slot(tile + i)));
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 32; ++k) {
                // 32 bytes of K further is two units of the descriptor's address.
                wgmma_fp8<N>(scores[i], keys + 2 * k, queries_ + 2 * k, k);
            }
        }
        ptx::wgmma_commit();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            scales[i][0] = load_scale(shared_.stage(slot(tile + i)), tile_token());
            scales[i][1] = load_scale(shared_.stage(slot(tile + i)), tile_token() + 8);
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int j = 0; j < N / 2; ++j)
                asm volatile("" : "+f"(scores[i][j])::"memory");  // not read above the wait
            if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(shared_.empty(slot(tile + i)), arrivals_);
        }
        jitter();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) store(scores[i], scales[i], (tile_begin_ + tile + i) * TILE);
    }

   private:
    static constexpr int FOURS = ROWS / 4, PAIR = ROWS % 4 / 2 * 2, ONE = ROWS % 2;

    __device__ __forceinline__ uint32_t slot(int tile) const { return (index_ + tile) % RING; }

    __device__ __forceinline__ void store(const float* scores, const float (&scales)[2],
                                          int tile_start) const {
#pragma unroll
        for (int i = 0; i < FOURS; ++i) fours_[i].store(scores + i * RowGroup<4>::SCORES, scales, tile_start);
        pair_.store(scores + FOURS * RowGroup<4>::SCORES, scales, tile_start);
        one_.store(scores + FOURS * RowGroup<4>::SCORES + RowGroup<PAIR>::SCORES, scales, tile_start);
    }

    const Shared& shared_;
    uint64_t queries_;
    uint32_t index_;
    int tile_begin_, arrivals_;
    RowGroup<4> fours_[FOURS ? FOURS : 1];
    RowGroup<PAIR> pair_;
    RowGroup<ONE> one_;
};

// One warpgroup's part of a pass. Few rows take two tiles at a turn, which halves what a turn costs besides,
// unless there are so few tiles that the other warpgroup would have none, or it has the pass's other rows.
template <int ROWS>
__device__ __forceinline__ void score(const Launch& launch, const Shared& shared, const Pass& pass, int group,
                                      int half, uint32_t index) {
    constexpr bool TAKES_PAIRS = Scorer<ROWS>::N <= 128;
    constexpr int FEW_TILES = 6;
    constexpr int UNROLLED = TAKES_PAIRS ? 1 : 2;  // spares a turn what does not change from tile to tile
    const Scorer<ROWS> scorer(launch, shared, pass, group, half, index);
    const int tiles = pass.tile_end - pass.tile_begin;
    if (TAKES_PAIRS && !pass.splits_rows() && tiles >= FEW_TILES) {
        int tile = 2 * group;
        for (; tile + 1 < tiles; tile += 4) scorer.template score<2>(tile);
        if (tile < tiles) scorer.template score<1>(tile);
    } else {
        const int stride = pass.splits_rows() ? 1 : 2;
#pragma unroll UNROLLED
        for (int tile = pass.splits_rows() ? 0 : group; tile < tiles; tile += stride)
            scorer.template score<1>(tile);
    }
}

template <int ROWS>
__device__ __forceinline__ void score_rows(const Launch& launch, const Shared& shared, const Pass& pass,
                                           int group, int half, uint32_t index) {
    if (pass.group_rows(group) == ROWS) {
        score<ROWS>(launch, shared, pass, group, half, index);
    } else if constexpr (ROWS < GROUP_ROWS) {
        score_rows<ROWS + 1>(launch, shared, pass, group, half, index);
    }
}

__device__ __forceinline__ void score_passes(const Launch& launch, const Schedule& schedule,
                                             const Shared& shared, int group) {
    uint32_t index = 0, phases = 0;
    int next_half = 0;
    Passes passes(schedule);
    Pass pass;
    while (passes.next(pass)) {
        pass = {0, ptx::uniform(pass.row), ptx::uniform(pass.num_rows), ptx::uniform(pass.tile_begin),
                ptx::uniform(pass.tile_end)};
        const bool splits = pass.splits_rows();
        const int half = splits ? group : next_half;
        ptx::mbarrier_wait(shared.q_full(half), phases >> half & 1);
        score_rows<1>(launch, shared, pass, group, half, index);
        // Neither runs ahead into a pass whose slots the other has yet to see filled: their phases would
        // alias.
        ptx::consumers_sync(PASS_DONE);
        if (group == 0 && threadIdx.x % 128 == 0) {
            ptx::mbarrier_arrive(shared.q_empty(half), 1);
            if (splits) ptx::mbarrier_arrive(shared.q_empty(1), 1);
        }
        phases ^= splits ? 3 : 1 << half;
        if (!splits) next_half ^= 1;
        index += pass.tile_end - pass.tile_begin;
    }
}

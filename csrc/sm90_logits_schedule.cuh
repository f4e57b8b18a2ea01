// sm90_paged_mqa_logits: which tiles of which requests a CTA takes.
#pragma once

#include "sm90_logits_layout.cuh"

// Brings what the schedule and the first tiles wait for into L2 while barriers are made and row starts are
// read: cold, each is another trip to memory.
__device__ __forceinline__ void prefetch(const Launch& launch) {
    if (threadIdx.x == 0) {
        ptx::prefetch_map(launch.kv_map);
        ptx::prefetch_map(launch.q_map_4);
        ptx::prefetch_map(launch.q_map_2);
        ptx::prefetch_map(launch.q_map_1);
    }
    constexpr int LINE = 128 / sizeof(int);
    const int thread = blockIdx.x * THREADS + threadIdx.x;
    if (thread * LINE < launch.num_rows) ptx::prefetch_line(launch.context_lens + thread * LINE);
    const int64_t table_ints = (launch.num_reqs - 1) * launch.table_stride + launch.table_width;
    if (thread * LINE < table_ints) ptx::prefetch_line(launch.block_table + thread * LINE);
}

__device__ __forceinline__ int longest_row(const Launch& launch, int first_row, int end_row) {
    int longest = 0;
    for (int row = first_row; row < end_row; ++row) longest = max(longest, launch.context_lens[row]);
    return min(longest, launch.width);
}

// The batch's work as one line of cost units; a tile belongs to the CTA whose share holds the tile's first
// unit. The launcher sees to it that the line is shorter than 2^32.
struct Schedule {
    uint8_t* shared;  // the CTA's memory; what is read once a pass does not hold registers while it is scored
    int num_reqs;
    uint64_t pass_costs;  // byte r - 1: a tile for r rows

    // Cost of the requests before one, and its first row: one longer than the batch.
    __device__ __forceinline__ uint32_t& cost_before(int request) const {
        return words(COSTS_OFFSET)[request];
    }
    __device__ __forceinline__ uint32_t& first_row(int request) const {
        return words(FIRST_ROWS_OFFSET)[request];
    }
    __device__ __forceinline__ uint32_t& tiles(int request) const { return words(TILES_OFFSET)[request]; }
    // This CTA's share of the line, and the request that it begins in.
    __device__ __forceinline__ uint32_t& begin() const { return words(SHARE_OFFSET)[0]; }
    __device__ __forceinline__ uint32_t& end() const { return words(SHARE_OFFSET)[1]; }
    __device__ __forceinline__ uint32_t& first_request() const { return words(SHARE_OFFSET)[2]; }

    __device__ __forceinline__ int num_rows(int request) const {
        return first_row(request + 1) - first_row(request);
    }

    __device__ __forceinline__ uint32_t pass_cost(int rows) const {
        return pass_costs >> (8 * (rows - 1)) & 0xff;
    }

    __device__ __forceinline__ uint32_t tile_cost(int rows) const {
        const int rest = rows % PASS_ROWS;
        return rows / PASS_ROWS * pass_cost(PASS_ROWS) + (rest ? pass_cost(rest) : 0);
    }

    // First tile of a request at or past a point of the line.
    __device__ __forceinline__ int tile_at(int request, uint32_t point) const {
        const uint32_t before = cost_before(request);
        if (point <= before) return 0;
        if (point >= cost_before(request + 1)) return tiles(request);
        const uint32_t cost = tile_cost(num_rows(request));
        return (point - before + cost - 1) / cost;
    }

   private:
    __device__ __forceinline__ uint32_t* words(int offset) const {
        return reinterpret_cast<uint32_t*>(shared + offset);
    }
};

__device__ __forceinline__ uint32_t sum_up_to_lane(uint32_t value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, value, distance);
        if ((threadIdx.x & 31) >= distance) value += other;
    }
    return value;
}

__device__ __forceinline__ Schedule make_schedule(const Launch& launch, uint8_t* shared,
                                                  uint64_t pass_costs) {
    auto* warp_costs = reinterpret_cast<uint32_t*>(shared + WARP_COSTS_OFFSET);
    const Schedule schedule{shared, launch.num_reqs, pass_costs};
    const int thread = threadIdx.x, warp = thread / 32;
    uint32_t total = 0;
    for (int base = 0; base < launch.num_reqs; base += THREADS) {
        const int request = base + thread;
        uint32_t cost = 0;
        if (request < launch.num_reqs) {
            const int row = launch.query_start_loc[request], end_row = launch.query_start_loc[request + 1];
            const int tiles = (longest_row(launch, row, end_row) + TILE - 1) / TILE;
            cost = tiles * schedule.tile_cost(end_row - row);
            schedule.tiles(request) = tiles;
            schedule.first_row(request) = row;
            schedule.first_row(request + 1) = end_row;  // what the next request's thread writes too
        }
        cost = sum_up_to_lane(cost);
        if (thread % 32 == 31) warp_costs[warp] = cost;
        __syncthreads();
        uint32_t before = total;
#pragma unroll
        for (int other = 0; other < THREADS / 32; ++other) {
            const uint32_t other_cost = warp_costs[other];
            if (other < warp) before += other_cost;
            total += other_cost;
        }
        if (request < launch.num_reqs) schedule.cost_before(request + 1) = before + cost;
        if (request == 0) schedule.cost_before(0) = 0;
        __syncthreads();
    }
    const uint32_t share = total / gridDim.x, longer_shares = total % gridDim.x;
    const uint32_t begin = blockIdx.x * share + min(blockIdx.x, longer_shares);
    if (thread == 0) {
        schedule.begin() = begin;
        schedule.end() = begin + share + (blockIdx.x < longer_shares);
        if (begin == total) schedule.first_request() = launch.num_reqs;
    }
    for (int request = thread; request < launch.num_reqs; request += THREADS) {
        if (schedule.cost_before(request) <= begin && begin < schedule.cost_before(request + 1)) {
            schedule.first_request() = request;
        }
    }
    __syncthreads();
    return schedule;
}

// Tiles [tile_begin, tile_end) of a request for rows [row, row + num_rows) of it, at most PASS_ROWS.
struct Pass {
    int request, row, num_rows, tile_begin, tile_end;

    // Both warpgroups take every tile, each for half of the rows; otherwise they take turns at whole tiles.
    __device__ __forceinline__ bool splits_rows() const { return num_rows > GROUP_ROWS; }
    __device__ __forceinline__ int group_row(int group) const {
        return splits_rows() && group ? (num_rows + 1) / 2 : 0;
    }
    __device__ __forceinline__ int group_rows(int group) const {
        return !splits_rows() ? num_rows : group ? num_rows / 2 : (num_rows + 1) / 2;
    }
};

// The CTA's passes, in the one order in which every role goes through them. Holds little, and works the rest
// out again: its registers are alive while a pass is scored.
class Passes {
   public:
    __device__ __forceinline__ explicit Passes(const Schedule& schedule)
        : schedule_(schedule), request_(schedule.first_request()) {}

    __device__ __forceinline__ bool next(Pass& pass) {
        for (;; ++request_, rows_done_ = 0) {
            if (request_ >= schedule_.num_reqs || schedule_.cost_before(request_) >= schedule_.end())
                return false;
            const int rows_left = schedule_.num_rows(request_) - rows_done_;
            const int tile_begin = schedule_.tile_at(request_, schedule_.begin());
            const int tile_end = schedule_.tile_at(request_, schedule_.end());
            if (rows_left <= 0 || tile_begin >= tile_end) continue;
            const int row = schedule_.first_row(request_) + rows_done_;
            pass = {request_, row, min(PASS_ROWS, rows_left), tile_begin, tile_end};
            rows_done_ += PASS_ROWS;
            return true;
        }
    }

   private:
    const Schedule& schedule_;
    int request_, rows_done_ = 0;
};

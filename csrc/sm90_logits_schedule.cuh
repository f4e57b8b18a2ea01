// sm90_paged_mqa_logits: which tiles of which requests a CTA takes.
#pragma once

#include "sm90_logits_layout.cuh"

// Brings what the schedule and the first tiles wait for into L2 while barriers are made and row starts are
// read: cold, each is another trip to memory.
__device__ __forceinline__ void prefetch(const Launch& launch) {
    // A warp each: the next instruction of one that asks for a map waits.
    if (threadIdx.x == 0) ptx::prefetch_map(launch.kv_map);
    if (threadIdx.x == 32) ptx::prefetch_map(launch.q_map_4);
    if (threadIdx.x == 64) ptx::prefetch_map(launch.q_map_2);
    if (threadIdx.x == 96) ptx::prefetch_map(launch.q_map_1);
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
    uint64_t pass_costs;  // byte r - 1: a tile for r rows

    // First row of a request: one longer than the batch.
    __device__ __forceinline__ uint32_t& first_row(int request) const {
        return words(FIRST_ROWS_OFFSET)[request];
    }
    __device__ __forceinline__ uint32_t& tiles(int request) const { return words(TILES_OFFSET)[request]; }
    __device__ __forceinline__ uint32_t& cost_before(int request) const {
        return words(COSTS_OFFSET)[request];
    }
    // The CTA's share: from a tile of one request up to a tile of another. Without any, the last request is
    // before the first.
    __device__ __forceinline__ int& first_request() const { return share()[0]; }
    __device__ __forceinline__ int& first_tile() const { return share()[1]; }
    __device__ __forceinline__ int& last_request() const { return share()[2]; }
    __device__ __forceinline__ int& end_tile() const { return share()[3]; }

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

    // Finds the ends of the CTA's share [begin, end) among the requests whose costs this thread has summed:
    // divisions are slow, so a thread makes one for all the roles.
    __device__ __forceinline__ void find_share(int num_reqs, uint32_t begin, uint32_t end) const {
        for (int request = threadIdx.x; request < num_reqs; request += THREADS) {
            const uint32_t before = cost_before(request), cost = tile_cost(num_rows(request));
            const uint32_t after = before + tiles(request) * cost;
            if (before <= begin && begin < min(after, end)) {
                first_request() = request;
                first_tile() = (begin - before + cost - 1) / cost;
            }
            if (max(before, begin) < end && end <= after) {
                last_request() = request;
                end_tile() = (end - before + cost - 1) / cost;
            }
        }
    }

   private:
    __device__ __forceinline__ uint32_t* words(int offset) const {
        return reinterpret_cast<uint32_t*>(shared + offset);
    }
    __device__ __forceinline__ int* share() const { return reinterpret_cast<int*>(shared + SHARE_OFFSET); }
};

__device__ __forceinline__ Schedule make_schedule(const Launch& launch, uint8_t* shared,
                                                  uint64_t pass_costs) {
    auto* warp_costs = reinterpret_cast<uint32_t*>(shared + WARP_COSTS_OFFSET);
    const Schedule schedule{shared, pass_costs};
    const int thread = threadIdx.x, warp = thread / 32;
    // In 2^-32 of the line; here, where it is hidden behind the first loads.
    const uint32_t share = 0xffffffffu / gridDim.x;
    if (thread == 0) {
        schedule.first_request() = 1;
        schedule.last_request() = 0;
    }
    uint32_t total = 0;
    for (int base = 0; base < launch.num_reqs; base += THREADS) {
        const int request = base + thread;
        uint32_t own_cost = 0;
        if (request < launch.num_reqs) {
            const int row = launch.query_start_loc[request], end_row = launch.query_start_loc[request + 1];
            const int tiles = (longest_row(launch, row, end_row) + TILE - 1) / TILE;
            own_cost = tiles * schedule.tile_cost(end_row - row);
            schedule.tiles(request) = tiles;
            schedule.first_row(request) = row;
            schedule.first_row(request + 1) = end_row;  // what the next request's thread writes too
        }
        const uint32_t cost = ptx::sum_up_to_lane(own_cost);
        if (base > 0) __syncthreads();  // all have read the sums of the requests before
        if (thread % 32 == 31) warp_costs[warp] = cost;
        __syncthreads();
        uint32_t before = total + cost - own_cost;
#pragma unroll
        for (int other = 0; other < THREADS / 32; ++other) {
            const uint32_t other_cost = warp_costs[other];
            if (other < warp) before += other_cost;
            total += other_cost;
        }
        if (request < launch.num_reqs) schedule.cost_before(request) = before;
    }
    schedule.find_share(launch.num_reqs, __umulhi(total, blockIdx.x * share),
                        blockIdx.x + 1 == gridDim.x ? total : __umulhi(total, (blockIdx.x + 1) * share));
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
        for (; request_ <= schedule_.last_request(); ++request_, rows_done_ = 0) {
            const int rows_left = schedule_.num_rows(request_) - rows_done_;
            const int tile_begin = request_ == schedule_.first_request() ? schedule_.first_tile() : 0;
            const int tile_end =
                request_ == schedule_.last_request() ? schedule_.end_tile() : schedule_.tiles(request_);
            if (rows_left <= 0 || tile_begin >= tile_end) continue;
            const int row = schedule_.first_row(request_) + rows_done_;
            pass = {request_, row, min(PASS_ROWS, rows_left), tile_begin, tile_end};
            rows_done_ += PASS_ROWS;
            return true;
        }
        return false;
    }

   private:
    const Schedule& schedule_;
    int request_, rows_done_ = 0;
};

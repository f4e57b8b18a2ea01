// sm90_paged_mqa_logits: the feeding warps. Keys, queries and weights into shared memory, -inf past the
// tiles.
#pragma once

#include "sm90_logits_schedule.cuh"

// Page ids of a pass, asked for in ascending order: 32 in a register of the warp and the next 32 on their
// way.
class PageIds {
   public:
    __device__ __forceinline__ PageIds(const int* row, int first_page, int end_page)
        : row_(row),
          chunk_(first_page),
          end_page_(end_page),
          ids_(load(first_page)),
          ahead_(load(first_page + 32)) {}

    __device__ __forceinline__ int at(int page) {
        if (page >= chunk_ + 32) {
            chunk_ += 32;
            ids_ = ahead_;
            ahead_ = load(chunk_ + 32);
        }
        return __shfl_sync(0xffffffffu, ids_, page - chunk_);
    }

   private:
    __device__ __forceinline__ int load(int page) const {
        const int mine = page + (threadIdx.x & 31);
        return mine < end_page_ ? __ldg(row_ + mine) : 0;
    }

    const int* row_;
    int chunk_, end_page_, ids_, ahead_;
};

// Keys land swizzled for wgmma. A page of 64 brings its scales as rows 64 and 65 of the same box; pages of 32
// bring them by copies of their own, since the second page's keys belong where the first one's scales would
// land.
__device__ __forceinline__ void load_tile(const Launch& launch, const Shared& shared, uint32_t slot,
                                          const int* page_ids, int num_pages, uint64_t policy) {
    constexpr int PAGE_KEY_BYTES = BLOCK_SIZE * HEAD_DIM, PAGE_SCALE_BYTES = BLOCK_SIZE * 4;
    ptx::mbarrier_expect_bytes(shared.full(slot), num_pages * (PAGE_KEY_BYTES + PAGE_SCALE_BYTES));
#pragma unroll
    for (int i = 0; i < PAGES_PER_TILE; ++i) {
        if (i >= num_pages) break;
        const uint32_t keys = shared.stage(slot) + i * PAGE_KEY_BYTES;
        ptx::load_box_3d(keys, launch.kv_map, 0, 0, page_ids[i], shared.full(slot), policy);
        if constexpr (PAGES_PER_TILE > 1) {
            const uint8_t* scales = launch.cache + page_ids[i] * launch.page_stride + PAGE_KEY_BYTES;
            ptx::load_bytes(shared.stage(slot) + KEY_BYTES + i * PAGE_SCALE_BYTES, scales, PAGE_SCALE_BYTES,
                            shared.full(slot));
        }
    }
}

__device__ __forceinline__ int num_pages(const Launch& launch, const Schedule& schedule, const Pass& pass) {
    if constexpr (PAGES_PER_TILE == 1) return pass.tile_end;
    const int longest =
        longest_row(launch, schedule.first_row(pass.request), schedule.first_row(pass.request + 1));
    return (longest + BLOCK_SIZE - 1) / BLOCK_SIZE;
}

// Two warps take turns at the tiles: for few rows a tile's wait and copy take one of them longer than its
// scores.
__device__ __forceinline__ void feed_keys(const Launch& launch, const Schedule& schedule,
                                          const Shared& shared, uint32_t turn) {
    const bool leads = (threadIdx.x & 31) == 0;
    const uint64_t policy = ptx::evict_first_policy();
    uint32_t pass_index = 0;
    Passes passes(schedule);
    Pass pass;
    while (passes.next(pass)) {
        // The predecessor of an early launch may have written the rows' own tokens, the last of the request.
        const int new_tiles = (schedule.num_rows(pass.request) + TILE - 1) / TILE;
        const int old_tiles = schedule.tiles(pass.request) - 1 - new_tiles;
        const int pages = num_pages(launch, schedule, pass);
        PageIds ids(launch.block_table + pass.request * launch.table_stride, pass.tile_begin * PAGES_PER_TILE,
                    pages);
        for (int tile = pass.tile_begin + (pass_index + turn) % 2; tile < pass.tile_end; tile += 2) {
            const uint32_t index = pass_index + tile - pass.tile_begin, slot = index % RING;
            const int first_page = tile * PAGES_PER_TILE;
            int page_ids[PAGES_PER_TILE];
#pragma unroll
            for (int i = 0; i < PAGES_PER_TILE; ++i) page_ids[i] = ids.at(first_page + i);
            jitter();
            if (leads) {
                if (tile >= old_tiles) ptx::wait_for_predecessor();
                ptx::mbarrier_wait(shared.empty(slot), (index / RING & 1) ^ 1);
                load_tile(launch, shared, slot, page_ids, min(PAGES_PER_TILE, pages - first_page), policy);
            }
            __syncwarp();
        }
        pass_index += pass.tile_end - pass.tile_begin;
    }
    // A dependent that starts early may rely on what was before this launch, so that must be over first.
    ptx::wait_for_predecessor();
    ptx::launch_dependents();
}

// Lays down a warpgroup's queries in groups of four, two and one rows. The boxes' dimensions permute the
// heads, so that row 8 j + 2 l + e of a group is head 2 j + e of what lane l of a quad sums.
__device__ __forceinline__ void load_queries(const Launch& launch, uint32_t q, int row, int rows,
                                             uint32_t barrier) {
    for (const int end = row + rows; row < end;) {
        const int left = end - row, group = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (group == 4) {
            ptx::load_box_4d(q, launch.q_map_4, 0, 0, row, 0, barrier);
        } else {
            ptx::load_box_5d(q, group == 2 ? launch.q_map_2 : launch.q_map_1, 0, 0, 0, row, 0, barrier);
        }
        q += group * QUERY_BYTES;
        row += group;
    }
}

// Two halves: a pass that fits one is loaded while the last pass still works on the other.
__device__ __forceinline__ void feed_queries(const Launch& launch, const Schedule& schedule,
                                             const Shared& shared) {
    ptx::wait_for_predecessor();
    uint32_t phases = 3;
    int next_half = 0;
    Passes passes(schedule);
    Pass pass;
    while (passes.next(pass)) {
        const int parts = pass.splits_rows() ? 2 : 1;
        for (int part = 0; part < parts; ++part) {
            const int half = parts == 2 ? part : next_half;
            const int row = pass.row + pass.group_row(part), rows = pass.group_rows(part);
            jitter();
            ptx::mbarrier_wait(shared.q_empty(half), phases >> half & 1);
            phases ^= 1 << half;
            ptx::mbarrier_expect_bytes(shared.q_full(half), rows * (QUERY_BYTES + WEIGHT_BYTES));
            load_queries(launch, shared.q(half), row, rows, shared.q_full(half));
#pragma unroll 1  // cold code costs more than a branch
            for (int i = 0; i < rows; ++i) {
                ptx::load_bytes(shared.weights(half) + i * WEIGHT_PITCH,
                                launch.weights + static_cast<int64_t>(row + i) * HEADS, WEIGHT_BYTES,
                                shared.q_full(half));
            }
        }
        if (parts == 1) next_half ^= 1;
    }
}

__device__ __forceinline__ void fill_span(Logit* first, int count) {
    constexpr int PER_VECTOR = 16 / sizeof(Logit);
    const Logit fill = to_logit(minus_infinity());
    int done = 0;
    if (reinterpret_cast<uint64_t>(first) % 16 == 0) {
        constexpr uint32_t WORD = MINUS_INFINITY_WORD;
        auto* vectors = reinterpret_cast<uint4*>(first);
        for (int i = threadIdx.x & 31; i < count / PER_VECTOR; i += 32)
            vectors[i] = make_uint4(WORD, WORD, WORD, WORD);
        done = count / PER_VECTOR * PER_VECTOR;
    }
    for (int i = done + (threadIdx.x & 31); i < count; i += 32) first[i] = fill;
}

// -inf from each request's last tile to fill_to, dealt over the CTAs in spans, so that a batch of one is
// shared too.
__device__ __forceinline__ void fill_past_tiles(const Launch& launch, const Schedule& schedule) {
    constexpr int SPAN = 4096;
    ptx::wait_for_predecessor();
    const int spans = (launch.fill_to + SPAN - 1) / SPAN;
    for (int unit = blockIdx.x; unit < launch.num_reqs * spans; unit += gridDim.x) {
        const int request = unit / spans, span = unit % spans * SPAN;
        const int begin = max(static_cast<int>(schedule.tiles(request)) * TILE, span),
                  end = min(launch.fill_to, span + SPAN);
        for (int row = schedule.first_row(request); row < schedule.first_row(request + 1); ++row) {
            fill_span(launch.out + row * launch.out_stride + begin, end - begin);
        }
    }
}

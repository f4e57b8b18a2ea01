// Indexer logits of decode on Hopper: every depth and every mix of depths, each page of K read once for eight
// rows.
//
//   out[row, t] = k_scale[t] * sum_h relu(q[row, h] . k[t]) * weights[row, h]     for t < context_lens[row]
//
// One CTA an SM. Warpgroup 0 feeds: warps 0 and 1 the ring of K tiles, warp 2 queries and weights, and warp 3
// writes the -inf past the last tile. Warpgroups 1 and 2 score: A is a tile of 64 tokens, B the rows' heads,
// so that the sum over heads stays inside a quad of lanes. Every CTA computes the whole batch's schedule
// itself, in units of one tile, so no metadata is needed, and a logit is computed whole by one warp: its bits
// depend neither on the split nor on the batch.
//
// Set by the launcher: HEADS (64, 32, 16), BLOCK_SIZE (64, 32), OUT_BF16 (0, 1), PASS_ROWS (8: the costs are
// eight bytes), MAX_REQUESTS (in shared memory). For tests: JITTER (random sleeps).
#include "sm90_logits_feed.cuh"
#include "sm90_logits_score.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sm90_paged_mqa_logits(const __grid_constant__ CUtensorMap kv_map,
                          const __grid_constant__ CUtensorMap q_map_4,
                          const __grid_constant__ CUtensorMap q_map_2,
                          const __grid_constant__ CUtensorMap q_map_1, const uint8_t* cache,
                          int64_t page_stride, const float* weights, const int* context_lens,
                          const int* query_start_loc, const int* block_table, int64_t table_stride,
                          int table_width, Logit* out, int64_t out_stride, int width, int fill_to,
                          int num_reqs, int num_rows, int early_kv, uint64_t pass_costs) {
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    const Launch launch{&kv_map,      &q_map_4, &q_map_2,     &q_map_1,        cache,
                        page_stride,  weights,  context_lens, query_start_loc, block_table,
                        table_stride, out,      out_stride,   table_width,     width,
                        fill_to,      num_reqs, num_rows,     early_kv != 0};
    const Shared shared{ptx::shared_address(shared_memory)};
    // All barriers lie in a row, so a thread makes each. A slot is empty when a lane of each of eight warps
    // has said so, or two each of four; the others have one arrival.
    if (threadIdx.x < NUM_BARRIERS) {
        const bool is_empty = RING <= threadIdx.x && threadIdx.x < 2 * RING;
        ptx::mbarrier_init(shared.full(threadIdx.x), is_empty ? 8 : 1);
        ptx::mbarrier_init_fence();
    }
    prefetch(launch);  // after the fence, which waits for all that its threads have asked for
    if (!launch.early_kv) ptx::wait_for_predecessor();
    const Schedule schedule = make_schedule(launch, shared_memory, pass_costs);

    const int warpgroup = ptx::uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        ptx::give_registers<40>();
        const int warp = ptx::uniform(threadIdx.x / 32);
        if (warp < 2) {
            feed_keys(launch, schedule, shared, warp);
        } else if (warp == 2) {
            if ((threadIdx.x & 31) == 0) feed_queries(launch, schedule, shared);
        } else {
            fill_past_tiles(launch, schedule);
        }
    } else {
        ptx::take_registers<232>();
        score_passes(launch, schedule, shared, warpgroup - 1);
    }
}

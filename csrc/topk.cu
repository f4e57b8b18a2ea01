// Exact top-k of rows of logits, ties to the lowest index, in ascending order of index.
//
// A row is read once. It falls into at most 8192 groups of neighbours, of which only the largest key is kept.
// The k-th largest of these maxima, tau, is at most the k-th largest of the row, so what is chosen lies in
// the groups whose maximum is above tau and in the first of those where it is tau, k groups in all: each of
// these brings at least one key of tau or more, and of the keys that equal tau none further back is needed.
// Only these groups are read again, and the k best of their keys are chosen. There is no bound that a row can
// exceed: where too many keys of the k groups reach tau to be kept, each pass reads the groups anew.
//
// One cluster a row: its CTAs share the first reading, and the leader does the rest. No atomics decide an
// order, nothing outlives the launch, and a row's result depends on that row alone.
//
// Set by the launcher: LOGITS_BF16 (0, 1), THREADS (1024 where a CTA has an SM of its own, 512 where two
// share it), MAX_K, MAX_GROUPS (of a row), SHARED_BYTES.
#include "topk_row.cuh"
#include "topk_select.cuh"

// The launch's output arguments, which stay where they are until a result is put.
struct Output {
    int* indices;
    int64_t indices_stride;
    float* values;
    int64_t values_stride;
    const int* block_table;
    int64_t table_stride;
    const int* request_of_row;
    int block_size;

    __device__ __forceinline__ void put(const Row& row, int slot, int index) const {
        int result = index;
        if (block_table != nullptr) {
            const int request = request_of_row == nullptr ? row.number : request_of_row[row.number];
            result =
                block_table[request * table_stride + index / block_size] * block_size + index % block_size;
        }
        indices[row.number * indices_stride + slot] = result;
        if (values != nullptr) values[row.number * values_stride + slot] = row.value(row.lead + index);
    }

    __device__ __forceinline__ void clear(const Row& row, int slot) const {
        indices[row.number * indices_stride + slot] = -1;
        if (values != nullptr) values[row.number * values_stride + slot] = __int_as_float(0xff800000);
    }
};

// All of a row that is no longer than k.
__device__ __forceinline__ void put_all(const Row& row, const Output& out, int k) {
#pragma unroll 1
    for (int slot = threadIdx.x; slot < k; slot += THREADS) {
        if (slot < row.length) {
            out.put(row, slot, slot);
        } else {
            out.clear(row, slot);
        }
    }
}

// Positions of the k best of the logits of the chosen groups, none of whose keys is over range.high.
__device__ __forceinline__ void choose_logits(const Row& row, Shared& shared, int k, int num_groups,
                                              Range range) {
    const ChosenLogits logits(row, shared, num_groups);
    const int kept = Keeper(row, shared, logits, range.low).keep();
    if (!__syncthreads_or(kept > KEPT)) {
        const Keys keys(shared.kept_keys[warp_index()], kept, lane_index(), (kept + 31) / 32);
        const Threshold best = find_threshold(shared, keys, range, k, k);
        const int* const positions = shared.kept_positions[warp_index()];
        take(shared, keys, best, [&](int slot, int i) { shared.results()[slot] = positions[i]; });
    } else {
        const Threshold best = find_threshold(shared, logits, range, k, k);
        take(shared, logits, best, [&](int slot, int i) { shared.results()[slot] = logits.position(i); });
    }
}

__device__ __forceinline__ void choose(const Row& row, Shared& shared, int k) {
    const Keys groups = keys_of_groups(shared, row.num_groups());
    const Range range = find_range(shared, groups, k);
    const bool are_logits = row.group_shift == 0;
    const Threshold best =
        find_threshold(shared, groups, range, k, are_logits ? k : k + MAX_CHOSEN_GROUPS - MAX_K);
    take(shared, groups, best, [&](int slot, int i) { shared.groups[slot] = i; });
    if (are_logits) return;
    if (threadIdx.x < 256) shared.histogram[0][threadIdx.x] = 0;
    __syncthreads();
    choose_logits(row, shared, k, best.chosen, {best.lowest(), range.high});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    topk(const Logit* logits, int64_t stride, int width, const int* lengths, const int* starts, int k,
         int* indices, int64_t indices_stride, float* values, int64_t values_stride, const int* block_table,
         int64_t table_stride, const int* request_of_row, int block_size) {
    extern __shared__ __align__(16) uint8_t shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int cluster_size = ptx::cluster_size(), rank = ptx::cluster_rank();
    ptx::wait_for_predecessor();
    const int number = blockIdx.x / cluster_size;
    const Row row(number, logits + number * stride, width, lengths[number],
                  starts == nullptr ? 0 : starts[number]);
    const bool chooses = row.length > k;
    // A short row is the leader's alone.
    const bool is_shared = chooses && row.has_groups() && cluster_size > 1;
    if (is_shared) ptx::cluster_sync();  // the leader has started, so its memory may be written
    if (chooses && (is_shared || rank == 0)) {
        if (row.has_groups()) {
            read_groups(row, shared, rank, is_shared ? cluster_size : 1);
        } else {
            read_logits(row, shared);
        }
    }
    if (is_shared) ptx::cluster_sync();
    if (rank != 0) return;
    __syncthreads();

    const Output out{indices,     indices_stride, values,         values_stride,
                     block_table, table_stride,   request_of_row, block_size};
    if (chooses) {
        choose(row, shared, k);
        __syncthreads();
        const int* const positions = row.group_shift == 0 ? shared.groups : shared.results();
#pragma unroll 1
        for (int slot = threadIdx.x; slot < k; slot += THREADS)
            out.put(row, slot, positions[slot] - row.lead);
    } else {
        put_all(row, out, k);
    }
    ptx::launch_dependents();
}

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
// Set by the launcher: LOGITS_BF16 (0, 1).
#include "topk_row.cuh"
#include "topk_select.cuh"

struct Output {
    int* indices;
    float* values;
    const int* table;
    int block_size;

    __device__ __forceinline__ void put(const Row& row, int slot, int index) const {
        int result = index;
        if (table != nullptr) result = table[index / block_size] * block_size + index % block_size;
        indices[slot] = result;
        if (values != nullptr) values[slot] = row.value(row.lead + index);
    }

    __device__ __forceinline__ void clear(int slot) const {
        indices[slot] = -1;
        if (values != nullptr) values[slot] = __int_as_float(0xff800000);
    }
};

// All of a row that is no longer than k.
__device__ __forceinline__ void put_all(const Row& row, const Output& out, int k) {
    for (int slot = threadIdx.x; slot < k; slot += THREADS) {
        if (slot < row.length) {
            out.put(row, slot, slot);
        } else {
            out.clear(slot);
        }
    }
}

__device__ __forceinline__ void choose(const Row& row, const Output& out, Shared& shared, int k) {
    const int count = row.num_groups();
    const auto keys = [&](auto visit) {
        for (int i = threadIdx.x; i < count; i += THREADS) visit(shared.keys[i]);
    };
    const auto ordered = [&](auto visit) {
        const int part = (count + WARPS - 1) / WARPS, begin = warp_index() * part;
        const int end = min(begin + part, count);
        for (int first = begin; first < end; first += 32) {
            const int i = first + lane_index();
            visit(i < end ? shared.keys[i] : 0u, i);
        }
    };
    const Threshold best_groups = find_threshold(shared, keys, k);
    if (row.group == 1) {
        take(shared, ordered, best_groups, [&](int slot, int i) { out.put(row, slot, i - row.lead); });
        return;
    }
    take(shared, ordered, best_groups, [&](int slot, int i) { shared.groups[slot] = i; });
    __syncthreads();
    Candidates candidates(row, shared, k, best_groups.lowest());
    const bool were_kept = candidates.gather();
    const auto each = [&](auto visit) { candidates.each(were_kept, visit); };
    const auto each_key = [&](auto visit) { each([&](uint32_t key, int) { visit(key); }); };
    const Threshold best = find_threshold(shared, each_key, k);
    take(shared, each, best, [&](int slot, int position) { out.put(row, slot, position - row.lead); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    topk(const Logit* logits, int64_t stride, int width, const int* lengths, const int* starts,
         const float* maxima, int64_t maxima_stride, int k, int* indices, int64_t indices_stride,
         float* values, int64_t values_stride, const int* block_table, int64_t table_stride,
         const int* request_of_row, int block_size) {
    extern __shared__ __align__(16) uint8_t shared_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int cluster_size = ptx::cluster_size(), rank = ptx::cluster_rank();
    const int number = blockIdx.x / cluster_size;
    ptx::wait_for_predecessor();
    const Row row(logits + number * stride, width, lengths[number], starts == nullptr ? 0 : starts[number],
                  k);

    const bool shares = cluster_size > 1 && row.is_shared();
    if (shares) ptx::cluster_sync();  // the leader has started, so its memory may be written
    if (rank == 0 || shares) {
        const int parts = shares ? cluster_size : 1;
        if (row.length > k) {
            if (maxima != nullptr && row.takes_maxima()) {
                if (rank == 0) read_maxima(row, shared, maxima + number * maxima_stride);
            } else {
                read_row(row, shared, rank, parts);
            }
        }
    }
    if (shares) ptx::cluster_sync();
    if (rank != 0) return;
    __syncthreads();

    const int request = request_of_row == nullptr ? number : request_of_row[number];
    const Output out{indices + number * indices_stride,
                     values == nullptr ? nullptr : values + number * values_stride,
                     block_table == nullptr ? nullptr : block_table + request * table_stride, block_size};
    if (row.length <= k) {
        put_all(row, out, k);
    } else {
        choose(row, out, shared, k);
    }
    ptx::launch_dependents();
}

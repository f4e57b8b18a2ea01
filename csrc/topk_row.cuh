// topk: a row in groups of neighbours, their largest keys, and what is read again.
#pragma once

#include "sm90_ptx.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int MAX_K = 2048;
// A row has up to this many groups, and one more where it starts within a group.
constexpr int MAX_GROUPS = 8192;
// Keys that a warp keeps of the groups it reads again.
constexpr int KEPT = 512;
constexpr int QUAD = 4;

#if LOGITS_BF16
using Logit = uint16_t;
struct alignas(8) Quad {
    Logit x[QUAD];
};
__device__ __forceinline__ float to_float(Logit value) { return __int_as_float(int(value) << 16); }
#else
using Logit = float;
struct alignas(16) Quad {
    Logit x[QUAD];
};
__device__ __forceinline__ float to_float(Logit value) { return value; }
#endif

__device__ __forceinline__ int lane_index() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_index() { return threadIdx.x >> 5; }

// In the order of the logits: -0.0 equals 0.0, NaN is below -inf, and 0 is what is no logit of the row.
__device__ __forceinline__ uint32_t sortable(float value) {
    const uint32_t bits = __float_as_uint(value + 0.f);
    const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return value != value ? 1u : key;
}

struct Shared {
    uint32_t keys[MAX_GROUPS + QUAD];
    uint32_t kept_keys[WARPS][KEPT];
    int kept_positions[WARPS][KEPT];
    uint16_t groups[MAX_K];
    int histogram[256];
    int above[WARPS], equal[WARPS];
    int digit, rest, digit_count;
};

// The window of a row that may be chosen from. Positions count from the 16 (bfloat16: 8) aligned bytes that
// hold its first logit, which is at position `lead`.
struct Row {
    const Logit* base;
    int lead, length, group;  // logits of a group: 1, or a power of two from 4

    __device__ __forceinline__ Row(const Logit* row, int width, int wanted, int start, int k) {
        const Logit* first = row + start;
        lead = reinterpret_cast<uint64_t>(first) / sizeof(Logit) % QUAD;
        base = first - lead;
        length = max(0, min(wanted, width - start));
        group = 1;
        if (length > MAX_GROUPS) {
            group = QUAD;
            while (length > MAX_GROUPS * group) group *= 2;
        }
    }

    __device__ __forceinline__ int end() const { return lead + length; }
    __device__ __forceinline__ int num_groups() const { return (end() + group - 1) / group; }
    __device__ __forceinline__ bool is_shared() const { return group > 1; }
    // Maxima of 16 are of use where there are more than k of them, and the row starts with a group.
    __device__ __forceinline__ bool takes_maxima() const { return group >= 16 && lead == 0; }
    __device__ __forceinline__ float value(int position) const { return to_float(base[position]); }
    __device__ __forceinline__ Quad quad(int number) const {
        return reinterpret_cast<const Quad*>(base)[number];
    }
    __device__ __forceinline__ bool has(int position) const { return position >= lead && position < end(); }
};

// NaN where there is no logit, which a maximum passes over.
__device__ __forceinline__ float largest_of(const Row& row, int quad) {
    const Quad loaded = row.quad(quad);
    float x[QUAD];
#pragma unroll
    for (int i = 0; i < QUAD; ++i) x[i] = to_float(loaded.x[i]);
    if (quad == 0 || quad * QUAD + QUAD > row.end()) {
#pragma unroll
        for (int i = 0; i < QUAD; ++i)
            if (!row.has(quad * QUAD + i)) x[i] = __int_as_float(0x7fffffff);
    }
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}

// The keys of one part of the row's groups, into the memory of the cluster's leader.
__device__ __forceinline__ void read_row(const Row& row, Shared& shared, int part, int parts) {
    constexpr int LOADS = 8;
    const uint32_t keys = ptx::leader_address(ptx::shared_address(shared.keys));
    if (row.group == 1) {
        const int quads = (row.end() + QUAD - 1) / QUAD;
        for (int quad = threadIdx.x; quad < quads; quad += THREADS) {
            const Quad loaded = row.quad(quad);
#pragma unroll
            for (int i = 0; i < QUAD; ++i) {
                const int position = quad * QUAD + i;
                shared.keys[position] = row.has(position) ? sortable(to_float(loaded.x[i])) : 0u;
            }
        }
        return;
    }
    const int group_quads = row.group / QUAD, groups = row.num_groups();
    const int last_quad = (row.end() - 1) / QUAD;
    const int first_group = int64_t(groups) * part / parts, end_group = int64_t(groups) * (part + 1) / parts;
    const int end = end_group * group_quads;
    for (int first = first_group * group_quads + warp_index() * 32 * LOADS; first < end;
         first += THREADS * LOADS) {
        float largest[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int quad = first + i * 32 + lane_index();
            largest[i] = quad <= last_quad && quad < end ? largest_of(row, quad) : __int_as_float(0x7fffffff);
        }
        for (int distance = 1; distance < group_quads; distance *= 2) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                largest[i] = fmaxf(largest[i], ptx::shuffle_xor(largest[i], distance));
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int quad = first + i * 32 + lane_index();
            if (quad < end && quad % group_quads == 0)
                ptx::store_cluster(keys + quad / group_quads * 4, sortable(largest[i]));
        }
    }
}

// The keys of the groups from the maxima of 16 logits each that the logits' kernel wrote.
__device__ __forceinline__ void read_maxima(const Row& row, Shared& shared, const float* maxima) {
    const int each = row.group / 16, total = (row.length + 15) / 16;
    for (int group = threadIdx.x; group < row.num_groups(); group += THREADS) {
        float largest = __int_as_float(0x7fffffff);
        for (int i = group * each; i < min(group * each + each, total); ++i)
            largest = fmaxf(largest, maxima[i]);
        shared.keys[group] = sortable(largest);
    }
}

// The logits of the chosen groups whose keys are at least `lowest`, in ascending order within and over warps.
class Candidates {
   public:
    __device__ __forceinline__ Candidates(const Row& row, Shared& shared, int num_groups, uint32_t lowest)
        : row_(row),
          shared_(shared),
          lowest_(lowest),
          begin_(num_groups * warp_index() / WARPS),
          end_(num_groups * (warp_index() + 1) / WARPS) {}

    // Keeps them, if they find room.
    __device__ __forceinline__ bool gather() {
        constexpr int LOADS = 4;
        const int group_quads = row_.group / QUAD, quads = (end_ - begin_) * group_quads;
        const int last_quad = (row_.end() - 1) / QUAD;
        const uint32_t before_me = (1u << lane_index()) - 1;
        uint32_t* const keys = shared_.kept_keys[warp_index()];
        int* const positions = shared_.kept_positions[warp_index()];
        for (int first = 0; first < quads; first += 32 * LOADS) {
            Quad loaded[LOADS];
            int numbers[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int quad = first + i * 32 + lane_index();
                numbers[i] = last_quad + 1;
                if (quad < quads) {
                    numbers[i] =
                        shared_.groups[begin_ + quad / group_quads] * group_quads + quad % group_quads;
                }
                if (numbers[i] <= last_quad) loaded[i] = row_.quad(numbers[i]);
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                uint32_t key[QUAD];
                int before = 0, all = 0;
#pragma unroll
                for (int j = 0; j < QUAD; ++j) {
                    const int position = numbers[i] * QUAD + j;
                    key[j] = row_.has(position) ? sortable(to_float(loaded[i].x[j])) : 0u;
                    const uint32_t reaches = __ballot_sync(0xffffffffu, key[j] >= lowest_);
                    before += __popc(reaches & before_me);
                    all += __popc(reaches);
                }
                int place = count_ + before;
#pragma unroll
                for (int j = 0; j < QUAD; ++j) {
                    if (key[j] >= lowest_) {
                        if (place < KEPT) {
                            keys[place] = key[j];
                            positions[place] = numbers[i] * QUAD + j;
                        }
                        ++place;
                    }
                }
                count_ += all;
            }
        }
        return !__syncthreads_or(count_ > KEPT);
    }

    // By whole warps, in order; key 0 for a lane without one. Those that were kept, or all that there are.
    template <class Visit>
    __device__ __forceinline__ void each(bool were_kept, Visit visit) const {
        const int count = were_kept ? count_ : (end_ - begin_) * row_.group;
        for (int first = 0; first < count; first += 32) {
            const int i = first + lane_index();
            int position = 0;
            uint32_t key = 0;
            if (i < count && were_kept) {
                position = shared_.kept_positions[warp_index()][i];
                key = shared_.kept_keys[warp_index()][i];
            } else if (i < count) {
                position = shared_.groups[begin_ + i / row_.group] * row_.group + i % row_.group;
                if (row_.has(position)) key = sortable(row_.value(position));
            }
            visit(key, position);
        }
    }

   private:
    const Row& row_;
    Shared& shared_;
    uint32_t lowest_;
    int begin_, end_, count_ = 0;
};

// topk: a row in groups of neighbours, and their largest keys.
#pragma once

#include "sm90_ptx.cuh"

constexpr int WARPS = THREADS / 32;
// Some more than k, so that the last of them need not be told apart.
constexpr int MAX_CHOSEN_GROUPS = MAX_K + 512;
constexpr int KEYS_PER_THREAD = MAX_GROUPS / THREADS;
// Keys that a warp keeps of the groups that it reads again: what fits its registers.
constexpr int KEPT = 32 * KEYS_PER_THREAD;
constexpr int QUAD_SHIFT = 2, QUAD = 1 << QUAD_SHIFT;

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
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// In the order of the logits: -0.0 equals 0.0, NaN is below -inf, and 0 is what is no logit of the row.
__device__ __forceinline__ uint32_t sortable(float value) {
    const uint32_t bits = __float_as_uint(value + 0.f);
    const uint32_t key = bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
    return value != value ? 1u : key;
}

// Threads that read runs of 4, 8 or 16 words meet in one bank without a gap after every 32.
__device__ __forceinline__ constexpr int padded(int word) { return word + word / 32; }

// Whether a logit's key is at least another key, told without making its own.
class Floor {
   public:
    __device__ __forceinline__ explicit Floor(uint32_t key) : takes_all_(key <= 1) {
        constexpr uint32_t KEY_OF_MINUS_INFINITY = 0x007fffffu;
        key = max(key, KEY_OF_MINUS_INFINITY);
        floor_ = __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
    }

    __device__ __forceinline__ bool is_reached(float value) const { return value >= floor_ || takes_all_; }

   private:
    bool takes_all_;
    float floor_;
};

struct Shared {
    uint32_t keys[padded(MAX_GROUPS)];
    uint32_t kept_keys[WARPS][padded(KEPT)];
    int kept_positions[WARPS][KEPT];
    int groups[MAX_CHOSEN_GROUPS];
    alignas(16) int histogram[2][256];
    uint32_t smallest[WARPS], largest[WARPS], counts[WARPS];
    int digit, rest, digit_count;

    // Both in the place of the groups' keys, which are in registers by then.
    __device__ __forceinline__ int* quads_of_warp() {
        return reinterpret_cast<int*>(keys) + warp_index() * KEPT;
    }
    __device__ __forceinline__ int* results() { return reinterpret_cast<int*>(keys); }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "what the launcher asks for");

// The window of a row that may be chosen from. Positions count from the 16 (bfloat16: 8) aligned bytes that
// hold its first logit, which is at position `lead`.
struct Row {
    int number;
    const Logit* base;
    int lead, length, group_shift;  // groups of 1, or of a power of two from 4

    __device__ __forceinline__ Row(int number, const Logit* row, int width, int wanted, int start)
        : number(number) {
        const Logit* first = row + start;
        lead = reinterpret_cast<uint64_t>(first) / sizeof(Logit) % QUAD;
        base = first - lead;
        length = max(0, min(wanted, width - start));
        group_shift = 0;
        if (end() > MAX_GROUPS) {
            group_shift = QUAD_SHIFT;
            while (end() > MAX_GROUPS << group_shift) ++group_shift;
        }
    }

    __device__ __forceinline__ int end() const { return lead + length; }
    __device__ __forceinline__ int last_quad() const { return (end() - 1) >> QUAD_SHIFT; }
    __device__ __forceinline__ int num_groups() const { return ((end() - 1) >> group_shift) + 1; }
    __device__ __forceinline__ int quads_shift() const { return group_shift - QUAD_SHIFT; }
    __device__ __forceinline__ bool has_groups() const { return group_shift > 0; }
    __device__ __forceinline__ float value(int position) const { return to_float(base[position]); }
    __device__ __forceinline__ Quad quad(int number) const {
        return reinterpret_cast<const Quad*>(base)[number];
    }
    __device__ __forceinline__ bool has(int position) const { return uint32_t(position - lead) < length; }
    __device__ __forceinline__ uint32_t key(int position, Logit logit) const {
        return has(position) ? sortable(to_float(logit)) : 0u;
    }
};

// One key for each logit, of a row that is read by one CTA.
__device__ __forceinline__ void read_logits(const Row& row, Shared& shared) {
    for (int quad = threadIdx.x; quad <= row.last_quad(); quad += THREADS) {
        const Quad loaded = row.quad(quad);
#pragma unroll
        for (int i = 0; i < QUAD; ++i) {
            const int position = quad * QUAD + i;
            shared.keys[padded(position)] = row.key(position, loaded.x[i]);
        }
    }
}

// The largest keys of one part of the row's groups, into the memory of the cluster's leader.
__device__ __forceinline__ void read_groups(const Row& row, Shared& shared, int part, int parts) {
    constexpr int LOADS = 8;
    const uint32_t keys = ptx::leader_address(ptx::shared_address(shared.keys));
    const int groups_of_part = (row.num_groups() + parts - 1) / parts;
    const int end_group = min(row.num_groups(), (part + 1) * groups_of_part);
    const int shift = row.quads_shift(), last_quad = row.last_quad();
    const int begin = part * groups_of_part << shift, end = end_group << shift;
#pragma unroll 1
    for (int first = begin + warp_index() * 32 * LOADS; first < end; first += THREADS * LOADS) {
        Quad loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) loaded[i] = row.quad(min(first + i * 32 + lane_index(), last_quad));
        float largest[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            float x[QUAD];
#pragma unroll
            for (int j = 0; j < QUAD; ++j) x[j] = to_float(loaded[i].x[j]);
            const int quad = first + i * 32 + lane_index();
            if (quad == 0 || quad >= last_quad) {
                // A maximum passes over what is not a number.
#pragma unroll
                for (int j = 0; j < QUAD; ++j)
                    if (!row.has(quad * QUAD + j)) x[j] = not_a_number();
            }
            largest[i] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        }
#pragma unroll 1
        for (int distance = 1; distance < 1 << shift; distance *= 2) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                largest[i] = fmaxf(largest[i], ptx::shuffle_xor(largest[i], distance));
        }
        if ((lane_index() & ((1 << shift) - 1)) == 0) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int quad = first + i * 32 + lane_index();
                if (quad < end) ptx::store_cluster(keys + padded(quad >> shift) * 4, sortable(largest[i]));
            }
        }
    }
}

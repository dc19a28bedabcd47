// Paged attention of output positions, one query at a time: decode rows, and slices that recompute drawn tokens.
//
// Work is divided into items (row, partition of the context, kv head); a free thread takes the next item. The heads of a
// group share one pass over keys and values. The partitions of a context depend on its length alone, so a row's result
// does not depend on the rest of the batch. A row of one partition is written directly; otherwise the thread that
// finishes the last partition of a (row, head) merges all of them in order.
#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace mi {

constexpr int kPartition = 256;  // keys of an item
constexpr int kLanes = 4;        // heads of a group handled in one pass
constexpr int kStretch = 16;     // keys that all heads of an item read before any head reads the next
constexpr int kFar = 16;         // keys or values between one that is read and the one that is fetched meanwhile
constexpr int kItemHeads = 16;   // most query heads of an item
constexpr int64_t kPartialBytes = 1 << 25;  // rows are processed in groups whose partial results fit in about this much
constexpr float kMasked = -1e30f;

// Each load of a key or value is paired with a prefetch of the same bytes of the one kFar further on: of `ahead`, which has
// an address for each key. Heads are read a few hundred bytes out of many, so the hardware sees no stream, L1 alone cannot
// keep enough lines in flight, and many prefetches at once would take all of the core's miss buffers.
static const bool kPastL2 = past_l2();
template <class T>
inline void fetch(const T* at) {
    if (kPastL2)
        __builtin_prefetch(at, 0, 0);
    else
        __builtin_prefetch(at, 0, 2);
}

// How scores and sums over values are computed. fp32 products, and below bf16 products of pairs where the CPU has them.
template <class T>
struct Arithmetic {
    using Q = float;
    using Weight = float;
    static int sums_of_head(int dim) { return dim; }  // floats of one head's sums over values
    static bool starts_line(int dim) { return dim * (int)sizeof(T) % 64 == 0; }  // one prefetch is enough for a line

    // scores[g][t] = query g . key t for t in begin .. end; G is 1..4. Keys come 16 / (G rounded up to a power of 2) at a time.
    template <int G>
    static void score(const Q* q, const T* const* keys, const T* const* ahead, int64_t head_offset, int begin, int end, int dim,
                      float (*scores)[kPartition + W]) {
        constexpr int kSlots = G == 1 ? 1 : G == 2 ? 2 : 4, kKeys = 16 / kSlots;
        for (int t = begin; t < end; t += kKeys) {
            const T* key[kKeys];
            for (int r = 0; r < kKeys; ++r) key[r] = keys[t + r] + head_offset;
            vf acc[16] = {};
            for (int i = 0; i < dim; i += W) {
                vf qv[G];
                for (int g = 0; g < G; ++g) qv[g] = load(q + g * dim + i);
                for (int r = 0; r < kKeys; ++r) {
                    vf kv = load(key[r] + i);
                    if (starts_line(i)) fetch(ahead[t + r] + head_offset + i);
                    for (int g = 0; g < G; ++g) acc[g * kKeys + r] = fma_of(qv[g], kv, acc[g * kKeys + r]);
                }
            }
            float sums[16];
            sums_of(acc, sums);
            for (int g = 0; g < G; ++g) std::memcpy(&scores[g][t], sums + g * kKeys, kKeys * sizeof(float));
        }
    }

    // sums[g] += sum over t in begin .. end of weights[g][t] * value t.
    template <int G>
    static void mix(const T* const* values, const T* const* ahead, int64_t head_offset, int begin, int end, int dim,
                    const Weight (*weights)[kPartition + W], float* sums) {
        constexpr int kWide = W == 16 || G < 4 ? 4 : 2;  // as far as there are registers
        int from = 0;
        for (; from + kWide * W <= dim; from += kWide * W)
            mix_dims<G, kWide>(values, ahead, head_offset + from, begin, end, weights, sums + from, dim);
        for (; from < dim; from += W) mix_dims<G, 1>(values, ahead, head_offset + from, begin, end, weights, sums + from, dim);
    }

    template <int G, int NV>
    static void mix_dims(const T* const* values, const T* const* ahead, int64_t offset, int begin, int end,
                         const Weight (*weights)[kPartition + W], float* sums, int dim) {
        vf sum[G][NV];
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < NV; ++i) sum[g][i] = load(sums + g * dim + i * W);
        for (int t = begin; t < end; ++t) {
            const T* value = values[t] + offset;
            vf v[NV];
            for (int i = 0; i < NV; ++i) {
                v[i] = load(value + i * W);
                if (starts_line(i * W)) fetch(ahead[t] + offset + i * W);
            }
            for (int g = 0; g < G; ++g)
                for (int i = 0; i < NV; ++i) sum[g][i] = fma_of(splat(weights[g][t]), v[i], sum[g][i]);
        }
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < NV; ++i) store(sums + g * dim + i * W, sum[g][i]);
    }

    static void in_order(const float* sums, int dim, float* out) { std::memcpy(out, sums, dim * sizeof(float)); }
};

#if MI_BF16_DOT
template <>
struct Arithmetic<bf16> {
    using Q = bf16;
    using Weight = bf16;
    static int sums_of_head(int dim) { return (dim + 31) / 32 * 32; }

    // As above, 16 keys at a time: key t + 4 l + c is in 128-bit lane l of vector c, against 8 dims of the query in every
    // lane. So 4 dims of a key are summed in its own lane, and one query's 16 scores take 9 instructions at the end.
    template <int G>
    static void score(const bf16* q, const bf16* const* keys, const bf16* const* ahead, int64_t head_offset, int begin, int end,
                      int dim, float (*scores)[kPartition + W]) {
        for (int t = begin; t < end; t += 16) {
            __m512 acc[G][4];
            for (int half = 0; half < 4; half += 2) {
                const bf16 *key[8], *later[8];
                for (int c = 0; c < 2; ++c)
                    for (int l = 0; l < 4; ++l) {
                        const int at = t + 4 * l + half + c;
                        key[4 * c + l] = keys[at] + head_offset, later[4 * c + l] = ahead[at] + head_offset;
                    }
                __m512 sum[G][2];
                for (int g = 0; g < G; ++g) sum[g][0] = sum[g][1] = _mm512_setzero_ps();
                int i = 0;
                for (; i + 32 <= dim; i += 32) dot_lanes<G, 4>(q + i, key, later, i, 0xffffffffu, dim, sum);
                if (i < dim) dot_lanes<G, 2>(q + i, key, later, i, 0xffffu, dim, sum);
                for (int g = 0; g < G; ++g) acc[g][half] = sum[g][0], acc[g][half + 1] = sum[g][1];
            }
            for (int g = 0; g < G; ++g) {
                __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(acc[g][0], acc[g][1]), _mm512_unpackhi_ps(acc[g][0], acc[g][1]));
                __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(acc[g][2], acc[g][3]), _mm512_unpackhi_ps(acc[g][2], acc[g][3]));
                __m512 low = _mm512_shuffle_ps(x, y, 0x44), high = _mm512_shuffle_ps(x, y, 0xee);
                _mm512_storeu_ps(&scores[g][t], _mm512_add_ps(low, high));
            }
        }
    }

    // sum[g][c] += products of 8 L dims of 8 keys; L: 4, or 2 where only 16 dims are left.
    template <int G, int L>
    static void dot_lanes(const bf16* q, const bf16* const* key, const bf16* const* later, int i, __mmask32 mask, int dim,
                          __m512 (*sum)[2]) {
        __m512i lane[2][4];
        for (int c = 0; c < 2; ++c) {
            __m512i k[4];
            for (int l = 0; l < 4; ++l) fetch(later[4 * c + l] + i);
            for (int l = 0; l < 4; ++l)
                k[l] = L == 4 ? _mm512_loadu_si512(key[4 * c + l] + i) : _mm512_maskz_loadu_epi16(mask, key[4 * c + l] + i);
            const __m512i a = _mm512_shuffle_i32x4(k[0], k[1], 0x44), b = _mm512_shuffle_i32x4(k[2], k[3], 0x44);
            lane[c][0] = _mm512_shuffle_i32x4(a, b, 0x88);
            lane[c][1] = _mm512_shuffle_i32x4(a, b, 0xdd);
            if (L == 4) {
                const __m512i d = _mm512_shuffle_i32x4(k[0], k[1], 0xee), e = _mm512_shuffle_i32x4(k[2], k[3], 0xee);
                lane[c][2] = _mm512_shuffle_i32x4(d, e, 0x88);
                lane[c][3] = _mm512_shuffle_i32x4(d, e, 0xdd);
            }
        }
        for (int j = 0; j < L; ++j)
            for (int g = 0; g < G; ++g) {
                const __m512bh query = (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(q + g * dim + 8 * j)));
                for (int c = 0; c < 2; ++c) sum[g][c] = _mm512_dpbf16_ps(sum[g][c], query, (__m512bh)lane[c][j]);
            }
    }

    // As above, two keys at a time. The sums of 32 dims lie in two vectors as unpacking leaves them, until `in_order`.
    template <int G>
    static void mix(const bf16* const* values, const bf16* const* ahead, int64_t head_offset, int begin, int end, int dim,
                    const bf16 (*weights)[kPartition + W], float* sums) {
        int from = 0;
        for (; from + 64 <= dim; from += 64)
            mix_dims<G, 2>(values, ahead, head_offset + from, begin, end, 0xffffffffu, weights, sums + from, dim);
        for (; from < dim; from += 32) {
            const __mmask32 mask = from + 32 <= dim ? 0xffffffffu : 0xffffu;
            mix_dims<G, 1>(values, ahead, head_offset + from, begin, end, mask, weights, sums + from, dim);
        }
    }

    template <int G, int NV>
    static void mix_dims(const bf16* const* values, const bf16* const* ahead, int64_t offset, int begin, int end,
                         __mmask32 mask, const bf16 (*weights)[kPartition + W], float* sums, int dim) {
        const int stride = sums_of_head(dim);
        __m512 sum[G][2 * NV];
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < 2 * NV; ++i) sum[g][i] = _mm512_loadu_ps(sums + g * stride + i * 16);
        for (int t = begin; t < end; t += 2) {
            const bf16 *even = values[t] + offset, *odd = values[t + 1] + offset;
            __m512bh v[2 * NV];
            for (int i = 0; i < NV; ++i) {
                fetch(ahead[t] + offset + 32 * i);
                fetch(ahead[t + 1] + offset + 32 * i);
                const __m512i a = NV == 1 ? _mm512_maskz_loadu_epi16(mask, even) : _mm512_loadu_si512(even + 32 * i);
                const __m512i b = NV == 1 ? _mm512_maskz_loadu_epi16(mask, odd) : _mm512_loadu_si512(odd + 32 * i);
                v[2 * i] = (__m512bh)_mm512_unpacklo_epi16(a, b);
                v[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
            }
            for (int g = 0; g < G; ++g) {
                int pair;
                std::memcpy(&pair, &weights[g][t], sizeof pair);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
                for (int i = 0; i < 2 * NV; ++i) sum[g][i] = _mm512_dpbf16_ps(sum[g][i], weight, v[i]);
            }
        }
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < 2 * NV; ++i) _mm512_storeu_ps(sums + g * stride + i * 16, sum[g][i]);
    }

    static void in_order(const float* sums, int dim, float* out) {
        for (int i = 0; i < dim; i += 32) {
            const __m512 low = _mm512_loadu_ps(sums + i), high = _mm512_loadu_ps(sums + i + 16);
            const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            _mm512_storeu_ps(out + i, _mm512_permutex2var_ps(low, first, high));
            if (i + 16 < dim) _mm512_storeu_ps(out + i + 16, _mm512_permutex2var_ps(low, second, high));
        }
    }
};
#endif

// Scores of n keys -> unnormalised weights e^(scale (s - top)), 0 from n on; returns scale * top and their sum.
template <class T, class Weight>
static void soften(const Spec& spec, float* s, int n, Weight* weights, float* top, float* mass) {
    const int padded = (n + W - 1) / W * W;
    const float scale = scale_of(spec);
    cap_scores(spec, s, 0, padded);
    for (int t = n; t < padded; ++t) s[t] = kMasked;
    vf best = splat(kMasked);
    for (int t = 0; t < padded; t += W) best = vmax(load(s + t), best);
    const float highest = highest_of(best);
    const Softmax<T> weight_of(highest, scale);
    vf sum = {};
    for (int t = 0; t < padded; t += W) {
        vf e = weight_of(load(s + t));
        store(weights + t, e);
        sum += e;
    }
    std::memset(weights + n, 0, (padded - n) * sizeof(Weight));
    *top = highest * scale;
    *mass = sum_of(sum);
}

struct DecodeRow {  // one query; a slice has one for each of its output positions
    int64_t row, token, first_part;
    int first_key, num_keys, parts;
    const int32_t* chosen;  // positions of its keys; null: they are first_key and those after it
};

template <class T>
struct DecodeItem {  // query heads first .. first + heads over one partition of a row's keys
    const DecodeRow* row;
    int part, n, heads;
    int64_t first;
    int padded;  // n as a multiple of 16: behind the n keys the last one is read again, with a weight of 0
    // Addresses of kv head 0, as they are read: keys [padded], values [padded], and the first keys of the next item.
    const T* at[2 * kPartition + kFar];
};
static_assert(kPartition % 16 == 0 && kFar % 16 == 0, "keys are read 16 at a time");

template <class T>
struct DecodeTask {
    using Sums = Arithmetic<T>;
    using Q = typename Sums::Q;
    using Weight = typename Sums::Weight;
    const Step& step;
    const Spec& spec;
    const Call& call;
    const DecodeRow* rows;
    float* partials;
    int* arrivals;
    int64_t chunks, chunk_heads;  // items of a (row, part), query heads of an item

    float* partial_of(const DecodeRow& row, int part, int64_t head) const {
        const int64_t heads = spec.num_kv * spec.group;
        return partials + ((row.first_part + part) * heads + head) * (spec.value_dim + 2);
    }

    void load_query(const T* src, int64_t token, Q* dst) const {
        T turned[kMaxHeadDim];
        rotate_head(step, spec, token, src, turned);
        if constexpr (sizeof(Q) == sizeof(T))
            std::memcpy(dst, turned, spec.head_dim * sizeof(T));
        else
            for (int64_t i = 0; i < spec.head_dim; i += W) store((float*)dst + i, load(turned + i));
    }

    // Query heads first .. first + heads of this row, counted over all kv heads; they never split a group unless it is large.
    void find_item(const DecodeRow& row, int part, int64_t first, int heads, DecodeItem<T>& item) const {
        const int64_t block_size = spec.block_size, key_stride = spec.num_kv * spec.key_stride;
        // Equal partitions, so that the last one is not short.
        const int begin = row.first_key + (int)((int64_t)row.num_keys * part / row.parts);
        const int end = row.first_key + (int)((int64_t)row.num_keys * (part + 1) / row.parts);
        const int32_t* table = step.block_table + step.table_row[row.row] * step.table_stride;
        item.row = &row, item.part = part, item.n = end - begin, item.first = first, item.heads = heads;
        item.padded = (item.n + 15) / 16 * 16;
        int64_t column = begin / block_size, offset = begin % block_size;
        for (int t = 0; row.chosen && t < item.n; ++t) {
            const int32_t position = row.chosen[begin + t];
            item.at[t] = (const T*)call.keys + (table[position / block_size] * block_size + position % block_size) * key_stride;
        }
        for (int t = 0; !row.chosen && t < item.n;) {
            const T* at = (const T*)call.keys + (table[column] * block_size + offset) * key_stride;
            for (; offset < block_size && t < item.n; ++offset, ++t, at += key_stride) item.at[t] = at;
            offset = 0;
            ++column;
        }
        for (int t = item.n; t < item.padded; ++t) item.at[t] = item.at[item.n - 1];
        const ptrdiff_t to_value = (const T*)call.values - (const T*)call.keys;
        for (int t = 0; t < item.padded; ++t) item.at[item.padded + t] = item.at[t] + to_value;
    }

    // What is fetched during the end of an item: the beginning of the next; of none, what is there anyway.
    static void append_next(DecodeItem<T>& item, const DecodeItem<T>& next) {
        const int end = 2 * item.padded, there = 2 * next.padded;
        for (int t = 0; t < kFar; ++t) item.at[end + t] = t < there ? next.at[t] : item.at[end - 1];
    }

    void run_item(const DecodeItem<T>& item) const {
        const DecodeRow& row = *item.row;
        const int dim = (int)spec.head_dim, wide = (int)spec.value_dim, group = (int)spec.group, n = item.n, heads = item.heads;
        const int64_t first = item.first;
        if (item.part == row.parts - 1 && row.row < step.num_decode)  // slices are appended before: see attend()
            for (int64_t kv = first / group; kv * group < first + heads; ++kv) append<T>(step, spec, call, row.token, kv);
        const T *const *keys = item.at, *const *values = item.at + item.padded;
        const int stride = Sums::sums_of_head(wide);
        Q q[kItemHeads * kMaxHeadDim];
        float sums[kItemHeads * kMaxHeadDim], scores[kItemHeads][kPartition + W], top[kItemHeads], mass[kItemHeads];
        Weight weights[kItemHeads][kPartition + W];
        for (int h = 0; h < heads; ++h) {
            const int64_t kv = (first + h) / group, lane = (first + h) % group;
            load_query((const T*)call.q + row.token * call.q_token + kv * call.q_kv + lane * call.q_group, row.token,
                       q + h * dim);
        }
        each_lanes(first, heads, n, [&](auto lanes, int h, int64_t head_offset, int from, int to) {
            Sums::template score<decltype(lanes)::value>(q + h * dim, keys, keys + kFar, head_offset, from, to, dim, scores + h);
        });
        for (int h = 0; h < heads; ++h) soften<T>(spec, scores[h], n, weights[h], top + h, mass + h);
        std::memset(sums, 0, heads * stride * sizeof(float));
        each_lanes(first, heads, n, [&](auto lanes, int h, int64_t head_offset, int from, int to) {
            Sums::template mix<decltype(lanes)::value>(values, values + kFar, head_offset, from, to, wide, weights + h,
                                                       sums + h * stride);
        });

        if (row.parts == 1) {
            T* out = (T*)call.out + (row.token * spec.num_kv * group + first) * wide;
            float sum[kMaxHeadDim];
            for (int h = 0; h < heads; ++h) {
                Sums::in_order(sums + h * stride, wide, sum);
                const float factor = factor_of<T>(spec, first + h, top[h], mass[h]);
                for (int d = 0; d < wide; d += W) store(out + h * wide + d, load(sum + d) * factor);
            }
            return;
        }
        for (int h = 0; h < heads; ++h) {
            float* partial = partial_of(row, item.part, first + h);
            Sums::in_order(sums + h * stride, wide, partial);
            partial[wide] = top[h];
            partial[wide + 1] = mass[h];
        }
        int* arrived = arrivals + (&row - rows) * chunks + first / chunk_heads;
        if (__atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL) == row.parts) merge(row, first, heads);
    }

    // body(lanes, first head, offset of its kv head, keys from, to) for up to kLanes heads of one group at a time.
    template <class Body>
    void each_lanes(int64_t first, int heads, int n, Body&& body) const {
        const int group = (int)spec.group;
        for (int from = 0; from < n; from += kStretch) {
            const int to = from + kStretch < n ? from + kStretch : n;
            for (int h = 0; h < heads;) {
                const int64_t kv = (first + h) / group;
                int lanes = group - (int)((first + h) % group);
                lanes = lanes < kLanes ? lanes : kLanes;
                lanes = lanes < heads - h ? lanes : heads - h;
                const int64_t offset = kv * spec.key_stride;
                switch (lanes) {
                    case 1: body(std::integral_constant<int, 1>{}, h, offset, from, to); break;
                    case 2: body(std::integral_constant<int, 2>{}, h, offset, from, to); break;
                    case 3: body(std::integral_constant<int, 3>{}, h, offset, from, to); break;
                    default: body(std::integral_constant<int, 4>{}, h, offset, from, to);
                }
                h += lanes;
            }
        }
    }

    void merge(const DecodeRow& row, int64_t first, int heads) const {
        const int dim = (int)spec.value_dim;
        for (int64_t head = first; head < first + heads; ++head) {
            float top = kMasked, mass = 0, acc[kMaxHeadDim] = {};
            for (int p = 0; p < row.parts; ++p)
                if (partial_of(row, p, head)[dim] > top) top = partial_of(row, p, head)[dim];
            for (int p = 0; p < row.parts; ++p) {
                const float* from = partial_of(row, p, head);
                const float weight = __builtin_expf(from[dim] - top);
                mass += weight * from[dim + 1];
                for (int d = 0; d < dim; d += W) store(acc + d, load(acc + d) + load(from + d) * weight);
            }
            T* out = (T*)call.out + (row.token * spec.num_kv * spec.group + head) * dim;
            const float factor = factor_of<T>(spec, head, top, mass);
            for (int d = 0; d < dim; d += W) store(out + d, load(acc + d) * factor);
        }
    }
};

template <class T>
static void run_group(Context& context, const Step& step, const Spec& spec, const Call& call, const DecodeRow* rows,
                      int64_t count) {
    const int64_t parts = rows[count - 1].first_part + rows[count - 1].parts;
    // An item has heads of several groups where there are enough parts for all threads: one thread then reads neighbouring
    // memory. Which thread computes a head does not change its result.
    const int64_t group = spec.group, heads = spec.num_kv * group;
    const int64_t fitting = kItemHeads / group, few = parts < 4 * step.threads ? 1 : spec.num_kv;
    const int64_t chunk_heads = group > kItemHeads ? kItemHeads : group * (fitting < few ? fitting : few);
    const int64_t chunks = (heads + chunk_heads - 1) / chunk_heads;
    const bool merged = parts > count;
    float* partials = merged ? context.partials.get<float>(parts * heads * (spec.value_dim + 2)) : nullptr;
    int* arrivals = context.arrivals.get<int>(count * chunks);
    std::memset(arrivals, 0, count * chunks * sizeof(int));
    DecodeTask<T> task{step, spec, call, rows, partials, arrivals, chunks, chunk_heads};
    int64_t next = 0;
    const int64_t items = parts * chunks;
    auto body = [&](int, int) {
        int64_t at = 0;  // item numbers only grow, so the next row is not before this one
        auto take = [&](DecodeItem<T>& item) {
            const int64_t number = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED), part = number / chunks;
            item.n = item.padded = 0;
            if (number >= items) return false;
            while (at + 1 < count && rows[at + 1].first_part <= part) ++at;
            const int64_t first = number % chunks * chunk_heads, left = heads - first;
            task.find_item(rows[at], (int)(part - rows[at].first_part), first, (int)(left < chunk_heads ? left : chunk_heads), item);
            return true;
        };
        DecodeItem<T> pair[2];
        int now = 0;
        bool more = take(pair[0]);
        for (; more; now ^= 1) {
            more = take(pair[now ^ 1]);  // known before this item runs, so that its memory is fetched meanwhile
            task.append_next(pair[now], pair[now ^ 1]);
            task.run_item(pair[now]);
        }
    };
    parallel((int)(items < step.threads ? items : step.threads), body);
}

// The rows of a step, which `each` gives to what it is passed: (row, token, keys, chosen ones).
template <class T, class Each>
static void run_rows(Context& context, const Step& step, const Spec& spec, const Call& call, Each&& each) {
    DecodeRow* rows = context.items.get<DecodeRow>(step.num_tokens);
    const int64_t budget = kPartialBytes / (int64_t)sizeof(float) / (spec.num_kv * spec.group * (spec.value_dim + 2));
    int64_t count = 0, parts = 0;
    auto add = [&](int64_t i, int64_t token, int kv_len, const int32_t* chosen = nullptr) {
        DecodeRow& row = rows[count++];
        row.row = i;
        row.token = token;
        row.first_key = spec.window && kv_len > spec.window ? (int)(kv_len - spec.window) : 0;
        row.num_keys = kv_len - row.first_key;
        row.parts = (row.num_keys + kPartition - 1) / kPartition;
        row.first_part = parts;
        row.chosen = chosen;
        parts += row.parts;
        if (parts < budget) return;
        run_group<T>(context, step, spec, call, rows, count);
        count = parts = 0;
    };
    each(add);
    if (count) run_group<T>(context, step, spec, call, rows, count);
}

template <class T>
void decode_rows(Context& context, const Step& step, const Spec& spec, const Call& call) {
    run_rows<T>(context, step, spec, call, [&](auto&& add) {
        for (int64_t i = 0; i < step.num_decode; ++i) add(i, step.cu_q[i], step.kv_len[i]);
        for (int64_t i = step.num_decode; i < step.num_rows; ++i)
            for (int j = step.num_prompt_queries[i]; j < step.q_len[i]; ++j)
                add(i, step.cu_q[i] + j, step.kv_len[i] - step.q_len[i] + j + 1);
    });
}

// Rows of one query each, which is rotated, and of `width` keys each, which are in the cache; chosen: [rows, width].
template <class T>
static void attend_chosen(Context* context, const Step* step, const Spec* spec, const Call* call, const int32_t* chosen,
                          int64_t width) {
    run_rows<T>(*context, *step, *spec, *call, [&](auto&& add) {
        for (int64_t i = 0; i < step->num_rows; ++i) add(i, i, (int)width, chosen + i * width);
    });
}

template void decode_rows<float>(Context&, const Step&, const Spec&, const Call&);
template void decode_rows<bf16>(Context&, const Step&, const Spec&, const Call&);

// How single queries choose keys by the index keys of a paged cache; mirrored in native_sparse.py.
struct Choice {
    int64_t count, heads, dim, relu, top_k;  // count: queries, each of which sees more than top_k keys
    const void* q;                           // rotated, [count, heads, dim]
    const float* weights;                    // [count, heads]
    const int32_t *num_keys, *table;         // of each query, and its row of the block table
    int64_t table_stride;
    const void* keys;                        // the first index key
    int64_t key_stride, block_size;
    int32_t* chosen;                         // [count, top_k] positions, ascending
    int64_t threads;
};

// Scores of n keys, the first of which is at position `first` of the query's sequence.
template <class T>
static void index_scores(const Choice& choice, int64_t query, int first, int n, float* scores) {
    using Q = typename Arithmetic<T>::Q;
    const int dim = (int)choice.dim, padded = (n + 15) / 16 * 16;
    const int32_t* table = choice.table + query * choice.table_stride;
    const T* at[kPartition + kFar];
    for (int t = 0; t < n; ++t) {
        const int64_t position = first + t, block = table[position / choice.block_size];
        at[t] = (const T*)choice.keys + (block * choice.block_size + position % choice.block_size) * choice.key_stride;
    }
    for (int t = n; t < padded + kFar; ++t) at[t] = at[n - 1];
    float total[kPartition] = {}, part[kLanes][kPartition + W];
    Q q[kLanes * kMaxHeadDim];
    for (int64_t head = 0; head < choice.heads; head += kLanes) {
        const int lanes = choice.heads - head < kLanes ? (int)(choice.heads - head) : kLanes;
        const T* from = (const T*)choice.q + (query * choice.heads + head) * dim;
        if constexpr (sizeof(Q) == sizeof(T))
            std::memcpy(q, from, lanes * dim * sizeof(T));
        else
            for (int i = 0; i < lanes * dim; i += W) store((float*)q + i, load(from + i));
        auto score = [&](auto count) {
            Arithmetic<T>::template score<decltype(count)::value>(q, at, at + kFar, 0, 0, padded, dim, part);
        };
        switch (lanes) {
            case 1: score(std::integral_constant<int, 1>{}); break;
            case 2: score(std::integral_constant<int, 2>{}); break;
            case 3: score(std::integral_constant<int, 3>{}); break;
            default: score(std::integral_constant<int, 4>{});
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const vf weight = splat(choice.weights[query * choice.heads + head + lane]);
            for (int t = 0; t < padded; t += W) {
                const vf s = load(part[lane] + t);
                store(total + t, fma_of(weight, choice.relu ? vmax(vf{}, s) : s, load(total + t)));
            }
        }
    }
    std::memcpy(scores, total, n * sizeof(float));
}

// Positions of the top_k highest of n scores; of equal ones the earlier. `order` has room for n.
static void take_highest(const float* scores, int n, int top_k, uint32_t* order, int32_t* chosen) {
    auto ordinal = [&](int t) -> uint32_t {  // in the order of scores, and above them NaN, which has none
        if (scores[t] != scores[t]) return ~0u;
        uint32_t bits;
        std::memcpy(&bits, scores + t, sizeof bits);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    };
    for (int t = 0; t < n; ++t) order[t] = ordinal(t);
    std::nth_element(order, order + top_k - 1, order + n, [](uint32_t a, uint32_t b) { return a > b; });
    const uint32_t least = order[top_k - 1];
    int equal = top_k;
    for (int i = 0; i < top_k; ++i) equal -= order[i] > least;
    for (int t = 0, to = 0; to < top_k; ++t) {
        const uint32_t own = ordinal(t);
        if (own > least || (own == least && equal-- > 0)) chosen[to++] = t;
    }
}

template <class T>
static void choose_keys(Context* context, const Choice* choice) {
    const int64_t budget = kPartialBytes / (int64_t)sizeof(float);
    for (int64_t begin = 0; begin < choice->count;) {
        int64_t end = begin, widest = 0;  // queries whose scores fit, at the place of the longest each
        for (; end < choice->count; ++end) {
            const int64_t keys = choice->num_keys[end] > widest ? choice->num_keys[end] : widest;
            if (end > begin && keys * (end + 1 - begin) > budget) break;
            widest = keys;
        }
        const int64_t queries = end - begin, parts = (widest + kPartition - 1) / kPartition;
        float* scores = context->partials.get<float>(queries * widest);
        parallel_ranges((int)choice->threads, queries * parts, [&](int64_t from, int64_t to) {
            for (int64_t item = from; item < to; ++item) {
                const int64_t query = begin + item / parts, first = item % parts * kPartition;
                const int64_t left = choice->num_keys[query] - first, n = left < kPartition ? left : kPartition;
                if (n > 0) index_scores<T>(*choice, query, (int)first, (int)n, scores + item / parts * widest + first);
            }
        });
        uint32_t* orders = context->packed.get<uint32_t>(choice->threads * widest);
        int64_t next = 0;
        auto take = [&](int thread, int) {
            for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < queries;)
                take_highest(scores + i * widest, choice->num_keys[begin + i], (int)choice->top_k, orders + thread * widest,
                             choice->chosen + (begin + i) * choice->top_k);
        };
        parallel((int)(queries < choice->threads ? queries : choice->threads), take);
        begin = end;
    }
}

}  // namespace mi

using namespace mi;

extern "C" {

void mi_attend_chosen_f32(Context* context, const Step* step, const Spec* spec, const Call* call, const int32_t* chosen,
                          int64_t width) {
    attend_chosen<float>(context, step, spec, call, chosen, width);
}
void mi_attend_chosen_bf16(Context* context, const Step* step, const Spec* spec, const Call* call, const int32_t* chosen,
                           int64_t width) {
    attend_chosen<bf16>(context, step, spec, call, chosen, width);
}
void mi_choose_keys_f32(Context* context, const Choice* choice) { choose_keys<float>(context, choice); }
void mi_choose_keys_bf16(Context* context, const Choice* choice) { choose_keys<bf16>(context, choice); }
}

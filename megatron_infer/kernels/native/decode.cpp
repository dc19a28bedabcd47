// Paged attention of output positions, one query at a time: decode rows, and slices that recompute drawn tokens.
//
// Work is divided into items (row, partition of the context, kv head); a free thread takes the next item. The heads of a
// group share one pass over keys and values. The partitions of a context depend on its length alone, so a row's result
// does not depend on the rest of the batch. A row of one partition is written directly; otherwise the thread that
// finishes the last partition of a (row, head) merges all of them in order.
#include <type_traits>

#include "attention.h"

namespace mi {

constexpr int kPartition = 256;  // keys of an item
constexpr int kLanes = 4;        // heads of a group handled in one pass
constexpr int kStretch = 32;     // keys that all heads of an item read before any head reads the next
constexpr int kNear = 16;        // keys fetched into L1 ahead of use
constexpr int kFar = 64;         // keys fetched into L2 ahead of use
constexpr int kItemHeads = 16;   // most query heads of an item
constexpr int64_t kPartialBytes = 1 << 25;  // rows are processed in groups whose partial results fit in about this much
constexpr float kMasked = -1e30f;

// Queries stay bf16 where the CPU multiplies bf16 pairs, and become fp32 elsewhere.
template <class T>
struct Query {
    using type = float;
};
#if MI_BF16_DOT
template <>
struct Query<bf16> {
    using type = bf16;
};
#endif

// Prefetches into L2 rows from .. to of an item's memory: its n keys, then its n values, in address order. Heads are read 128
// bytes out of many, so the hardware sees no stream, and L1 alone cannot keep enough lines in flight: worth 1.6x.
template <class T>
inline void fetch(const T* const* keys, ptrdiff_t to_value, int n, int from, int to, int64_t offset, int span) {
    to = to < 2 * n ? to : 2 * n;
    for (int t = from; t < to; ++t) {
        const T* at = t < n ? keys[t] : keys[t - n] + to_value;
        for (int i = 0; i < span; i += 64 / (int)sizeof(T)) __builtin_prefetch(at + offset + i, 0, 2);
        asm volatile("" ::: "memory");  // a function of prefetches only looks pure and would be removed
    }
}

// scores[g][t] = query g . key t for t in begin .. end; G is 1..4. Keys come 16 / (G rounded up to a power of 2) at a time.
template <int G, class Q, class T>
static void score(const Q* q, const T* const* keys, int64_t head_offset, int begin, int end, int last, int dim,
                  float (*scores)[kPartition + W]) {
    constexpr int kSlots = G == 1 ? 1 : G == 2 ? 2 : 4, kKeys = 16 / kSlots;
    for (int t = begin; t < end; t += kKeys) {
        const T* key[kKeys];
        for (int r = 0; r < kKeys; ++r) key[r] = keys[t + r < last ? t + r : last] + head_offset;
        for (int r = 0; r < kKeys; ++r) {
            const int ahead = t + kNear + r < last ? t + kNear + r : last;
            for (int i = 0; i < dim; i += 64 / (int)sizeof(T)) __builtin_prefetch(keys[ahead] + head_offset + i);
        }
        vf acc[16] = {};
        if constexpr (sizeof(Q) == sizeof(float)) {
            for (int i = 0; i < dim; i += W) {
                vf qv[G];
                for (int g = 0; g < G; ++g) qv[g] = load(q + g * dim + i);
                for (int r = 0; r < kKeys; ++r) {
                    vf kv = load(key[r] + i);
                    for (int g = 0; g < G; ++g) acc[g * kKeys + r] = fma_of(qv[g], kv, acc[g * kKeys + r]);
                }
            }
        } else {
#if MI_BF16_DOT
            int i = 0;
            for (; i + 32 <= dim; i += 32) {
                __m512bh qv[G];
                for (int g = 0; g < G; ++g) qv[g] = (__m512bh)_mm512_loadu_si512(q + g * dim + i);
                for (int r = 0; r < kKeys; ++r) {
                    __m512bh kv = (__m512bh)_mm512_loadu_si512(key[r] + i);
                    for (int g = 0; g < G; ++g)
                        acc[g * kKeys + r] = (vf)_mm512_dpbf16_ps((__m512)acc[g * kKeys + r], qv[g], kv);
                }
            }
            if (i < dim) {  // 16 dims left
                for (int r = 0; r < kKeys; ++r) {
                    __m512bh kv = (__m512bh)_mm512_maskz_loadu_epi16(0xffff, key[r] + i);
                    for (int g = 0; g < G; ++g) {
                        __m512bh qv = (__m512bh)_mm512_maskz_loadu_epi16(0xffff, q + g * dim + i);
                        acc[g * kKeys + r] = (vf)_mm512_dpbf16_ps((__m512)acc[g * kKeys + r], qv, kv);
                    }
                }
            }
#endif
        }
        float sums[16];
        sums_of(acc, sums);
        for (int g = 0; g < G; ++g) std::memcpy(&scores[g][t], sums + g * kKeys, kKeys * sizeof(float));
    }
}

// acc[g][from ..] += sum over t in begin .. end of weights[g][t] * value t.
template <int G, int NV, class T>
static void mix(const T* const* keys, ptrdiff_t to_value, int begin, int end, int last, int from,
                const float (*weights)[kPartition + W], float* acc, int dim) {
    vf sum[G][NV];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < NV; ++i) sum[g][i] = load(acc + g * dim + from + i * W);
    for (int t = begin; t < end; ++t) {
        const T* ahead = keys[t + kNear < last ? t + kNear : last] + to_value + from;
        for (int i = 0; i < NV * W; i += 64 / (int)sizeof(T)) __builtin_prefetch(ahead + i);
        const T* value = keys[t] + to_value + from;
        vf v[NV];
        for (int i = 0; i < NV; ++i) v[i] = load(value + i * W);
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < NV; ++i) sum[g][i] = fma_of(splat(weights[g][t]), v[i], sum[g][i]);
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < NV; ++i) store(acc + g * dim + from + i * W, sum[g][i]);
}

template <int G, class T>
static void mix_all(const T* const* keys, ptrdiff_t to_value, int begin, int end, int last, int dim,
                    const float (*weights)[kPartition + W], float* acc) {
    constexpr int kWide = W == 16 ? 4 : 2;
    int from = 0;
    for (; from + kWide * W <= dim; from += kWide * W)
        mix<G, kWide>(keys, to_value, begin, end, last, from, weights, acc, dim);
    for (; from < dim; from += W) mix<G, 1>(keys, to_value, begin, end, last, from, weights, acc, dim);
}

// Scores of n keys -> unnormalised weights e^(scale (s - top)); returns scale * top and their sum.
static void soften(float* s, int n, float scale, float* top, float* mass) {
    const int padded = (n + W - 1) / W * W;
    for (int t = n; t < padded; ++t) s[t] = kMasked;
    vf best = splat(kMasked);
    for (int t = 0; t < padded; t += W) best = vmax(load(s + t), best);
    const float highest = max_of(best);
    vf sum = {};
    for (int t = 0; t < padded; t += W) {
        vf e = exp_of((load(s + t) - highest) * scale);
        store(s + t, e);
        sum += e;
    }
    *top = highest * scale;
    *mass = sum_of(sum);
}

struct DecodeRow {  // one query; a slice has one for each of its output positions
    int64_t row, token, first_part;
    int first_key, num_keys, parts;
};

template <class T>
struct DecodeTask {
    using Q = typename Query<T>::type;
    const Step& step;
    const Spec& spec;
    const Call& call;
    const DecodeRow* rows;
    float* partials;
    int* arrivals;
    int64_t chunks, chunk_heads;  // items of a (row, part), query heads of an item

    float* partial_of(const DecodeRow& row, int part, int64_t head) const {
        const int64_t heads = spec.num_kv * spec.group;
        return partials + ((row.first_part + part) * heads + head) * (spec.head_dim + 2);
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
    void run_item(const DecodeRow& row, int part, int64_t first, int heads) const {
        const int dim = (int)spec.head_dim, group = (int)spec.group;
        // Equal partitions, so that the last one is not short.
        const int begin = row.first_key + (int)((int64_t)row.num_keys * part / row.parts);
        const int end = row.first_key + (int)((int64_t)row.num_keys * (part + 1) / row.parts);
        const int n = end - begin;
        if (part == row.parts - 1 && row.row < step.num_decode)  // slices are appended before: see attend()
            for (int64_t kv = first / group; kv * group < first + heads; ++kv) append<T>(step, spec, call, row.token, kv);

        const T* keys[kPartition];
        const int32_t* table = step.block_table + step.table_row[row.row] * step.table_stride;
        const int64_t block_size = spec.block_size, key_stride = spec.num_kv * dim;
        int64_t column = begin / block_size, offset = begin % block_size;
        for (int t = 0; t < n;) {
            const T* at = (const T*)call.keys + (table[column] * block_size + offset) * key_stride;
            for (; offset < block_size && t < n; ++offset, ++t, at += key_stride) keys[t] = at;
            offset = 0;
            ++column;
        }
        const ptrdiff_t to_value = (const T*)call.values - (const T*)call.keys;

        Q q[kItemHeads * kMaxHeadDim];
        float acc[kItemHeads * kMaxHeadDim], scores[kItemHeads][kPartition + W], top[kItemHeads], mass[kItemHeads];
        for (int h = 0; h < heads; ++h) {
            const int64_t kv = (first + h) / group, lane = (first + h) % group;
            load_query((const T*)call.q + row.token * call.q_token + kv * call.q_kv + lane * call.q_group, row.token,
                       q + h * dim);
        }
        const int64_t low = first / group * dim, high = ((first + heads - 1) / group + 1) * dim;
        fetch(keys, to_value, n, 0, kFar, low, (int)(high - low));
        auto ahead_of = [&](int from) {
            fetch(keys, to_value, n, from + kFar, from + kFar + kStretch, low, (int)(high - low));
        };
        each_lanes(first, heads, n, [&](auto lanes, int h, int64_t head_offset, int from, int to) {
            if (h == 0) ahead_of(from);
            score<decltype(lanes)::value>(q + h * dim, keys, head_offset, from, to, n - 1, dim, scores + h);
        });
        for (int h = 0; h < heads; ++h) soften(scores[h], n, (float)spec.scale, top + h, mass + h);
        std::memset(acc, 0, heads * dim * sizeof(float));
        each_lanes(first, heads, n, [&](auto lanes, int h, int64_t head_offset, int from, int to) {
            if (h == 0) ahead_of(n + from);
            mix_all<decltype(lanes)::value>(keys, to_value + head_offset, from, to, n - 1, dim, scores + h, acc + h * dim);
        });

        const int64_t all = spec.num_kv * group;
        if (row.parts == 1) {
            T* out = (T*)call.out + (row.token * all + first) * dim;
            for (int h = 0; h < heads; ++h)
                for (int d = 0; d < dim; d += W) store(out + h * dim + d, load(acc + h * dim + d) * (1.0f / mass[h]));
            return;
        }
        for (int h = 0; h < heads; ++h) {
            float* partial = partial_of(row, part, first + h);
            std::memcpy(partial, acc + h * dim, dim * sizeof(float));
            partial[dim] = top[h];
            partial[dim + 1] = mass[h];
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
                const int64_t offset = kv * spec.head_dim;
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
        const int dim = (int)spec.head_dim;
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
            for (int d = 0; d < dim; d += W) store(out + d, load(acc + d) * (1.0f / mass));
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
    float* partials = merged ? context.partials.get<float>(parts * heads * (spec.head_dim + 2)) : nullptr;
    int* arrivals = context.arrivals.get<int>(count * chunks);
    std::memset(arrivals, 0, count * chunks * sizeof(int));
    DecodeTask<T> task{step, spec, call, rows, partials, arrivals, chunks, chunk_heads};
    int64_t next = 0;
    auto body = [&](int, int) {
        int64_t at = 0;  // item numbers only grow, so the next row is not before this one
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED), part = item / chunks;
            if (part >= parts) return;
            while (at + 1 < count && rows[at + 1].first_part <= part) ++at;
            const int64_t first = item % chunks * chunk_heads;
            const int64_t left = heads - first;
            task.run_item(rows[at], (int)(part - rows[at].first_part), first, (int)(left < chunk_heads ? left : chunk_heads));
        }
    };
    const int64_t items = parts * chunks;
    parallel((int)(items < step.threads ? items : step.threads), body);
}

template <class T>
void decode_rows(Context& context, const Step& step, const Spec& spec, const Call& call) {
    DecodeRow* rows = context.items.get<DecodeRow>(step.num_tokens);
    const int64_t budget = kPartialBytes / (int64_t)sizeof(float) / (spec.num_kv * spec.group * (spec.head_dim + 2));
    int64_t count = 0, parts = 0;
    auto add = [&](int64_t i, int64_t token, int kv_len) {
        DecodeRow& row = rows[count++];
        row.row = i;
        row.token = token;
        row.first_key = spec.window && kv_len > spec.window ? (int)(kv_len - spec.window) : 0;
        row.num_keys = kv_len - row.first_key;
        row.parts = (row.num_keys + kPartition - 1) / kPartition;
        row.first_part = parts;
        parts += row.parts;
        if (parts < budget) return;
        run_group<T>(context, step, spec, call, rows, count);
        count = parts = 0;
    };
    for (int64_t i = 0; i < step.num_decode; ++i) add(i, step.cu_q[i], step.kv_len[i]);
    for (int64_t i = step.num_decode; i < step.num_rows; ++i)
        for (int j = step.num_prompt_queries[i]; j < step.q_len[i]; ++j)
            add(i, step.cu_q[i] + j, step.kv_len[i] - step.q_len[i] + j + 1);
    if (count) run_group<T>(context, step, spec, call, rows, count);
}

template void decode_rows<float>(Context&, const Step&, const Spec&, const Call&);
template void decode_rows<bf16>(Context&, const Step&, const Spec&, const Call&);

}  // namespace mi

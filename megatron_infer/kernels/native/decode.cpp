// Paged attention of rows with one query.
//
// Work is cut into items (row, partition of the context, kv head); a thread takes the next item when it is free. The
// heads of a group share one pass over keys and values. How a context is cut depends on its length alone, so a row's
// result does not depend on what else is in the batch. A row of one partition is written directly; otherwise the thread
// that finishes the last partition of a (row, head) merges all of them in order.
#include "attention.h"

namespace mi {

constexpr int kPartition = 256;  // keys an item looks at
constexpr int kLanes = 4;        // heads of a group handled in one pass
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

// out[i] = sum of the lanes of v[i], for 16 vectors: a tree of shuffles costs 3 instructions a sum.
inline void sums_of(const vf* v, float* out) {
#if defined(__AVX512F__)
    __m512 a[16], b[8];
    for (int i = 0; i < 16; ++i) a[i] = (__m512)v[i];
    for (int i = 0; i < 8; ++i)  // 128-bit lanes: i, i, i + 8, i + 8
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
    __m512 c[4], d[2];
    for (int i = 0; i < 4; ++i)  // 128-bit lanes: i, i + 8, i + 4, i + 12
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i)
        d[i] = _mm512_add_ps(_mm512_unpacklo_ps(c[i], c[i + 2]), _mm512_unpackhi_ps(c[i], c[i + 2]));
    __m512 e = _mm512_add_ps(_mm512_unpacklo_ps(d[0], d[1]), _mm512_unpackhi_ps(d[0], d[1]));
    // Within a lane the two unpacks leave 0, 1, 2, 3; the lanes are put in order last.
    e = _mm512_shuffle_f32x4(e, e, 0xd8);
    std::memcpy(out, &e, sizeof e);
#else
    for (int i = 0; i < 16; ++i) out[i] = sum_of(v[i]);
#endif
}

// scores[g][t] = query g . key t for n keys; G is 1..4. Keys come 16 / (G rounded up to a power of 2) at a time.
template <int G, class Q, class T>
static void score(const Q* q, int q_stride, const T* const* keys, int n, int dim, float (*scores)[kPartition + W]) {
    constexpr int kSlots = G == 1 ? 1 : G == 2 ? 2 : 4, kKeys = 16 / kSlots;
    for (int t = 0; t < n; t += kKeys) {
        const T* key[kKeys];
        for (int r = 0; r < kKeys; ++r) key[r] = keys[t + r < n ? t + r : n - 1];
        for (int r = 0; r < kKeys; ++r) {
            const T* ahead = keys[t + 2 * kKeys + r < n ? t + 2 * kKeys + r : n - 1];
            for (int i = 0; i < dim; i += 64 / (int)sizeof(T)) __builtin_prefetch(ahead + i);
        }
        vf acc[16] = {};
        if constexpr (sizeof(Q) == sizeof(float)) {
            for (int i = 0; i < dim; i += W) {
                vf qv[G];
                for (int g = 0; g < G; ++g) qv[g] = load(q + g * q_stride + i);
                for (int r = 0; r < kKeys; ++r) {
                    vf kv = load(key[r] + i);
                    for (int g = 0; g < G; ++g) acc[g * kKeys + r] += qv[g] * kv;
                }
            }
        } else {
#if MI_BF16_DOT
            int i = 0;
            for (; i + 32 <= dim; i += 32) {
                __m512bh qv[G];
                for (int g = 0; g < G; ++g) qv[g] = (__m512bh)_mm512_loadu_si512(q + g * q_stride + i);
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
                        __m512bh qv = (__m512bh)_mm512_maskz_loadu_epi16(0xffff, q + g * q_stride + i);
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

// acc[g] = sum over t of weights[g][t] * value t.
template <int G, int NV, class T>
static void mix(const T* const* keys, ptrdiff_t to_value, int n, int from, const float (*weights)[kPartition + W], float* acc,
                int acc_stride) {
    vf sum[G][NV] = {};
    for (int t = 0; t < n; ++t) {
        const T* value = keys[t] + to_value + from;
        __builtin_prefetch(keys[t + 8 < n ? t + 8 : n - 1] + to_value + from);
        vf v[NV];
        for (int i = 0; i < NV; ++i) v[i] = load(value + i * W);
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < NV; ++i) sum[g][i] += weights[g][t] * v[i];
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < NV; ++i) store(acc + g * acc_stride + from + i * W, sum[g][i]);
}

// Softmax-weighted values of one partition for G heads: acc unnormalised, top = largest score, mass = sum of weights.
template <int G, class T>
static void attend_partition(const typename Query<T>::type* q, int q_stride, const T* const* keys, ptrdiff_t to_value, int n,
                             int dim, float scale, float* acc, float* top, float* mass) {
    float scores[G][kPartition + W];
    score<G>(q, q_stride, keys, n, dim, scores);
    for (int g = 0; g < G; ++g) {
        float* s = scores[g];
        int padded = (n + W - 1) / W * W;
        for (int t = n; t < padded; ++t) s[t] = kMasked;
        vf best = splat(kMasked);
        for (int t = 0; t < padded; t += W) best = vmax(load(s + t), best);
        top[g] = max_of(best);
        vf sum = {};
        for (int t = 0; t < padded; t += W) {
            vf e = exp_of((load(s + t) - top[g]) * scale);
            store(s + t, e);
            sum += e;
        }
        mass[g] = sum_of(sum);
        top[g] *= scale;
    }
    constexpr int kWide = W == 16 ? 4 : 2;
    int from = 0;
    for (; from + kWide * W <= dim; from += kWide * W) mix<G, kWide>(keys, to_value, n, from, scores, acc, dim);
    for (; from < dim; from += W) mix<G, 1>(keys, to_value, n, from, scores, acc, dim);
}

struct DecodeRow {
    int64_t row, token, first_item;
    int first_key, num_keys, parts;
};

template <class T>
struct DecodeTask {
    using Q = typename Query<T>::type;
    Context& context;
    const Step& step;
    const Spec& spec;
    const Call& call;
    const DecodeRow* rows;
    int64_t num_rows;
    float* partials;
    int* arrivals;

    int64_t partial_size() const { return spec.group * (spec.head_dim + 2); }

    void load_query(const T* src, int64_t token, Q* dst) const {
        T turned[kMaxHeadDim];
        rotate_head(step, spec, token, src, turned);
        if constexpr (sizeof(Q) == sizeof(T))
            std::memcpy(dst, turned, spec.head_dim * sizeof(T));
        else
            for (int64_t i = 0; i < spec.head_dim; i += W) store((float*)dst + i, load(turned + i));
    }

    void run_item(const DecodeRow& row, int part, int64_t head) const {
        const int dim = (int)spec.head_dim, group = (int)spec.group;
        // Equal partitions: the last one is not a stub.
        const int begin = row.first_key + (int)((int64_t)row.num_keys * part / row.parts);
        const int end = row.first_key + (int)((int64_t)row.num_keys * (part + 1) / row.parts);
        const int n = end - begin;
        if (part == row.parts - 1) append<T>(step, spec, call, row.token, head);

        const T* keys[kPartition];
        const int32_t* table = step.block_table + step.table_row[row.row] * step.table_stride;
        const int64_t block_size = spec.block_size, key_stride = spec.num_kv * dim;
        int64_t column = begin / block_size, offset = begin % block_size;
        for (int t = 0; t < n;) {
            const T* at = (const T*)call.keys + ((table[column] * block_size + offset) * spec.num_kv + head) * dim;
            for (; offset < block_size && t < n; ++offset, ++t, at += key_stride) keys[t] = at;
            offset = 0;
            ++column;
        }
        const ptrdiff_t to_value = (const T*)call.values - (const T*)call.keys;

        const float scale = (float)spec.scale;
        float* partial =
            row.parts == 1 ? nullptr : partials + (row.first_item + part * spec.num_kv + head) * partial_size();
        for (int g = 0; g < group; g += kLanes) {
            Q q[kLanes * kMaxHeadDim];
            float acc[kLanes * kMaxHeadDim], top[kLanes], mass[kLanes];
            const int lanes = group - g < kLanes ? group - g : kLanes;
            for (int i = 0; i < lanes; ++i) {
                const T* src = (const T*)call.q + row.token * call.q_token + head * call.q_kv + (g + i) * call.q_group;
                load_query(src, row.token, q + i * dim);
            }
            switch (lanes) {
                case 1: attend_partition<1>(q, dim, keys, to_value, n, dim, scale, acc, top, mass); break;
                case 2: attend_partition<2>(q, dim, keys, to_value, n, dim, scale, acc, top, mass); break;
                case 3: attend_partition<3>(q, dim, keys, to_value, n, dim, scale, acc, top, mass); break;
                default: attend_partition<4>(q, dim, keys, to_value, n, dim, scale, acc, top, mass);
            }
            for (int i = 0; i < lanes; ++i) {
                if (partial) {
                    std::memcpy(partial + (g + i) * dim, acc + i * dim, dim * sizeof(float));
                    partial[group * dim + g + i] = top[i];
                    partial[group * dim + group + g + i] = mass[i];
                } else {
                    T* out = (T*)call.out + (row.token * spec.num_kv * group + head * group + g + i) * dim;
                    for (int d = 0; d < dim; d += W) store(out + d, load(acc + i * dim + d) * (1.0f / mass[i]));
                }
            }
        }
        if (partial) {
            int* arrived = arrivals + (&row - rows) * spec.num_kv + head;
            if (__atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL) == row.parts) merge(row, head);
        }
    }

    void merge(const DecodeRow& row, int64_t head) const {
        const int dim = (int)spec.head_dim, group = (int)spec.group;
        auto partial = [&](int part) {
            return partials + (row.first_item + part * spec.num_kv + head) * partial_size();
        };
        for (int g = 0; g < group; ++g) {
            float top = kMasked, mass = 0, acc[kMaxHeadDim] = {};
            for (int p = 0; p < row.parts; ++p)
                if (partial(p)[group * dim + g] > top) top = partial(p)[group * dim + g];
            for (int p = 0; p < row.parts; ++p) {
                const float* from = partial(p);
                const float weight = __builtin_expf(from[group * dim + g] - top);
                mass += weight * from[group * dim + group + g];
                for (int d = 0; d < dim; d += W) store(acc + d, load(acc + d) + load(from + g * dim + d) * weight);
            }
            T* out = (T*)call.out + (row.token * spec.num_kv * group + head * group + g) * dim;
            for (int d = 0; d < dim; d += W) store(out + d, load(acc + d) * (1.0f / mass));
        }
    }
};

template <class T>
void decode_rows(Context& context, const Step& step, const Spec& spec, const Call& call) {
    DecodeRow* rows = context.items.get<DecodeRow>(step.num_rows);
    int64_t count = 0, items = 0, merged = 0;
    for (int64_t i = 0; i < step.num_rows; ++i) {
        if (step.q_len[i] != 1) continue;
        DecodeRow& row = rows[count++];
        const int kv_len = step.kv_len[i];
        row.row = i;
        row.token = step.cu_q[i];
        row.first_key = spec.window && kv_len > spec.window ? (int)(kv_len - spec.window) : 0;
        row.num_keys = kv_len - row.first_key;
        row.parts = (row.num_keys + kPartition - 1) / kPartition;
        row.first_item = items;
        items += row.parts * spec.num_kv;
        merged += row.parts > 1;
    }
    if (!count) return;
    float* partials = merged ? context.partials.get<float>(items * spec.group * (spec.head_dim + 2)) : nullptr;
    int* arrivals = context.arrivals.get<int>(count * spec.num_kv);
    std::memset(arrivals, 0, count * spec.num_kv * sizeof(int));
    DecodeTask<T> task{context, step, spec, call, rows, count, partials, arrivals};
    int64_t next = 0;
    auto body = [&](int, int) {
        int64_t at = 0;  // items only grow, so the row of the next one lies ahead
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (item >= items) return;
            while (at + 1 < count && rows[at + 1].first_item <= item) ++at;
            const int64_t within = item - rows[at].first_item;
            task.run_item(rows[at], (int)(within / spec.num_kv), within % spec.num_kv);
        }
    };
    parallel((int)(items < step.threads ? items : step.threads), body);
}

template void decode_rows<float>(Context&, const Step&, const Spec&, const Call&);
template void decode_rows<bf16>(Context&, const Step&, const Spec&, const Call&);

}  // namespace mi

// y += scale * B(A x) for each token with its own adapter: A [rank, inner] by rows, B in blocks of kColumns of its rows, each
// [ranks, kColumns]. A block has only the ranks with entries there: where queries, keys and values have an A each, most of B
// is zero.
//
// Tokens come sorted by adapter slot; eight of one slot share the reads of its matrices. A token's sums have the same order
// in every group, so that its result does not depend on the other tokens: A x is one vector of partial sums per rank, summed
// by a shuffle tree; B h adds the ranks in order to each entry. Everything is fp32, and y is rounded once.
#include "layer_ops.h"

#include <vector>

namespace mi {

struct LoraWeights {  // mirrored in native_lora.py; pointers are to entries of each slot
    const void *const *a, *const *b;   // A, and B in blocks
    const int32_t* const* ranges;      // [blocks of B, 2]: the first rank with entries there, and the one behind the last
    const int32_t* rank;               // 0: the slot has no pair
    const float* scale;
    int64_t max_rank, inner, rows;
};

struct LoraStep {
    const int32_t *token, *slot;  // of the tokens with an adapter, sorted by slot
    int64_t num_tokens, threads;
};

struct LoraBlock {  // ranks of a pair that is packed; mirrored in native_lora.py, as is LoraPacking
    const void *a, *b;   // [rank, inner] and [num_rows, rank]
    const int32_t* row;  // the linear's row of each row of b; null: the same
    int64_t rank, num_rows, a_is_bf16, b_is_bf16;
};

struct LoraPacking {  // a pair: ranges and num_ranks are written first, then a, b and is_finite
    const LoraBlock* blocks;
    int64_t num_blocks, rank, inner, rows;
    int32_t* ranges;
    void *a, *b;
    int64_t num_ranks;  // of all blocks of B
    int64_t is_finite;
};

namespace {

constexpr int kTokens = 8, kQuad = 4;  // tokens of one slot that share the reads of its B; tokens and ranks of a tile
constexpr int64_t kColumns = 32;        // rows of the linear in a block of B (COLUMNS in native_lora.py)
constexpr int64_t kAhead = 16 * kColumns;  // entries that B is read ahead

struct Two {
    vf a, b;
};

inline Two load_two(const float* p) { return {load(p), load(p + W)}; }
inline void store_two(float* p, Two v) {
    store(p, v.a);
    store(p + W, v.b);
}

#if MI_BF16_DOT
inline vf times(vf acc, const bf16* a, const bf16* b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
inline vf times_part(vf acc, const bf16* a, const bf16* b, int n) {
    const __mmask32 mask = ((uint64_t)1 << n) - 1;
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_maskz_loadu_epi16(mask, a),
                                (__m512bh)_mm512_maskz_loadu_epi16(mask, b));
}
constexpr int width_of(const bf16*) { return 2 * W; }
// The even entries and the odd ones: fewer instructions than two halves.
inline Two load_two(const bf16* p) {
    const __m512i v = _mm512_loadu_si512(p);
    return {(vf)_mm512_slli_epi32(v, 16), (vf)_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000))};
}
inline void store_two(bf16* p, Two v) {
    const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v.a));
    const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v.b));
    _mm512_storeu_si512(p, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
}
#else
inline vf times(vf acc, const bf16* a, const bf16* b) { return fma_of(load(a), load(b), acc); }
inline vf times_part(vf acc, const bf16* a, const bf16* b, int n) { return fma_of(load_part(a, n), load_part(b, n), acc); }
constexpr int width_of(const bf16*) { return W; }
inline Two load_two(const bf16* p) { return {load(p), load(p + W)}; }
inline void store_two(bf16* p, Two v) {
    store(p, v.a);
    store(p + W, v.b);
}
#endif
inline vf times(vf acc, const float* a, const float* b) { return fma_of(load(a), load(b), acc); }
inline vf times_part(vf acc, const float* a, const float* b, int n) { return fma_of(load_part(a, n), load_part(b, n), acc); }
constexpr int width_of(const float*) { return W; }

#if defined(__AVX512F__)
inline vf broadcast(const float* p) { return (vf)_mm512_set1_ps(*p); }
#else
inline vf broadcast(const float* p) { return splat(*p); }
#endif

template <class T>
struct Lora {
    const LoraWeights& weights;
    const LoraStep& step;
    T* y;
    const T* x;
    int64_t y_stride, x_stride;

    static constexpr int width = width_of((const T*)nullptr);

    // h[rank][c] = scale * A x of C tokens, for the ranks first .. first + kQuad; the rows behind them are read ahead.
    template <int C>
    void down(const T* a, const T* const* in, float scale, int first, int rank, float* h) const {
        const int64_t inner = weights.inner;
        const T* row[kQuad];
        for (int r = 0; r < kQuad; ++r) row[r] = a + (first + r < rank ? first + r : first) * inner;
        vf acc[kQuad * kQuad] = {};
        int64_t i = 0;
        for (; i + width <= inner; i += width)
            for (int r = 0; r < kQuad; ++r) {
                __builtin_prefetch(row[r] + kQuad * inner + i, 0, 3);
                for (int c = 0; c < C; ++c) acc[c * kQuad + r] = times(acc[c * kQuad + r], row[r] + i, in[c] + i);
            }
        if (i < inner)
            for (int r = 0; r < kQuad; ++r)
                for (int c = 0; c < C; ++c)
                    acc[c * kQuad + r] = times_part(acc[c * kQuad + r], row[r] + i, in[c] + i, (int)(inner - i));
        float sums[kQuad * kQuad];
        sums_of(acc, sums);
        for (int c = 0; c < C; ++c)
            for (int r = 0; r < kQuad && first + r < rank; ++r) h[(first + r) * kTokens + c] = scale * sums[c * kQuad + r];
    }

    // y += B h of C tokens, kColumns entries at a time, of the ranks that have any.
    template <int C>
    void up(const T* b, const int32_t* range, T* const* out, const float* h) const {
        for (int64_t first = 0; first < weights.rows; first += kColumns, range += 2) {
            const int count = range[1] - range[0];
            if (count) block<C>(b, count, first, out, h + range[0] * kTokens);
            b += count * kColumns;
        }
    }

    template <int C>
    void block(const T* b, int count, int64_t first, T* const* out, const float* h) const {
        const int64_t end = first + kColumns < weights.rows ? first + kColumns : weights.rows;
        int64_t i = first;
        for (; i + 2 * W <= end; i += 2 * W) {
            Two sum[C] = {};
            for (int r = 0; r < count; ++r) {
                const T* row = b + r * kColumns + i - first;
                __builtin_prefetch(row + kAhead, 0, 3);
                const Two both = load_two(row);
                for (int c = 0; c < C; ++c) {
                    const vf scaled = broadcast(h + r * kTokens + c);
                    sum[c].a = fma_of(both.a, scaled, sum[c].a);
                    sum[c].b = fma_of(both.b, scaled, sum[c].b);
                }
            }
            for (int c = 0; c < C; ++c) {
                const Two own = load_two(out[c] + i);
                store_two(out[c] + i, {own.a + sum[c].a, own.b + sum[c].b});
            }
        }
        for (; i < end; i += W) {
            vf sum[C] = {};
            for (int r = 0; r < count; ++r) {
                const vf own = load(b + r * kColumns + i - first);
                for (int c = 0; c < C; ++c) sum[c] = fma_of(own, broadcast(h + r * kTokens + c), sum[c]);
            }
            for (int c = 0; c < C; ++c) store_any(out[c], load_any(out[c], i, end) + sum[c], i, end);
        }
    }

    template <int C>
    void tokens(int64_t first, float* h) const {
        const int slot = step.slot[first], rank = weights.rank[slot];
        const float scale = weights.scale[slot];
        const T* a = (const T*)weights.a[slot];
        const T* in[C];
        T* out[C];
        for (int c = 0; c < C; ++c) {
            in[c] = x + step.token[first + c] * x_stride;
            out[c] = y + step.token[first + c] * y_stride;
        }
        for (int r = 0; r < rank; r += kQuad) {
            if constexpr (C > kQuad) {
                down<kQuad>(a, in, scale, r, rank, h);
                down<C - kQuad>(a, in + kQuad, scale, r, rank, h + kQuad);
            } else {
                down<C>(a, in, scale, r, rank, h);
            }
        }
        up<C>((const T*)weights.b[slot], weights.ranges[slot], out, h);
    }

    template <int C>
    void tokens_of(int count, int64_t first, float* h) const {
        if constexpr (C > 0) {
            if (count == C) return tokens<C>(first, h);
            tokens_of<C - 1>(count, first, h);
        }
    }

    void run(int64_t begin, int64_t end) const {
        thread_local Buffer buffer;
        float* h = buffer.get<float>(weights.max_rank * kTokens);
        for (int64_t first = begin; first < end;) {
            const int slot = step.slot[first];
            int count = 1;
            while (count < kTokens && first + count < end && step.slot[first + count] == slot) ++count;
            if (weights.rank[slot]) tokens_of<kTokens>(count, first, h);
            first += count;
        }
    }
};

// Below so many multiplications one thread is done before a second one has begun.
constexpr int64_t kSerial = 60000;

template <class T>
void lora(const LoraWeights& weights, const LoraStep& step, T* y, const T* x, int64_t y_stride, int64_t x_stride) {
    const Lora<T> task{weights, step, y, x, y_stride, x_stride};
    int64_t work = 0;
    for (int64_t i = 0; i < step.num_tokens && work < kSerial; ++i)
        work += weights.rank[step.slot[i]] * (weights.inner + weights.rows);
    if (!work) return;
    if (work < kSerial || step.num_tokens < 2) return task.run(0, step.num_tokens);
    parallel_ranges((int)step.threads, step.num_tokens, [&](int64_t begin, int64_t end) { task.run(begin, end); });
}

// ------------------------------------------------------------------ packing

template <class T, class S>
inline T rounded(S x) {
    T t;
    set(t, to_float(x));
    return t;
}
inline bool is_wild(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return (u & 0x7f800000u) == 0x7f800000u;
}
inline bool is_wild(bf16 x) { return (x.bits & 0x7f80u) == 0x7f80u; }

template <class T>
struct Packing {
    LoraPacking& to;

    int64_t num_columns() const { return (to.rows + kColumns - 1) / kColumns; }

    // The ranks of each block of B from the first to the last one with an entry that is not zero in T.
    void find_ranges() {
        for (int64_t c = 0; c < num_columns(); ++c) {
            to.ranges[2 * c] = (int32_t)to.rank;
            to.ranges[2 * c + 1] = 0;
        }
        int64_t first = 0;
        for (int64_t i = 0; i < to.num_blocks; first += to.blocks[i++].rank) {
            const LoraBlock& block = to.blocks[i];
            block.b_is_bf16 ? widen(block, (const bf16*)block.b, first) : widen(block, (const float*)block.b, first);
        }
        to.num_ranks = 0;
        for (int64_t c = 0; c < num_columns(); ++c) {
            int32_t* range = to.ranges + 2 * c;
            if (!range[1]) range[0] = 0;
            to.num_ranks += range[1] - range[0];
        }
    }

    template <class S>
    void widen(const LoraBlock& block, const S* b, int64_t first) {
        const auto is_zero = [](S x) { return to_float(rounded<T>(x)) == 0; };
        for (int64_t i = 0; i < block.num_rows; ++i, b += block.rank) {
            int64_t begin = 0, end = block.rank;
            while (begin < end && is_zero(b[begin])) ++begin;
            if (begin == end) continue;
            while (is_zero(b[end - 1])) --end;
            int32_t* range = to.ranges + (block.row ? block.row[i] : i) / kColumns * 2;
            if (first + begin < range[0]) range[0] = (int32_t)(first + begin);
            if (first + end > range[1]) range[1] = (int32_t)(first + end);
        }
    }

    void write() {
        std::memset(to.b, 0, to.num_ranks * kColumns * sizeof(T));
        std::vector<T*> column(num_columns());  // where a block of B would have its rank 0
        T* at = (T*)to.b;
        for (int64_t c = 0; c < num_columns(); ++c) {
            const int32_t* range = to.ranges + 2 * c;
            column[c] = at - range[0] * kColumns;
            at += (range[1] - range[0]) * kColumns;
        }
        bool wild = false;
        T* a = (T*)to.a;
        int64_t first = 0;
        for (int64_t i = 0; i < to.num_blocks; ++i) {
            const LoraBlock& block = to.blocks[i];
            const int64_t count = block.rank * to.inner;
            wild |= block.a_is_bf16 ? copy(a, (const bf16*)block.a, count) : copy(a, (const float*)block.a, count);
            wild |= block.b_is_bf16 ? turn(column.data(), block, (const bf16*)block.b, first)
                                    : turn(column.data(), block, (const float*)block.b, first);
            a += count;
            first += block.rank;
        }
        to.is_finite = !wild;
    }

    template <class S>
    static bool copy(T* out, const S* in, int64_t count) {
        int wild = 0;
        for (int64_t i = 0; i < count; ++i) {
            out[i] = rounded<T>(in[i]);
            wild |= is_wild(out[i]);
        }
        return wild;
    }

    template <class S>
    bool turn(T* const* column, const LoraBlock& block, const S* b, int64_t first) const {
        int wild = 0;
        for (int64_t i = 0; i < block.num_rows; ++i, b += block.rank) {
            const int64_t row = block.row ? block.row[i] : i;
            const int32_t* range = to.ranges + row / kColumns * 2;
            T* out = column[row / kColumns] + first * kColumns + row % kColumns;
            const int64_t begin = range[0] > first ? range[0] - first : 0;
            const int64_t end = range[1] < first + block.rank ? range[1] - first : block.rank;
            for (int64_t r = begin; r < end; ++r) {
                const T entry = rounded<T>(b[r]);
                out[r * kColumns] = entry;
                wild |= is_wild(entry);
            }
        }
        return wild;
    }
};

}  // namespace
}  // namespace mi

using namespace mi;

extern "C" {
void mi_lora_f32(const LoraWeights* weights, const LoraStep* step, void* y, const void* x, int64_t y_stride,
                 int64_t x_stride) {
    lora(*weights, *step, (float*)y, (const float*)x, y_stride, x_stride);
}
void mi_lora_bf16(const LoraWeights* weights, const LoraStep* step, void* y, const void* x, int64_t y_stride,
                  int64_t x_stride) {
    lora(*weights, *step, (bf16*)y, (const bf16*)x, y_stride, x_stride);
}

#define MI_LORA_PACKING(SUFFIX, T)                                                         \
    void mi_lora_find_ranges_##SUFFIX(LoraPacking* packings, int64_t count) {              \
        for (int64_t i = 0; i < count; ++i) Packing<T>{packings[i]}.find_ranges();         \
    }                                                                                      \
    void mi_lora_pack_##SUFFIX(LoraPacking* packings, int64_t count) {                     \
        for (int64_t i = 0; i < count; ++i) Packing<T>{packings[i]}.write();               \
    }
MI_LORA_PACKING(f32, float)
MI_LORA_PACKING(bf16, bf16)
}

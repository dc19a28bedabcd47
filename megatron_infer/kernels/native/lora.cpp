// y += scale * B(A x) for each token with its own adapter: A [rank, inner] by rows, B transposed [rank, rows].
//
// Tokens come sorted by adapter slot; four of one slot share the reads of its matrices. A token's sums have the same order
// in every group, so that its result does not depend on the other tokens: A x is one vector of partial sums per rank, summed
// by a shuffle tree; B h adds the ranks in order to each entry. Everything is fp32, and y is rounded once.
#include "layer_ops.h"

namespace mi {

struct LoraWeights {
    const void *a, *b;  // [slots, max_rank, inner] and [slots, max_rank, rows]
    const int32_t* rank;
    const float* scale;
    int64_t max_rank, inner, rows;
};

struct LoraStep {
    const int32_t *token, *slot;  // of the tokens with an adapter, sorted by slot
    int64_t num_tokens, threads;
};

namespace {

constexpr int kTokens = 4, kRanks = 4;

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
#else
inline vf times(vf acc, const bf16* a, const bf16* b) { return fma_of(load(a), load(b), acc); }
inline vf times_part(vf acc, const bf16* a, const bf16* b, int n) { return fma_of(load_part(a, n), load_part(b, n), acc); }
constexpr int width_of(const bf16*) { return W; }
#endif
inline vf times(vf acc, const float* a, const float* b) { return fma_of(load(a), load(b), acc); }
inline vf times_part(vf acc, const float* a, const float* b, int n) { return fma_of(load_part(a, n), load_part(b, n), acc); }
constexpr int width_of(const float*) { return W; }

template <class T>
struct Lora {
    const LoraWeights& weights;
    const LoraStep& step;
    T* y;
    const T* x;
    int64_t y_stride, x_stride;

    static constexpr int width = width_of((const T*)nullptr);

    // h[rank][c] = scale * A x of C tokens.
    template <int C>
    void down(const T* a, const T* const* in, float scale, int rank, float* h) const {
        const int64_t inner = weights.inner;
        for (int first = 0; first < rank; first += kRanks) {
            const T* row[kRanks];
            for (int r = 0; r < kRanks; ++r) row[r] = a + (first + r < rank ? first + r : first) * inner;
            vf acc[kTokens * kRanks] = {};
            int64_t i = 0;
            for (; i + width <= inner; i += width)
                for (int r = 0; r < kRanks; ++r)
                    for (int c = 0; c < C; ++c) acc[c * kRanks + r] = times(acc[c * kRanks + r], row[r] + i, in[c] + i);
            if (i < inner)
                for (int r = 0; r < kRanks; ++r)
                    for (int c = 0; c < C; ++c)
                        acc[c * kRanks + r] = times_part(acc[c * kRanks + r], row[r] + i, in[c] + i, (int)(inner - i));
            float sums[kTokens * kRanks];
            sums_of(acc, sums);
            for (int c = 0; c < C; ++c)
                for (int r = 0; r < kRanks && first + r < rank; ++r) h[(first + r) * kTokens + c] = scale * sums[c * kRanks + r];
        }
    }

    // y += B h of C tokens, two vectors of entries at a time.
    template <int C>
    void up(const T* b, T* const* out, int rank, const float* h) const {
        const int64_t rows = weights.rows;
        int64_t i = 0;
        for (; i + 2 * W <= rows; i += 2 * W) {
            vf low[C] = {}, high[C] = {};
            for (int r = 0; r < rank; ++r) {
                const vf b0 = load(b + r * rows + i), b1 = load(b + r * rows + i + W);
                for (int c = 0; c < C; ++c) {
                    const vf scaled = splat(h[r * kTokens + c]);
                    low[c] = fma_of(b0, scaled, low[c]);
                    high[c] = fma_of(b1, scaled, high[c]);
                }
            }
            for (int c = 0; c < C; ++c) {
                store(out[c] + i, load(out[c] + i) + low[c]);
                store(out[c] + i + W, load(out[c] + i + W) + high[c]);
            }
        }
        for (; i < rows; i += W) {
            vf sum[C] = {};
            for (int r = 0; r < rank; ++r) {
                const vf b0 = load_any(b + r * rows, i, rows);
                for (int c = 0; c < C; ++c) sum[c] = fma_of(b0, splat(h[r * kTokens + c]), sum[c]);
            }
            for (int c = 0; c < C; ++c) store_any(out[c], load_any(out[c], i, rows) + sum[c], i, rows);
        }
    }

    template <int C>
    void tokens(int64_t first, float* h) const {
        const int slot = step.slot[first], rank = weights.rank[slot];
        const T* in[C];
        T* out[C];
        for (int c = 0; c < C; ++c) {
            in[c] = x + step.token[first + c] * x_stride;
            out[c] = y + step.token[first + c] * y_stride;
        }
        down<C>((const T*)weights.a + slot * weights.max_rank * weights.inner, in, weights.scale[slot], rank, h);
        up<C>((const T*)weights.b + slot * weights.max_rank * weights.rows, out, rank, h);
    }

    void run(int64_t begin, int64_t end) const {
        thread_local Buffer buffer;
        float* h = buffer.get<float>(weights.max_rank * kTokens);
        for (int64_t first = begin; first < end;) {
            const int slot = step.slot[first];
            int count = 1;
            while (count < kTokens && first + count < end && step.slot[first + count] == slot) ++count;
            if (weights.rank[slot]) switch (count) {
                    case 1: tokens<1>(first, h); break;
                    case 2: tokens<2>(first, h); break;
                    case 3: tokens<3>(first, h); break;
                    default: tokens<4>(first, h);
                }
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
    const int64_t groups = (step.num_tokens + kTokens - 1) / kTokens;
    if (work < kSerial || groups < 2) return task.run(0, step.num_tokens);
    parallel_ranges((int)step.threads, groups, [&](int64_t begin, int64_t end) {
        task.run(begin * kTokens, end * kTokens < step.num_tokens ? end * kTokens : step.num_tokens);
    });
}

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
}

// y = x . weight^T + bias for few tokens from the live weight: bounded by the time to read it.
//
// A thread takes stretches of weight rows. A tile of R rows by C tokens keeps one vector of partial sums per entry; the
// vectors are summed by a shuffle tree at the end of the rows. Each entry is summed in the same order in every tile shape,
// so a token's result does not depend on the number of tokens.
#include "common.h"

namespace mi {

constexpr int kTile = 16;               // entries of a tile: the argument of sums_of
constexpr int64_t kAheadBytes = 4096;   // one stream is read this far ahead, into L2
constexpr int64_t kStripBytes = 12288;  // rows that stay in L1 while all tokens are multiplied by them

#if MI_BF16_DOT
inline vf dot(vf acc, const bf16* a, const bf16* b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
inline vf dot_part(vf acc, const bf16* a, const bf16* b, int n) {
    const __mmask32 mask = ((uint64_t)1 << n) - 1;
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_maskz_loadu_epi16(mask, a),
                                (__m512bh)_mm512_maskz_loadu_epi16(mask, b));
}
constexpr int step_of(const bf16*) { return 2 * W; }
#else
inline vf dot(vf acc, const bf16* a, const bf16* b) { return fma_of(load(a), load(b), acc); }
inline vf dot_part(vf acc, const bf16* a, const bf16* b, int n) { return fma_of(load_part(a, n), load_part(b, n), acc); }
constexpr int step_of(const bf16*) { return W; }
#endif
inline vf dot(vf acc, const float* a, const float* b) { return fma_of(load(a), load(b), acc); }
inline vf dot_part(vf acc, const float* a, const float* b, int n) { return fma_of(load_part(a, n), load_part(b, n), acc); }
constexpr int step_of(const float*) { return W; }

template <class T>
struct Linear {
    const T *x, *weight, *bias;
    Outputs<T> out;
    int64_t x_stride, tokens, inner, rows, out_stride;

    static constexpr int step = step_of((const T*)nullptr);

    // Entries (token .. token + C) x (row .. row + R), all advancing together along the inner dimension. Meanwhile num_ahead
    // rows from `next` are fetched into L2: spread over the arithmetic, these reads take no extra time.
    template <int R, int C>
    void block(int64_t token, int64_t row, int count, int64_t next, int num_ahead) const {
        const T *w[R], *in[C];
        for (int r = 0; r < R; ++r) w[r] = weight + (row + (r < count ? r : 0)) * inner;
        for (int c = 0; c < C; ++c) in[c] = x + (token + c) * x_stride;
        const T* ahead = weight + next * inner;
        vf acc[kTile] = {};
        int64_t i = 0;
        for (; i + step <= inner; i += step) {
            for (int a = 0; a < num_ahead; ++a) __builtin_prefetch(ahead + a * inner + i, 0, 2);
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) acc[c * R + r] = dot(acc[c * R + r], w[r] + i, in[c] + i);
        }
        if (i < inner)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) acc[c * R + r] = dot_part(acc[c * R + r], w[r] + i, in[c] + i, (int)(inner - i));
        finish<R, C>(acc, token, row, count);
    }

    // The same entries one row after the other: the weight is one stream, which the hardware prefetches.
    template <int R, int C>
    void stream(int64_t row, int count) const {
        vf acc[kTile] = {};
        for (int r = 0; r < R; ++r) {
            const T* w = weight + (row + (r < count ? r : 0)) * inner;
            vf sum[C] = {};
            int64_t i = 0;
            for (; i + step <= inner; i += step) {
                __builtin_prefetch(w + i + kAheadBytes / (int64_t)sizeof(T), 0, 2);
                for (int c = 0; c < C; ++c) sum[c] = dot(sum[c], w + i, x + c * x_stride + i);
            }
            if (i < inner)
                for (int c = 0; c < C; ++c) sum[c] = dot_part(sum[c], w + i, x + c * x_stride + i, (int)(inner - i));
            for (int c = 0; c < C; ++c) acc[c * R + r] = sum[c];
        }
        finish<R, C>(acc, 0, row, count);
    }

    template <int R, int C>
    void finish(const vf* acc, int64_t token, int64_t row, int count) const {
        float sums[kTile];
        sums_of(acc, sums);
        if (bias)
            for (int c = 0; c < C; ++c)
                for (int r = 0; r < count; ++r) sums[c * R + r] += to_float(bias[row + r]);
        if (out.is_fp32) return put<R, C>((float*)out.to, sums, token, row, count);
        T rounded[kTile];
        for (int j = 0; j < kTile; j += W) store(rounded + j, load(sums + j));
        put<R, C>((T*)out.to, rounded, token, row, count);
    }

    template <int R, int C, class Out>
    void put(Out* to, const Out* from, int64_t token, int64_t row, int count) const {
        for (int c = 0; c < C; ++c) std::memcpy(to + (token + c) * out_stride + row, from + c * R, count * sizeof(Out));
    }

    template <int R, int C>
    void stream_rows(int64_t begin, int64_t end) const {
        for (int64_t row = begin; row < end; row += R) stream<R, C>(row, (int)(end - row < R ? end - row : R));
    }

    // Strips of rows stay in L1 while all tokens are multiplied by them, four at a time.
    void block_rows(int64_t begin, int64_t end) const {
        const int64_t fitting = kStripBytes / (inner * (int64_t)sizeof(T)) / 4 * 4;
        const int strip = (int)(fitting < 4 ? 4 : fitting > 32 ? 32 : fitting);
        for (int64_t first = begin; first < end; first += strip) {
            const int64_t stop = first + strip < end ? first + strip : end;
            const int64_t limit = stop + strip < rows ? stop + strip : rows;
            int64_t next = stop;
            const int blocks = (int)((tokens + 3) / 4) * ((strip + 3) / 4), each = (strip + blocks - 1) / blocks;
            for (int64_t token = 0; token < tokens; token += 4)
                for (int64_t row = first; row < stop; row += 4) {
                    const int count = (int)(stop - row < 4 ? stop - row : 4);
                    const int ahead = (int)(limit - next < each ? limit - next : each);
                    switch (tokens - token) {
                        case 1: block<4, 1>(token, row, count, next, ahead); break;
                        case 2: block<4, 2>(token, row, count, next, ahead); break;
                        case 3: block<4, 3>(token, row, count, next, ahead); break;
                        default: block<4, 4>(token, row, count, next, ahead);
                    }
                    next += ahead;
                }
        }
    }

    void run(int64_t begin, int64_t end) const {
        switch (tokens) {
            case 1: return stream_rows<16, 1>(begin, end);
            case 2: return stream_rows<8, 2>(begin, end);
            case 3: return stream_rows<5, 3>(begin, end);
            case 4: return stream_rows<4, 4>(begin, end);
            default: block_rows(begin, end);
        }
    }
};

template <class T>
static void linear(const Linear<T>& task, int threads) {
    // Stretches small enough to balance two threads of unequal speed, large enough to be read as a stream.
    int64_t size = task.rows / (threads * 8);
    size = size < 16 ? 16 : (size + 15) / 16 * 16;
    const int64_t stretches = (task.rows + size - 1) / size;
    int64_t next = 0;
    auto body = [&](int, int) {
        for (;;) {
            const int64_t begin = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) * size;
            if (begin >= task.rows) return;
            task.run(begin, begin + size < task.rows ? begin + size : task.rows);
        }
    };
    parallel((int)(stretches < threads ? stretches : threads), body);
}

// Products of latent attention (kernels/torch/latent_products.py), from the live weight of each head. A thread takes a head
// and a stretch of tokens.
constexpr int64_t kHeadTokens = 96;

template <class Body>
static void per_head(int64_t tokens, int64_t heads, int threads, Body&& body) {
    const int64_t stretches = (tokens + kHeadTokens - 1) / kHeadTokens, items = heads * stretches;
    int64_t next = 0;
    auto take = [&](int, int) {
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (item >= items) return;
            const int64_t first = item % stretches * kHeadTokens;
            body(item / stretches, first, first + kHeadTokens < tokens ? kHeadTokens : tokens - first);
        }
    };
    parallel((int)(items < threads ? items : threads), take);
}

// out[c][0 .. V W) = sum over i of x[c][i] . weight[i][0 .. V W), in the order of i.
template <class T, int C, int V>
static void columns_of(const T* x, int64_t x_stride, const T* weight, int64_t inner, int64_t columns, T* out, int64_t out_stride) {
    vf acc[C][V] = {};
    for (int64_t i = 0; i < inner; ++i, weight += columns) {
        vf w[V];
        for (int v = 0; v < V; ++v) w[v] = load(weight + v * W);
        for (int c = 0; c < C; ++c)
            for (int v = 0; v < V; ++v) acc[c][v] = fma_of(splat(to_float(x[c * x_stride + i])), w[v], acc[c][v]);
    }
    for (int c = 0; c < C; ++c)
        for (int v = 0; v < V; ++v) store(out + c * out_stride + v * W, acc[c][v]);
}

template <class T, int V>
static void columns_of_tokens(const T* x, int64_t x_stride, const T* weight, int64_t inner, int64_t columns, T* out,
                              int64_t out_stride, int64_t tokens) {
    int64_t t = 0;
    for (; t + 6 <= tokens; t += 6)
        columns_of<T, 6, V>(x + t * x_stride, x_stride, weight, inner, columns, out + t * out_stride, out_stride);
    for (; t + 2 <= tokens; t += 2)
        columns_of<T, 2, V>(x + t * x_stride, x_stride, weight, inner, columns, out + t * out_stride, out_stride);
    if (t < tokens) columns_of<T, 1, V>(x + t * x_stride, x_stride, weight, inner, columns, out + t * out_stride, out_stride);
}

// [tokens][heads][width + rotary] -> [tokens][heads][rotary + latent]. latent is a multiple of 16.
template <class T>
static void into_latent(const T* x, const T* weight, int64_t weight_head, T* out, int64_t tokens, int64_t heads, int64_t width,
                        int64_t rotary, int64_t latent, int threads) {
    constexpr int kVectors = W == 16 ? 4 : 2;
    const int64_t x_stride = heads * (width + rotary), out_stride = heads * (rotary + latent);
    per_head(tokens, heads, threads, [&](int64_t head, int64_t first, int64_t count) {
        const T* from = x + first * x_stride + head * (width + rotary);
        T* to = out + first * out_stride + head * (rotary + latent);
        for (int64_t t = 0; t < count; ++t) std::memcpy(to + t * out_stride, from + t * x_stride + width, rotary * sizeof(T));
        to += rotary;
        const T* w = weight + head * weight_head;
        int64_t l = 0;
        for (; l + kVectors * W <= latent; l += kVectors * W)
            columns_of_tokens<T, kVectors>(from, x_stride, w + l, width, latent, to + l, out_stride, count);
        for (; l < latent; l += W) columns_of_tokens<T, 1>(from, x_stride, w + l, width, latent, to + l, out_stride, count);
    });
}

// [tokens][heads][latent] -> [tokens][heads][width].
template <class T>
static void out_of_latent(const T* x, const T* weight, int64_t weight_head, T* out, int64_t tokens, int64_t heads, int64_t width,
                          int64_t latent, bool is_fp32, int threads) {
    const int64_t x_stride = heads * latent, out_stride = heads * width;
    per_head(tokens, heads, threads, [&](int64_t head, int64_t first, int64_t count) {
        T* to = out + first * out_stride + head * width;
        Linear<T>{x + first * x_stride + head * latent, weight + head * weight_head, nullptr, {to, is_fp32}, x_stride, count,
                  latent, width, out_stride}
            .run(0, width);
    });
}

// The same for float64, which only small routers have: eight sums per entry, added in order.
static void linear_f64(const double* x, const double* weight, const double* bias, double* out, int64_t tokens, int64_t inner,
                       int64_t rows, int threads) {
    parallel_ranges(threads, tokens, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            for (int64_t row = 0; row < rows; ++row) {
                const double *a = x + token * inner, *b = weight + row * inner;
                double lanes[8] = {}, sum = 0;
                for (int64_t i = 0; i < inner; ++i) lanes[i % 8] = __builtin_fma(a[i], b[i], lanes[i % 8]);
                for (double lane : lanes) sum += lane;
                out[token * rows + row] = bias ? sum + bias[row] : sum;
            }
    });
}

}  // namespace mi

using namespace mi;

extern "C" {

#define MI_LINEAR(SUFFIX, T, IS_FP32)                                                                                   \
    void mi_linear_##SUFFIX(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out,            \
                            int64_t tokens, int64_t inner, int64_t rows, int threads) {                                 \
        linear(Linear<T>{(const T*)x, (const T*)weight, (const T*)bias, {out, IS_FP32}, x_stride, tokens, inner, rows, rows}, \
               threads);                                                                                                \
    }
#define MI_LATENT(SUFFIX, T, IS_FP32)                                                                                    \
    void mi_into_latent_##SUFFIX(const void* x, const void* weight, int64_t weight_head, void* out, int64_t tokens,        \
                                 int64_t heads, int64_t width, int64_t rotary, int64_t latent, int threads) {             \
        into_latent((const T*)x, (const T*)weight, weight_head, (T*)out, tokens, heads, width, rotary, latent, threads);   \
    }                                                                                                                   \
    void mi_out_of_latent_##SUFFIX(const void* x, const void* weight, int64_t weight_head, void* out, int64_t tokens,      \
                                   int64_t heads, int64_t width, int64_t, int64_t latent, int threads) {                  \
        out_of_latent((const T*)x, (const T*)weight, weight_head, (T*)out, tokens, heads, width, latent, IS_FP32, threads); \
    }
MI_LATENT(f32, float, true)
MI_LATENT(bf16, bf16, false)
MI_LINEAR(f32, float, true)
MI_LINEAR(bf16, bf16, false)
MI_LINEAR(bf16_f32, bf16, true)
void mi_linear_f64(const void* x, const void* weight, const void* bias, void* out, int64_t tokens, int64_t inner, int64_t rows,
                   int threads) {
    linear_f64((const double*)x, (const double*)weight, (const double*)bias, (double*)out, tokens, inner, rows, threads);
}
}

// Norms, activations, argmax and checksum over contiguous rows.
#include "checksum.h"
#include "layer_ops.h"

namespace mi {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kSerialElements = 32768;

static int threads_for(int64_t elements, int threads) { return elements < kSerialElements ? 1 : threads; }

// out = norm(x + residual) * weight, or * (weight + 1) of a zero-centred one; residual (may be null) becomes the rounded sum.
template <class T, class R>
static void normalize(const R* in, const T* weight, T* out, int64_t dim, float eps, float center) {
    vf squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vf v = load_any(in, i, dim);
        squares += v * v;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += W) 
        store_any(out, load_any(in, i, dim) * scale * (load_any(weight, i, dim) + center), i, dim);
}

template <class T, class R>
static void rms_norm(const T* x, R* residual, const T* weight, T* out, int64_t rows, int64_t dim, float eps,
                     bool zero_centered, int threads) {
    const float center = zero_centered ? 1.0f : 0.0f;
    parallel_ranges(threads_for(rows * dim, threads), rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* in = x + row * dim;
            if (!residual) {
                normalize(in, weight, out + row * dim, dim, eps, center);
                continue;
            }
            R* total = residual + row * dim;
            for (int64_t i = 0; i < dim; i += W) store_any(total, load_any(in, i, dim) + load_any(total, i, dim), i, dim);
            normalize(total, weight, out + row * dim, dim, eps, center);
        }
    });
}

// x / (1 + e^-x), as outputs of T need it: of bf16 to 1e-5, below its own rounding.
template <class T>
static vf silu(vf x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == sizeof(bf16)) {
        // 2^y of y = -x log2(e), which is kept below infinity, then 1 / (1 + 2^y) by a step of Newton's
        const vf y = (vf)_mm512_min_ps((__m512)splat(127.5f), (__m512)(x * -1.44269504088896f));
        const vf above = splat(1.0f) + exp2_of(y), near = (vf)_mm512_rcp14_ps((__m512)above);
        return x * (near * fma_of(-above, near, splat(2.0f)));
    }
#endif
    return x / (exp_of(-x) + 1.0f);
}

// The tanh approximation of x times the normal distribution below x.
static vf gelu(vf x) { return x * 0.5f * (tanh_of((x + x * x * x * 0.044715f) * 0.7978845608028654f) + 1.0f); }

// out = f(first half) * second half of each row.
template <class T, class F>
static void gate_mul(const T* x, T* out, int64_t rows, int64_t dim, int threads, F&& f) {
    parallel_ranges(threads_for(rows * dim, threads), rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* gate = x + row * 2 * dim;
            for (int64_t i = 0; i < dim; i += W) {
                vf g = load_any(gate, i, dim), up = load_any(gate + dim, i, dim);
                store_any(out + row * dim, f(g) * up, i, dim);
            }
        }
    });
}

constexpr int64_t kMostGroup = 16384;  // channels whose products one thread keeps on its stack

// out = norm(y * silu(gate)) * weight over each group of `group` channels; without a weight only the product.
template <class T>
static void gated_rms_norm(const T* y, const T* gate, int64_t gate_stride, const T* weight, T* out, int64_t rows,
                           int64_t dim, int64_t group, float eps, int threads) {
    parallel_ranges(threads_for(rows * dim, threads), rows, [&](int64_t begin, int64_t end) {
        alignas(64) float product[kMostGroup + W];
        for (int64_t row = begin; row < end; ++row)
            for (int64_t from = 0; from < dim; from += group) {
                const T *in = y + row * dim + from, *open = gate + row * gate_stride + from;
                T* to = out + row * dim + from;
                vf squares = {};
                for (int64_t i = 0; i < group; i += W) {
                    const vf g = load_any(open, i, group);
                    const vf v = g / (exp_of(-g) + 1.0f) * load_any(in, i, group);
                    squares = fma_of(v, v, squares);
                    if (weight)
                        store(product + i, v);
                    else
                        store_any(to, v, i, group);
                }
                if (!weight) continue;
                const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)group + eps);
                for (int64_t i = 0; i < group; i += W)
                    store_any(to, load(product + i) * scale * load_any(weight + from, i, group), i, group);
            }
    });
}

// out = x / (1 + e^-gate), a row of `dim` at a time; rows of the gate are gate_stride apart.
template <class T>
static void sigmoid_mul(const T* x, const T* gate, int64_t gate_stride, T* out, int64_t rows, int64_t dim, int threads) {
    parallel_ranges(threads_for(rows * dim, threads), rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            for (int64_t i = 0; i < dim; i += W) {
                const vf g = load_any(gate + row * gate_stride, i, dim);
                store_any(out + row * dim, load_any(x + row * dim, i, dim) / (exp_of(-g) + 1.0f), i, dim);
            }
    });
}

}  // namespace mi

using namespace mi;

extern "C" {

#define MI_ELEMENTWISE(SUFFIX, T)                                                                                    \
    void mi_rms_norm_##SUFFIX(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t dim, \
                              float eps, int zero_centered, int threads) {                                           \
        rms_norm((const T*)x, (T*)residual, (const T*)weight, (T*)out, rows, dim, eps, zero_centered, threads);      \
    }                                                                                                                \
    void mi_rms_norm_wide_##SUFFIX(const void* x, void* residual, const void* weight, void* out, int64_t rows,       \
                                   int64_t dim, float eps, int zero_centered, int threads) {                         \
        rms_norm((const T*)x, (float*)residual, (const T*)weight, (T*)out, rows, dim, eps, zero_centered, threads);  \
    }                                                                                                                \
    void mi_silu_mul_##SUFFIX(const void* x, void* out, int64_t rows, int64_t dim, int threads) {                    \
        gate_mul((const T*)x, (T*)out, rows, dim, threads, [](vf v) { return silu<T>(v); });                         \
    }                                                                                                                \
    void mi_gelu_mul_##SUFFIX(const void* x, void* out, int64_t rows, int64_t dim, int threads) {                    \
        gate_mul((const T*)x, (T*)out, rows, dim, threads, [](vf v) { return gelu(v); });                            \
    }                                                                                                                \
    void mi_gated_rms_norm_##SUFFIX(const void* y, const void* gate, int64_t gate_stride, const void* weight, void* out, \
                                    int64_t rows, int64_t dim, int64_t group, float eps, int threads) {              \
        gated_rms_norm((const T*)y, (const T*)gate, gate_stride, (const T*)weight, (T*)out, rows, dim, group, eps,   \
                       threads);                                                                                     \
    }                                                                                                                \
    void mi_sigmoid_mul_##SUFFIX(const void* x, const void* gate, int64_t gate_stride, void* out, int64_t rows,      \
                                 int64_t dim, int threads) {                                                         \
        sigmoid_mul((const T*)x, (const T*)gate, gate_stride, (T*)out, rows, dim, threads);                          \
    }
MI_ELEMENTWISE(f32, float)
MI_ELEMENTWISE(bf16, bf16)

// cap tanh(x / cap), in place.
void mi_softcap(float* x, int64_t n, float cap, int threads) {
    const float inner = 1.0f / cap;
    parallel_ranges(threads_for(n, threads), n, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += W) store_any(x, tanh_of(load_any(x, i, end) * inner) * cap, i, end);
    });
}

uint64_t mi_checksum(const void* data, int64_t bytes, int threads) {
    return checksum(data, bytes, threads, [](int64_t, int64_t) {});
}
}

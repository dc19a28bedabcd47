// y = x . weight^T + bias from a packed copy of the weight in 8 bits, see quantised_linear.h.
//
// A block has 8-bit codes, the nearest multiples of its scale, and the scale in fp16: the values of GGUF's q8_0. A panel
// holds in each block [8][W rows][4 codes] and [W rows] scales.
//
// The products also tell which outputs of the weight itself can be a token's largest: see Bounds.
#include <cmath>
#include <limits>

#include "quantised_linear.h"
#include "layer_ops.h"
#include "packed_weight.h"

namespace mi {

struct Int8 {
    static constexpr int kBlockBytes = (kInputs + 2) * W;
    vb codes[kGroups];
    vf scale;

    explicit Int8(const uint8_t* block) : scale(load_halves((const uint16_t*)(block + kInputs * W))) {
        for (int g = 0; g < kGroups; ++g) codes[g] = load_codes(block + g * kVector);
    }
    MI_INLINE vf add(vf sum, const Inputs& in) const {
        vi products = vi{} + in.start;
        for (int g = 0; g < kGroups; ++g) products = dot4(products, codes[g], in.code + 4 * g);
        return fma_of(__builtin_convertvector(products, vf), scale * splat(in.scale), sum);
    }
};

// fp16 of numbers >= 0, rounded up; NaN where it has none. The small ones are not computed as denormals of fp32, which a
// thread may flush to zero (torch.set_flush_denormal): weights below 0.0078 have such scales.
inline void store_halves(uint16_t* p, vf x) {
    const vf units = x * 0x1p24f;  // of the small ones
    const vi whole = __builtin_convertvector((x < 0x1p-14f) ? units : vf{}, vi);
    const vu small = (vu)(whole - (vi)(__builtin_convertvector(whole, vf) < units));
    const vu bits = ((vu)x + 0x1fffu) >> 13;  // with the exponents of fp32
    const vu half = (x < 0x1p-14f) ? small : bits - (112u << 10);
    const vh h = __builtin_convertvector((x <= 65504.0f) ? half : vu{} + 0x7e00u, vh);
    std::memcpy(p, &h, sizeof h);
}
template <class T>
static void pack_panel(const T* weight, uint8_t* out, int64_t inner, int64_t rows, int64_t panel) {
    const int64_t blocks = blocks_of(inner), from = panel * W, count = rows - from < W ? rows - from : W;
    uint8_t* codes = out + panel * panel_bytes<Int8>(inner);
    std::memset(codes + blocks * Int8::kBlockBytes, 0, panel_bytes<Int8>(inner) - blocks * Int8::kBlockBytes);
    for (int64_t b = 0; b < blocks; ++b, codes += Int8::kBlockBytes) {
        uint16_t* scales = (uint16_t*)(codes + kInputs * W);
        float most[W] = {}, factor[W];
        for (int r = 0; r < count; ++r) most[r] = Block<T>(weight + (from + r) * inner, b * kInputs, inner).largest();
        store_halves(scales, load(most) / kMostCode);
        const vf scale = load_halves(scales);
        store(factor, (scale > 0) ? 1 / scale : vf{});
        for (int r = 0; r < W; ++r) {
            int8_t row[kInputs];
            Block<T>(weight + (from + r) * inner, b * kInputs, r < count ? inner : 0).encode(factor[r], kOffset, row);
            for (int g = 0; g < kGroups; ++g) std::memcpy(codes + g * kVector + 4 * r, row + 4 * g, 4);
        }
    }
}

// Which rows of a weight can give a token's largest output, told by its copy in 8 bits. With x' and w' as they are coded,
//     | x.w - x'.w' |  <=  |x| |w - w'| + |x - x'| |w'|
// so a row whose output is at most below another's least output is not needed. `norms` has for each panel |w - w'| and
// |w'| of its W rows. Sums in fp32 and products of bf16 are rounded: `slack` of the norms' product is more than that.
struct Bounds {
    const float* norms;
    float *of_weight_error, *of_weight;  // [tokens]: factors of the norms
    vf* least;                           // [threads][tokens]: the largest of the least outputs
    float* most;                         // [panels][tokens]: the largest output, at most
    int64_t tokens, rows;

    template <class Value>
    void operator()(int thread, int64_t panel, int64_t token, int count, Value&& value) const {
        const vf error = load(norms + panel * 2 * W), norm = load(norms + (panel * 2 + 1) * W);
        const vf lowest = splat(-std::numeric_limits<float>::infinity());
        vi inside;
        for (int r = 0; r < W; ++r) inside[r] = r < rows - panel * W ? -1 : 0;
#pragma GCC unroll 16
        for (int m = 0; m < count; ++m) {
            const vf sum = value(m), bound = splat(of_weight_error[token + m]) * error + splat(of_weight[token + m]) * norm;
            vf& best = least[thread * tokens + token + m];
            best = vmax(inside ? sum - bound : lowest, best);
            most[panel * tokens + token + m] = max_or_nan(inside ? sum + bound : lowest);
        }
    }
    static float max_or_nan(vf v) {  // NaN beside a NaN
#if defined(__AVX512F__)
        const float most = _mm512_reduce_max_ps((__m512)v);
        return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) ? std::numeric_limits<float>::quiet_NaN() : most;
#else
        float most = v[0];
        for (int i = 1; i < W; ++i) most = most >= v[i] ? most : v[i];
        for (int i = 0; i < W; ++i) most = v[i] == v[i] ? most : v[i];
        return most;
#endif
    }
};

template <class T>
static float squares_of(const T* x, int64_t n) {
    vf sum{};
    for (int64_t i = 0; i < n; i += W) {
        const vf v = load_any(x, i, n);
        sum = fma_of(v, v, sum);
    }
    return sum_of(sum);
}

// The panels that can have the largest output of a token among the first `rows`, in order -> their number. Panel i of them
// can have that of the tokens whose bits are set in the ith words of `needs`.
template <class T>
static int64_t candidates(const T* x, int64_t x_stride, const uint8_t* panels, const float* norms, int32_t* found,
                          uint64_t* needs, int64_t tokens, int64_t inner, int64_t rows, int threads) {
    static thread_local Buffer buffer;
    const int64_t num_panels = (rows + W - 1) / W, own = (tokens + W - 1) / W * W, words = (tokens + 63) / 64;
    vf* least = (vf*)buffer.get<float>(threads * tokens * W + 3 * own + num_panels * tokens + W);
    float *of_error = (float*)(least + threads * tokens), *of_norm = of_error + own, *lowest = of_norm + own, *most = lowest + own;
    for (int64_t i = 0; i < threads * tokens; ++i) least[i] = splat(-std::numeric_limits<float>::infinity());
    const float slack = (float)(inner + 256) * 0x1p-22f, tiny = 1e-30f;
    auto coded = [&](int64_t token, const Inputs* blocks, int64_t pitch) {
        const T* in = x + token * x_stride;
        float errors = 0;
        for (int64_t i = 0; i < inner; i += kInputs, blocks += pitch) {
            float left[kInputs];
            for (int j = 0; j < kInputs; ++j) left[j] = i + j < inner ? to_float(in[i + j]) - (float)blocks->code[j] * blocks->scale : 0;
            errors += squares_of(left, kInputs);
        }
        const float norm = std::sqrt(squares_of(in, inner)) * (1 + slack);
        // Squares of smaller inputs vanish: nothing is known of their outputs.
        of_error[token] = norm < 1e-15f ? std::numeric_limits<float>::infinity() : norm + tiny;
        of_norm[token] = std::sqrt(errors) * (1 + slack) + slack * norm + tiny;
    };
    Bounds bounds{norms, of_error, of_norm, least, most, tokens, rows};
    multiply(x, x_stride, QuantisedLinear<Int8, Bounds>{nullptr, panels, tokens, inner, bounds}, rows, threads, coded);

    for (int64_t t = 0; t < tokens; ++t) {
        vf best = least[t];
        for (int i = 1; i < threads; ++i) best = vmax(least[i * tokens + t], best);
        const float most_of = max_of(best);
        lowest[t] = most_of - __builtin_fabsf(most_of) * 0x1p-22f - tiny;
    }
    int64_t count = 0;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const float* at_most = most + panel * tokens;
        uint64_t *own_needs = needs + count * words, any = 0;
        std::memset(own_needs, 0, words * sizeof(uint64_t));
        for (int64_t t = 0; t < tokens; t += W) {
            uint64_t mask = 0;
#if defined(__AVX512F__)
            mask = (uint16_t)~_mm512_cmp_ps_mask(_mm512_loadu_ps(at_most + t), _mm512_loadu_ps(lowest + t), _CMP_LT_OQ);
#else
            for (int i = 0; i < W; ++i) mask |= (uint64_t)!(at_most[t + i] < lowest[t + i]) << i;
#endif
            if (tokens - t < W) mask &= ((uint64_t)1 << (tokens - t)) - 1;
            own_needs[t / 64] |= mask << (t % 64);
            any |= mask;
        }
        found[count] = (int32_t)panel;
        count += any != 0;
    }
    return count;
}

// Entry i of the W rows of a panel in its own dtype.
inline vf panel_entry(const float* panel, int64_t i) { return load(panel + i * W); }
inline vf panel_entry(const bf16* panel, int64_t i) {  // two entries of a row lie together
    vu both;
    std::memcpy(&both, panel + i / 2 * 2 * W, sizeof both);
    return (vf)(i % 2 ? both & 0xffff0000u : both << 16);
}

// A weight's panels in 8 bits and `norms` of Bounds, from its packed copy in its own dtype.
template <class T>
static void code_panels(const void* packed, uint8_t* out, float* norms, int64_t inner, int64_t rows, int threads) {
    const bool compact = ((const PackedHeader*)packed)->is_compact;
    const uint8_t* panels = (const uint8_t*)packed + sizeof(PackedHeader);
    const int64_t bytes = panel_bytes_of<T>(compact, inner);
    parallel_ranges(threads, (rows + W - 1) / W, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const T* source = (const T*)(panels + panel * bytes);
#if MI_COMPACT
            if constexpr (sizeof(T) == sizeof(bf16))
                if (compact) {
                    static thread_local Buffer buffer;
                    expand(panels + panel * bytes, inner, buffer.get<bf16>(W * inner));
                    source = buffer.get<bf16>(W * inner);
                }
#endif
            uint8_t* codes = out + panel * panel_bytes<Int8>(inner);
            vf errors{}, squares{};
            for (int64_t i = 0; i < inner; i += kInputs, codes += Int8::kBlockBytes) {
                vf entry[kInputs];
                vu most{};
                for (int j = 0; j < kInputs; ++j) {
                    entry[j] = i + j < inner ? panel_entry(source, i + j) : vf{};
                    const vu bits = (vu)entry[j] & 0x7fffffffu;  // in the order of the values, NaN last
                    most = (bits > most) ? bits : most;
                }
                uint16_t* scales = (uint16_t*)(codes + kInputs * W);
                store_halves(scales, ((most < 0x7f800000u) ? (vf)most : splat(__builtin_nanf(""))) / kMostCode);
                const vf scale = load_halves(scales), factor = (scale > 0) ? 1 / scale : vf{}, magic = splat(12582912.0f);
                for (int g = 0; g < kGroups; ++g) {
                    vu four{};
                    for (int j = 0; j < 4; ++j) {
                        const vi code = (vi)fma_of(entry[4 * g + j], factor, magic) - (vi)magic;  // as code_of
                        const vf coded = __builtin_convertvector(code, vf) * scale, left = entry[4 * g + j] - coded;
                        four |= ((vu)(code + kOffset) & 0xffu) << (8 * j);
                        errors = fma_of(left, left, errors), squares = fma_of(coded, coded, squares);
                    }
                    std::memcpy(codes + g * kVector, &four, sizeof four);
                }
            }
            float *error = norms + panel * 2 * W, *norm = error + W;
            store(error, errors), store(norm, squares);
            for (int r = 0; r < 2 * W; ++r) error[r] = std::sqrt(error[r]) * 1.001f;
        }
    });
}

}  // namespace mi

using namespace mi;

extern "C" {

int64_t mi_int8_bytes(int64_t inner, int64_t rows) { return (rows + W - 1) / W * panel_bytes<Int8>(inner); }

#define MI_INT8(SUFFIX, T)                                                                                                 \
    uint64_t mi_int8_pack_##SUFFIX(const void* weight, void* out, int64_t inner, int64_t rows, int threads) {              \
        auto one = [=](int64_t panel) { pack_panel((const T*)weight, (uint8_t*)out, inner, rows, panel); };                \
        return pack((const T*)weight, inner, rows, threads, one);                                                          \
    }
MI_INT8(f32, float)
MI_INT8(bf16, bf16)

#define MI_INT8_LINEAR(SUFFIX, T, IS_FP32)                                                                                 \
    void mi_int8_linear_##SUFFIX(const void* x, int64_t x_stride, const void* panels, const void* bias, void* out,         \
                                 int64_t tokens, int64_t inner, int64_t rows, int threads) {                               \
        linear<Int8>((const T*)x, x_stride, (const uint8_t*)panels, (const T*)bias, Outputs<T>{out, IS_FP32}, tokens,      \
                     inner, rows, threads);                                                                                \
    }
MI_INT8_LINEAR(f32, float, true)
MI_INT8_LINEAR(bf16, bf16, false)
MI_INT8_LINEAR(bf16_f32, bf16, true)

int64_t mi_bounds_bytes(int64_t inner, int64_t rows) {
    return (rows + W - 1) / W * (panel_bytes<Int8>(inner) + 2 * W * (int64_t)sizeof(float));
}

// out: the panels in 8 bits, and behind them the norms.
#define MI_BOUNDS(SUFFIX, T)                                                                                               \
    void mi_bounds_pack_##SUFFIX(const void* panels, void* out, int64_t inner, int64_t rows, int threads) {                \
        code_panels<T>(panels, (uint8_t*)out, (float*)((uint8_t*)out + mi_int8_bytes(inner, rows)), inner, rows,     \
                    threads);                                                                                              \
    }                                                                                                                      \
    int64_t mi_candidates_##SUFFIX(const void* x, int64_t x_stride, const void* packed, int64_t packed_rows, int32_t* found, \
                                   uint64_t* needs, int64_t tokens, int64_t inner, int64_t rows, int threads) {            \
        const uint8_t* codes = (const uint8_t*)packed;                                                                     \
        return candidates((const T*)x, x_stride, codes, (const float*)(codes + mi_int8_bytes(inner, packed_rows)), found,  \
                          needs, tokens, inner, rows, threads);                                                            \
    }
MI_BOUNDS(f32, float)
MI_BOUNDS(bf16, bf16)
}

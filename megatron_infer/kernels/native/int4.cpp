// y = x . weight^T + bias from a packed copy of the weight in 4 bits, see quantised_linear.h.
//
// A block has 4-bit codes, 0 to 15, and in fp16 a scale and a minimum: weight = scale * code + minimum, the values of GGUF's
// q4_1. A panel holds in each block [4][W rows][4 codes], with the codes of the first 16 inputs in the low halves of bytes
// and those of the others in the high halves, then [W rows] scales and [W rows] minima. With the codes c of the inputs and
// their scale s, a block adds
//     scale * s * sum(code * c) + minimum * s * sum(c)
// to an output.
#include "quantised_linear.h"
#include "layer_ops.h"

namespace mi {

struct Int4 {
    static constexpr int kBlockBytes = (kInputs / 2 + 4) * W;
    vb codes[kGroups];
    vf scale, minimum;

    explicit Int4(const uint8_t* block)
        : scale(load_halves((const uint16_t*)(block + kInputs / 2 * W))),
          minimum(load_halves((const uint16_t*)(block + kInputs / 2 * W) + W)) {
        for (int g = 0; g < kGroups / 2; ++g) {
            const vu both = (vu)load_codes(block + g * kVector);
            codes[g] = (vb)(both & 0x0f0f0f0fu);
            codes[g + kGroups / 2] = (vb)(both >> 4 & 0x0f0f0f0fu);
        }
    }
    MI_INLINE vi products(const Inputs& in) const {
#if !MI_BYTE_DOT && defined(__AVX512BW__)  // sums in 16 bits: of 16 products, each at most 15 * 127
        __m512i pairs = _mm512_setzero_si512();
        for (int g = 0; g < kGroups; ++g) {
            int32_t four;
            std::memcpy(&four, in.code + 4 * g, sizeof four);
            pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)codes[g], _mm512_set1_epi32(four)));
        }
        return (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif !MI_BYTE_DOT && defined(__AVX2__)
        __m256i pairs = _mm256_setzero_si256();
        for (int g = 0; g < kGroups; ++g) {
            int32_t four;
            std::memcpy(&four, in.code + 4 * g, sizeof four);
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[g], _mm256_set1_epi32(four)));
        }
        return (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
        vi sum{};
        for (int g = 0; g < kGroups; ++g) sum = dot4(sum, codes[g], in.code + 4 * g);
        return sum;
#endif
    }
    MI_INLINE vf add(vf sum, const Inputs& in) const {
        sum = fma_of(__builtin_convertvector(products(in), vf), scale * splat(in.scale), sum);
        return fma_of(minimum, splat(in.total), sum);
    }
};

constexpr int kMostSteps = 15;  // between the least and the largest code
// Steps between the least and the largest weight of a block that are tried. A q4_1 file's block has 15, a q4_0 file's what
// the signs of its weights leave of them; fewer than 8 have a multiple among these.
constexpr int kLeastSteps = 8, kTried = kMostSteps - kLeastSteps + 1;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kLeastRange = 1e-10f;  // the scale of a smaller one is zero in fp16

// fp16 to the nearest, ties to even; NaN where it has none.
inline void store_nearest_halves(uint16_t* p, vf x) {
    const vu sign = (vu)x >> 16 & 0x8000u, bits = (vu)x & 0x7fffffffu;
    const vf size = (vf)bits;
    const vu small = (vu)fma_of(size, splat(0x1p24f), splat(kMagic)) - (vu)splat(kMagic);  // no denormals of fp32
    const vu large = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10);
    const vu half = sign | ((size < 0x1p-14f) ? small : large);
    const vh h = __builtin_convertvector((size <= 65504.0f) ? half : vu{} + 0x7e00u, vh);
    std::memcpy(p, &h, sizeof h);
}

// One block of W rows: value[i] is input i of each.
struct Rows {
    vf value[kInputs] = {};
    int count;  // of inputs; those behind them are zero and have no say
    vf least, range;
    vi is_finite;

    template <class T>
    Rows(const T* weight, int64_t inner, int64_t i, int64_t rows) : count(inner - i < kInputs ? (int)(inner - i) : kInputs) {
        float* to = (float*)value;
        for (int r = 0; r < (rows < W ? rows : W); ++r)
            for (int j = 0; j < count; ++j) to[j * W + r] = to_float(weight[r * inner + i + j]);
        vf largest = least = value[0];
        is_finite = vi{} - 1;
        for (int j = 0; j < count; ++j) {
            largest = vmax(value[j], largest);
            least = (value[j] < least) ? value[j] : least;
            is_finite &= ((vu)value[j] & 0x7fffffffu) < 0x7f800000u;
        }
        range = largest - least;
    }

    // Codes of a weight that is `above` the least one are the nearest to above * this.
    vf factor() const {
        const vf inverse = (range > kLeastRange) ? 1 / range : vf{};
        vf steps[kTried], minus_scale[kTried], errors[kTried];
        for (int n = 0; n < kTried; ++n) {
            steps[n] = inverse * (float)(kMostSteps - n);
            minus_scale[n] = range * (-1.0f / (float)(kMostSteps - n));
            errors[n] = vf{};
        }
        for (int j = 0; j < count; ++j) {
            const vf above = value[j] - least;
            for (int n = 0; n < kTried; ++n) {
                const vf code = fma_of(above, steps[n], splat(kMagic)) - kMagic;
                const vf error = fma_of(code, minus_scale[n], above);
                errors[n] = fma_of(error, error, errors[n]);
            }
        }
        vf best = errors[0], found = steps[0];
        for (int n = 1; n < kTried; ++n) {
            found = (errors[n] < best) ? steps[n] : found;
            best = (errors[n] < best) ? errors[n] : best;
        }
        return found;
    }

    // Scales and minima of the least squared error with the codes of `factor`.
    void fit(uint16_t* scales, uint16_t* minima) const {
        const vf by = factor(), no = splat(__builtin_nanf(""));
        vf codes{}, squares{}, sum{}, products{};  // sums over the inputs; those of codes are exact
        for (int j = 0; j < count; ++j) {
            const vf above = value[j] - least, code = fma_of(above, by, splat(kMagic)) - kMagic;
            codes += code;
            squares = fma_of(code, code, squares);
            sum += above;
            products = fma_of(code, above, products);
        }
        const vf n = splat((float)count), below = fma_of(n, squares, -(codes * codes));
        const vf scale = fma_of(n, products, -(codes * sum)) / ((below > 0) ? below : splat(1.0f));
        store_nearest_halves(scales, is_finite ? ((scale > 0) ? scale : vf{}) : no);
        const vf rest = fma_of(-load_halves(scales), codes, sum);
        store_nearest_halves(minima, is_finite ? fma_of(rest, splat(1.0f / (float)count), least) : no);
    }
};

template <class T>
static void pack_panel(const T* weight, uint8_t* out, int64_t inner, int64_t rows, int64_t panel) {
    const int64_t bytes = panel_bytes<Int4>(inner), used = blocks_of(inner) * Int4::kBlockBytes;
    uint8_t* block = out + panel * bytes;
    std::memset(block + used, 0, bytes - used);
    for (int64_t i = 0; i < inner; i += kInputs, block += Int4::kBlockBytes) {
        const Rows of(weight + panel * W * inner, inner, i, rows - panel * W);
        uint16_t *scales = (uint16_t*)(block + kInputs / 2 * W), *minima = scales + W;
        of.fit(scales, minima);
        const vf scale = load_halves(scales), minimum = load_halves(minima), factor = (scale > 0) ? 1 / scale : vf{};
        vu both[kGroups / 2] = {};
        for (int j = 0; j < kInputs; ++j) {
            vf code = (of.value[j] - minimum) * factor;
            code = (code < (float)kMostSteps) ? code : splat((float)kMostSteps);
            code = (code > 0) ? code : vf{};
            const vu bits = (vu)(code + kMagic) - (vu)splat(kMagic);
            both[j / 4 % (kGroups / 2)] |= bits << (8 * (j % 4) + (j < kInputs / 2 ? 0 : 4));
        }
        std::memcpy(block, both, sizeof both);
    }
}

}  // namespace mi

using namespace mi;

extern "C" {

int64_t mi_int4_bytes(int64_t inner, int64_t rows) { return (rows + W - 1) / W * panel_bytes<Int4>(inner); }

#define MI_INT4(SUFFIX, T)                                                                                                 \
    uint64_t mi_int4_pack_##SUFFIX(const void* weight, void* out, int64_t inner, int64_t rows, int threads) {              \
        auto one = [=](int64_t panel) { pack_panel((const T*)weight, (uint8_t*)out, inner, rows, panel); };                \
        return pack((const T*)weight, inner, rows, threads, one);                                                          \
    }
MI_INT4(f32, float)
MI_INT4(bf16, bf16)

#define MI_INT4_LINEAR(SUFFIX, T, IS_FP32)                                                                                 \
    void mi_int4_linear_##SUFFIX(const void* x, int64_t x_stride, const void* panels, const void* bias, void* out,         \
                                 int64_t tokens, int64_t inner, int64_t rows, int threads) {                               \
        linear<Int4>((const T*)x, x_stride, (const uint8_t*)panels, (const T*)bias, Outputs<T>{out, IS_FP32}, tokens,      \
                     inner, rows, threads);                                                                                \
    }
MI_INT4_LINEAR(f32, float, true)
MI_INT4_LINEAR(bf16, bf16, false)
MI_INT4_LINEAR(bf16_f32, bf16, true)
}

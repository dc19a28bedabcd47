// y = x . weight^T + bias from a packed copy of the weight in 8 bits.
//
// A weight row is cut into blocks of 32 inputs. A block has 8-bit codes, the nearest multiples of its scale, and the scale
// in fp16: the values of GGUF's q8_0. A panel holds W rows, in each block [8][W rows][4 codes] and [W rows] scales, so
// that all of it is one stream. A token's inputs are cut and coded in the same way, with scales in fp32. Codes are
// multiplied as integers without error; the sum of a block is scaled and added in fp32, blocks in order. So an output
// depends on its own token alone.
//
// The products also tell which outputs of the weight itself can be a token's largest: see Bounds.
#include <cmath>
#include <limits>

#include "checksum.h"
#include "layer_ops.h"
#include "packed_weight.h"
#include "shares.h"

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define MI_BYTE_DOT 1  // products of unsigned by signed bytes, summed in 32 bits
#else
#define MI_BYTE_DOT 0
#endif

namespace mi {

constexpr int kInputs = 32;                      // inputs of a block
constexpr int kGroups = kInputs / 4;             // vectors of codes in it
constexpr int kVector = 4 * W;                   // bytes of a vector
constexpr int kBlockBytes = (kInputs + 2) * W;   // codes and scales of a block of a panel
constexpr int kMostTokens = 16;                  // multiplied by a panel at a time
constexpr int64_t kSpan = 256;                   // tokens that are multiplied by a stretch of panels before the next tokens
constexpr int kOffset = MI_BYTE_DOT ? 128 : 0;   // weights' codes are stored with this added
constexpr int64_t kShort = 4096;                 // fewer inputs are coded by one thread
constexpr float kMostCode = 127.0f;

typedef int8_t vb __attribute__((vector_size(kVector)));
typedef int8_t narrow __attribute__((vector_size(W)));

// A token's block.
struct Inputs {
    int8_t code[kInputs];
    float scale;
    int32_t start;  // what the codes' products with the weights' offset sum to, negated
};

inline int64_t blocks_of(int64_t inner) { return (inner + kInputs - 1) / kInputs; }
inline int64_t panel_bytes(int64_t inner) { return (blocks_of(inner) * kBlockBytes + 63) / 64 * 64; }

inline vb load_codes(const uint8_t* p) {
    vb v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// acc[r] + the sum of 4 products: of the codes of row r by those at x.
inline vi dot4(vi acc, vb w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#elif MI_BYTE_DOT
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(four));
#elif defined(__AVX512BW__)  // |x| and w with the sign of x: no sum of two leaves 16 bits
    const __m512i in = _mm512_set1_epi32(four);
    const __m512i signedw = _mm512_mask_sub_epi8((__m512i)w, _mm512_movepi8_mask(in), _mm512_setzero_si512(), (__m512i)w);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(in), signedw);
    return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    const __m256i in = _mm256_set1_epi32(four);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(in), _mm256_sign_epi8((__m256i)w, in));
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int r = 0; r < W; ++r)
        for (int j = 0; j < 4; ++j) acc[r] += (int32_t)w[4 * r + j] * x[j];
    return acc;
#endif
}

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
inline vf load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    const vu u = __builtin_convertvector(h, vu);
    const vf x = (u < 0x400u) ? __builtin_convertvector(u, vf) * 0x1p-24f : (vf)((u + (112u << 10)) << 13);
    return (u >= 0x7c00u) ? splat(__builtin_nanf("")) : x;
#endif
}

// x times factor, to the nearest integer within 8 bits, ties to even.
inline vi code_of(vf x, float factor) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return (vi)fma_of(x, splat(factor), magic) - (vi)magic;
}

// A block of values: entries i .. i + 32 of n, zero behind them.
template <class T>
struct Block {
    vf part[kInputs / W];
    Block(const T* p, int64_t i, int64_t n) {
        for (int v = 0; v < kInputs / W; ++v, i += W) part[v] = i < n ? load_any(p, i, n) : vf{};
    }
    float largest() const {  // absolute value; NaN beside infinity or NaN
        vu most{};
        for (vf x : part) {
            const vu bits = (vu)x & 0x7fffffffu;  // in the order of the values, NaN last
            most = (bits > most) ? bits : most;
        }
#if defined(__AVX512F__)
        uint32_t found = _mm512_reduce_max_epu32((__m512i)most);
#else
        uint32_t found = most[0];
        for (int i = 1; i < W; ++i) found = most[i] > found ? most[i] : found;
#endif
        if (found >= 0x7f800000u) found = 0x7fc00000u;
        float value;
        std::memcpy(&value, &found, sizeof value);
        return value;
    }
    int32_t encode(float factor, int offset, int8_t* out) const {  // offset: added to the codes; returns their sum
        vi sum{};
        for (int v = 0; v < kInputs / W; ++v) {
            const vi code = code_of(part[v], factor) + offset;
            sum += code;
#if defined(__AVX512F__)
            _mm_storeu_si128((__m128i*)(out + v * W), _mm512_cvtepi32_epi8((__m512i)code));
#else
            const narrow bytes = __builtin_convertvector(code, narrow);
            std::memcpy(out + v * W, &bytes, sizeof bytes);
#endif
        }
#if defined(__AVX512F__)
        return _mm512_reduce_add_epi32((__m512i)sum);
#else
        int32_t all = 0;
        for (int i = 0; i < W; ++i) all += sum[i];
        return all;
#endif
    }
};

// The blocks of a token, `pitch` apart.
template <class T>
static void encode_token(const T* x, int64_t inner, Inputs* out, int64_t pitch) {
    for (int64_t i = 0; i < inner; i += kInputs, out += pitch) {
        const Block<T> block(x, i, inner);
        const float most = block.largest();
        out->start = -kOffset * block.encode(most > 1e-30f ? kMostCode / most : 0.0f, 0, out->code);
        out->scale = most / kMostCode;
    }
}

// put(thread, panel, token, count, sums): takes the outputs of `count` tokens for the rows of a panel.
template <class Put>
struct Int8Linear {
    const Inputs* x;  // tiles of up to kMostTokens tokens, each [block][token]
    const uint8_t* panels;
    int64_t tokens, inner;
    Put put;

    // Tokens are cut into tiles of nearly equal size.
    int64_t num_tiles() const { return (tokens + kMostTokens - 1) / kMostTokens; }
    int64_t first_of(int64_t tile) const { return tokens * tile / num_tiles(); }

    // Meanwhile the bytes from `next` on, as many as a panel has, are fetched into L2; null: nothing is.
    template <int M>
    void tile(int thread, int64_t token, int64_t panel, const char* next) const {
        const int64_t blocks = blocks_of(inner);
        const Inputs* in = x + token * blocks;
        const uint8_t* w = panels + panel * panel_bytes(inner);
        vf acc[M] = {};
        for (int64_t b = 0; b < blocks; ++b, in += M, w += kBlockBytes) {
            if (next) {
                for (int i = 0; i < kBlockBytes; i += 64) __builtin_prefetch(next + i, 0, 2);
                next += kBlockBytes;
            }
            vb codes[kGroups];
            for (int g = 0; g < kGroups; ++g) codes[g] = load_codes(w + g * kVector);
            const vf scale = load_halves((const uint16_t*)(w + kInputs * W));
#pragma GCC unroll 16  // else the sums live in memory
            for (int m = 0; m < M; ++m) {
                vi sum = vi{} + in[m].start;
                for (int g = 0; g < kGroups; ++g) sum = dot4(sum, codes[g], in[m].code + 4 * g);
                acc[m] = fma_of(__builtin_convertvector(sum, vf), scale * splat(in[m].scale), acc[m]);
            }
        }
        put(thread, panel, token, M, [&](int m) { return acc[m]; });
    }

    template <int M>
    void tile_of(int64_t count, int thread, int64_t token, int64_t panel, const char* next) const {
        if constexpr (M > 0) {
            if (count == M) return tile<M>(thread, token, panel, next);
            tile_of<M - 1>(count, thread, token, panel, next);
        }
    }

    // Panels begin .. end for tiles first .. last.
    void run(int thread, int64_t begin, int64_t end, int64_t first, int64_t last) const {
        const int64_t bytes = panel_bytes(inner), ahead = tokens > 4 ? bytes : 4096;
        for (int64_t panel = begin; panel < end; ++panel)
            for (int64_t t = first; t < last; ++t) {
                const int64_t from = first_of(t);
                const char* next = (const char*)panels + panel * bytes + ahead;
                tile_of<kMostTokens>(first_of(t + 1) - from, thread, from, panel, t == first ? next : nullptr);
            }
    }
};

// coded(token, blocks, pitch): called once for each token, on the thread that has cut and coded it.
template <class T, class Put, class Coded>
static void multiply(const T* x, int64_t x_stride, Int8Linear<Put> task, int64_t rows, int threads, Coded&& coded) {
    static thread_local Buffer buffer;
    const int64_t blocks = blocks_of(task.inner), tiles = task.num_tiles();
    Inputs* inputs = buffer.get<Inputs>(task.tokens * blocks);
    task.x = inputs;
    auto encode = [&](int64_t begin, int64_t end) {
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t from = task.first_of(t), to = task.first_of(t + 1);
            for (int64_t token = begin > from ? begin : from; token < (end < to ? end : to); ++token) {
                Inputs* own = inputs + from * blocks + token - from;
                encode_token(x + token * x_stride, task.inner, own, to - from);
                coded(token, own, to - from);
            }
        }
    };
    if (task.tokens * task.inner < kShort)
        encode(0, task.tokens);
    else
        parallel_ranges(threads, task.tokens, encode);

    const int64_t panels = (rows + W - 1) / W;
    int64_t size = panels / (threads * 16);
    size = size < 1 ? 1 : size;
    constexpr int64_t span = kSpan / kMostTokens;
    const int64_t stretches = (panels + size - 1) / size, spans = (tiles + span - 1) / span;
    threads = (int)(stretches < threads ? stretches : threads);
    Shares shares(stretches * spans, threads < Shares::kMost ? threads : Shares::kMost);
    auto body = [&](int thread, int) {
        for (int64_t part; (part = shares.take(thread)) >= 0;) {
            const int64_t begin = part % stretches * size, first = part / stretches * span;
            task.run(thread, begin, begin + size < panels ? begin + size : panels, first,
                     tiles - first < span ? tiles : first + span);
        }
    };
    parallel(threads, body);
}

template <class T>
static void linear(const T* x, int64_t x_stride, const uint8_t* panels, const T* bias, T* out, int64_t tokens, int64_t inner,
                   int64_t rows, int threads) {
    auto put = [=](int, int64_t panel, int64_t token, int count, auto&& value) {
        put_panel(out, bias, rows, panel, token, count, value);
    };
    auto coded = [](int64_t, const Inputs*, int64_t) {};
    multiply(x, x_stride, Int8Linear<decltype(put)>{nullptr, panels, tokens, inner, put}, rows, threads, coded);
}

template <class T>
static void pack_panel(const T* weight, uint8_t* out, int64_t inner, int64_t rows, int64_t panel) {
    const int64_t blocks = blocks_of(inner), from = panel * W, count = rows - from < W ? rows - from : W;
    uint8_t* codes = out + panel * panel_bytes(inner);
    std::memset(codes + blocks * kBlockBytes, 0, panel_bytes(inner) - blocks * kBlockBytes);
    for (int64_t b = 0; b < blocks; ++b, codes += kBlockBytes) {
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

// Returns the weight's checksum: each stretch is packed while it is in the cache.
template <class T>
static uint64_t pack(const T* weight, uint8_t* out, int64_t inner, int64_t rows, int threads) {
    const int64_t source = W * inner * (int64_t)sizeof(T);
    return checksum(weight, rows * inner * (int64_t)sizeof(T), threads, [&](int64_t from, int64_t to) {
        for (int64_t panel = (from + source - 1) / source; panel < (to + source - 1) / source; ++panel)
            pack_panel(weight, out, inner, rows, panel);
    });
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

// The panels that can have the largest output of a token among the first `rows`, in order -> their number.
template <class T>
static int64_t candidates(const T* x, int64_t x_stride, const uint8_t* panels, const float* norms, int32_t* found, int64_t tokens,
                          int64_t inner, int64_t rows, int threads) {
    static thread_local Buffer buffer;
    const int64_t num_panels = (rows + W - 1) / W, own = (tokens + W - 1) / W * W;
    vf* least = (vf*)buffer.get<float>(threads * tokens * W + 3 * own + num_panels * tokens);
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
        of_error[token] = norm + tiny;
        of_norm[token] = std::sqrt(errors) * (1 + slack) + slack * norm + tiny;
    };
    Bounds bounds{norms, of_error, of_norm, least, most, tokens, rows};
    multiply(x, x_stride, Int8Linear<Bounds>{nullptr, panels, tokens, inner, bounds}, rows, threads, coded);

    for (int64_t t = 0; t < tokens; ++t) {
        vf best = least[t];
        for (int i = 1; i < threads; ++i) best = vmax(least[i * tokens + t], best);
        const float most_of = max_of(best);  // outputs are rounded to T, so that a lower one may become equal
        lowest[t] = most_of - __builtin_fabsf(most_of) * (sizeof(T) == 2 ? 0x1p-7f : 0x1p-22f) - tiny;
    }
    int64_t count = 0;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const float* at_most = most + panel * tokens;
        bool needed = false;
        for (int64_t t = 0; t < tokens; ++t) needed |= !(at_most[t] < lowest[t]);
        found[count] = (int32_t)panel;
        count += needed;
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
            uint8_t* codes = out + panel * panel_bytes(inner);
            vf errors{}, squares{};
            for (int64_t i = 0; i < inner; i += kInputs, codes += kBlockBytes) {
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

int64_t mi_int8_bytes(int64_t inner, int64_t rows) { return (rows + W - 1) / W * panel_bytes(inner); }

#define MI_INT8(SUFFIX, T)                                                                                                 \
    uint64_t mi_int8_pack_##SUFFIX(const void* weight, void* out, int64_t inner, int64_t rows, int threads) {              \
        return pack((const T*)weight, (uint8_t*)out, inner, rows, threads);                                                \
    }                                                                                                                      \
    void mi_int8_linear_##SUFFIX(const void* x, int64_t x_stride, const void* panels, const void* bias, void* out,         \
                                 int64_t tokens, int64_t inner, int64_t rows, int threads) {                               \
        linear((const T*)x, x_stride, (const uint8_t*)panels, (const T*)bias, (T*)out, tokens, inner, rows, threads);      \
    }
MI_INT8(f32, float)
MI_INT8(bf16, bf16)

int64_t mi_bounds_bytes(int64_t inner, int64_t rows) {
    return (rows + W - 1) / W * (panel_bytes(inner) + 2 * W * (int64_t)sizeof(float));
}

// out: the panels in 8 bits, and behind them the norms.
#define MI_BOUNDS(SUFFIX, T)                                                                                               \
    void mi_bounds_pack_##SUFFIX(const void* panels, void* out, int64_t inner, int64_t rows, int threads) {                \
        code_panels<T>(panels, (uint8_t*)out, (float*)((uint8_t*)out + mi_int8_bytes(inner, rows)), inner, rows,     \
                    threads);                                                                                              \
    }                                                                                                                      \
    int64_t mi_candidates_##SUFFIX(const void* x, int64_t x_stride, const void* packed, int64_t packed_rows, int32_t* found, \
                                   int64_t tokens, int64_t inner, int64_t rows, int threads) {                             \
        const uint8_t* codes = (const uint8_t*)packed;                                                                     \
        return candidates((const T*)x, x_stride, codes, (const float*)(codes + mi_int8_bytes(inner, packed_rows)), found,  \
                          tokens, inner, rows, threads);                                                                   \
    }
MI_BOUNDS(f32, float)
MI_BOUNDS(bf16, bf16)
}

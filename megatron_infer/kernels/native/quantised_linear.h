// y = x . weight^T + bias from a packed copy of the weight in few bits: what its formats, int8.cpp and int4.cpp, share.
//
// A weight row is cut into blocks of 32 inputs. A panel holds what a format keeps of W rows, block by block, so that all
// of it is one stream. A token's inputs are cut in the same way; a block of them has 8-bit codes and a scale in fp32. Codes
// are multiplied as integers without error; the sum of a block is scaled and added in fp32, blocks in order. So an output
// depends on its own token alone.
//
// A format is a block of a panel, as it is multiplied:
//     static constexpr int kBlockBytes;
//     explicit Format(const uint8_t* block);
//     vf add(vf sum, const Inputs& in) const;  // the outputs of a token for W rows, with the products of the block added
#pragma once

#include "checksum.h"
#include "common.h"
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
constexpr int kMostTokens = 16;                  // multiplied by a panel at a time
constexpr int64_t kSpan = 256;                   // tokens that are multiplied by a stretch of panels before the next tokens
constexpr int kOffset = MI_BYTE_DOT ? 128 : 0;   // added to weights' codes that may be negative
constexpr int64_t kShort = 4096;                 // fewer inputs are coded by one thread
constexpr float kMostCode = 127.0f;

typedef int8_t vb __attribute__((vector_size(kVector)));
typedef int8_t narrow __attribute__((vector_size(W)));

// A token's block.
struct Inputs {
    int8_t code[kInputs];
    float scale;
    int32_t start;  // what the codes' products with kOffset sum to, negated
    float total;    // the scale times the sum of the codes
};

inline int64_t blocks_of(int64_t inner) { return (inner + kInputs - 1) / kInputs; }
template <class Format>
inline int64_t panel_bytes(int64_t inner) {
    return (blocks_of(inner) * Format::kBlockBytes + 63) / 64 * 64;
}

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

// Denormals of fp16 are not computed as those of fp32, which a thread may flush to zero (torch.set_flush_denormal).
inline vf load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    const vu bits = __builtin_convertvector(h, vu), u = bits & 0x7fffu;
    const vf x = (u < 0x400u) ? __builtin_convertvector((vi)u, vf) * 0x1p-24f : (vf)((u + (112u << 10)) << 13);
    return (u >= 0x7c00u) ? splat(__builtin_nanf("")) : (vf)((vu)x | (bits & 0x8000u) << 16);
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
        const int32_t sum = block.encode(most > 1e-30f ? kMostCode / most : 0.0f, 0, out->code);
        out->start = -kOffset * sum;
        out->scale = most / kMostCode;
        out->total = out->scale * (float)sum;
    }
}

// put(thread, panel, token, count, sums): takes the outputs of `count` tokens for the rows of a panel.
template <class Format, class Put>
struct QuantisedLinear {
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
        const uint8_t* w = panels + panel * panel_bytes<Format>(inner);
        vf acc[M] = {};
        for (int64_t b = 0; b < blocks; ++b, in += M, w += Format::kBlockBytes) {
            if (next) {
                for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(next + i, 0, 2);
                next += Format::kBlockBytes;
            }
            const Format block(w);
#pragma GCC unroll 16  // else the sums live in memory
            for (int m = 0; m < M; ++m) acc[m] = block.add(acc[m], in[m]);
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
        const int64_t bytes = panel_bytes<Format>(inner), ahead = tokens > 4 ? bytes : 4096;
        for (int64_t panel = begin; panel < end; ++panel)
            for (int64_t t = first; t < last; ++t) {
                const int64_t from = first_of(t);
                const char* next = (const char*)panels + panel * bytes + ahead;
                tile_of<kMostTokens>(first_of(t + 1) - from, thread, from, panel, t == first ? next : nullptr);
            }
    }
};

// coded(token, blocks, pitch): called once for each token, on the thread that has cut and coded it.
template <class T, class Format, class Put, class Coded>
static void multiply(const T* x, int64_t x_stride, QuantisedLinear<Format, Put> task, int64_t rows, int threads, Coded&& coded) {
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

template <class Format, class T>
static void linear(const T* x, int64_t x_stride, const uint8_t* panels, const T* bias, Outputs<T> out, int64_t tokens, int64_t inner,
                   int64_t rows, int threads) {
    auto put = [=](int, int64_t panel, int64_t token, int count, auto&& value) {
        out.put(bias, rows, panel, token, count, value);
    };
    auto coded = [](int64_t, const Inputs*, int64_t) {};
    multiply(x, x_stride, QuantisedLinear<Format, decltype(put)>{nullptr, panels, tokens, inner, put}, rows, threads, coded);
}

// pack_panel(panel): makes it of its W rows of the weight. Returns the weight's checksum: each stretch is packed while it is
// in the cache.
template <class T, class PackPanel>
static uint64_t pack(const T* weight, int64_t inner, int64_t rows, int threads, PackPanel&& pack_panel) {
    const int64_t source = W * inner * (int64_t)sizeof(T);
    return checksum(weight, rows * inner * (int64_t)sizeof(T), threads, [&](int64_t from, int64_t to) {
        for (int64_t panel = (from + source - 1) / source; panel < (to + source - 1) / source; ++panel) pack_panel(panel);
    });
}

}  // namespace mi

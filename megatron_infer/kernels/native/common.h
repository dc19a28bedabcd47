// Vector types, conversions and threads shared by the kernels. No torch headers: this builds in seconds.
//
// GCC/Clang vector extensions give one source for AVX-512, AVX2 and NEON; intrinsics are used only where they are faster.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MI_BF16_DOT 1
#else
#define MI_BF16_DOT 0
#endif

#define MI_INLINE __attribute__((always_inline))

namespace mi {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#else
constexpr int W = 8;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};

inline vf splat(float x) { return x - vf{}; }  // not a sum, which -0 would take an addition for

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vf load(const bf16* p) {
#if defined(__AVX512F__)  // GCC widens a vector of 16 in two halves
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
// Past the caches, for what is not read soon; p is aligned to a vector. `stream_end` before others may read it.
#if defined(__AVX512F__)
inline void stream(float* p, vf v) { _mm512_stream_ps(p, (__m512)v); }
inline void stream_end() { _mm_sfence(); }
#else
inline void stream(float* p, vf v) { store(p, v); }
inline void stream_end() {}
#endif
inline void store(bf16* p, vf v) {
#if MI_BF16_DOT
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &h, sizeof h);
#else
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu quiet = (u >> 16) | 0x40u;  // rounding could turn a NaN into infinity
    vh h = __builtin_convertvector((v == v) ? rounded : quiet, vh);
    std::memcpy(p, &h, sizeof h);
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline float of_half(uint16_t h) {
    const uint32_t most = h & 0x7fffu, bits = most >= 0x7c00u ? most << 13 | 0x7f800000u : (most + (112u << 10)) << 13;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    if (most < 0x400u) x = (float)most * 0x1p-24f;
    return h & 0x8000u ? -x : x;
}
inline void set(float& out, float x) { out = x; }
inline void set(bf16& out, float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    out.bits = (x == x) ? (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16) : (uint16_t)((u >> 16) | 0x40u);
}

// The first n < W entries; the others are read as zero and not written.
template <class T>
inline vf load_part(const T* p, int n) {
    T part[W] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
inline void store_part(T* p, vf v, int n) {
    T part[W];
    store(part, v);
    std::memcpy(p, part, n * sizeof(T));
}

// Entries i .. i + W of n; those behind n as above.
template <class T>
inline vf load_any(const T* p, int64_t i, int64_t n) {
    return i + W <= n ? load(p + i) : load_part(p + i, (int)(n - i));
}
template <class T>
inline void store_any(T* p, vf v, int64_t i, int64_t n) {
    if (i + W <= n)
        store(p + i, v);
    else
        store_part(p + i, v, (int)(n - i));
}

// Outputs of `count` tokens, from `token` on, for the rows of a panel: value(m) of each token, and the bias.
template <class Out, class T, class Value>
inline void put_panel(Out* out, const T* bias, int64_t rows, int64_t panel, int64_t token, int count, Value&& value) {
    const int64_t row = panel * W;
    const int width = rows - row < W ? (int)(rows - row) : W;
    const vf add = bias ? load_part(bias + row, width) : vf{};
#pragma GCC unroll 16  // else values that are sums in registers would be kept in memory
    for (int m = 0; m < count; ++m) {
        Out* to = out + (token + m) * rows + row;
        if (width == W)
            store(to, value(m) + add);
        else
            store_part(to, value(m) + add, width);
    }
}

// Where a linear of T puts its outputs: rounded to T, or in fp32 as they are summed, which logits are.
template <class T>
struct Outputs {
    void* to;
    bool is_fp32 = false;

    template <class Value>
    void put(const T* bias, int64_t rows, int64_t panel, int64_t token, int count, Value&& value) const {
        if (sizeof(T) < sizeof(float) && is_fp32)
            put_panel((float*)to, bias, rows, panel, token, count, value);
        else
            put_panel((T*)to, bias, rows, panel, token, count, value);
    }
};

// a * b + c, rounded once where the CPU can. Explicit where every copy of a loop must give the same bits: a compiler may
// fuse one and not the other.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float fma_of(float a, float b, float c) { return a * b + c; }
#endif
#if defined(__AVX512F__)
inline vf fma_of(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__FMA__)
inline vf fma_of(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
inline vf fma_of(vf a, vf b, vf c) {
    vf v;
    for (int i = 0; i < W; ++i) v[i] = fma_of(a[i], b[i], c[i]);
    return v;
}
#endif

inline vf vmax(vf a, vf b) { return (a > b) ? a : b; }
inline float sum_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < W; ++i) s += v[i];
    return s;
#endif
}
inline float max_of(vf v) {
    float m = v[0];
    for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
    return m;
}

#if defined(__AVX512F__)
// Lane i = the lanes of v[i] combined, for 16 vectors: a tree of shuffles costs 3 instructions a vector.
template <class Combine>
inline __m512 combined(const vf* v, Combine&& combine) {
    __m512 a[16], b[8];
    for (int i = 0; i < 16; ++i) a[i] = (__m512)v[i];
    for (int i = 0; i < 8; ++i)  // 128-bit lanes: i, i, i + 8, i + 8
        b[i] = combine(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
    __m512 c[4], d[2];
    for (int i = 0; i < 4; ++i)  // 128-bit lanes: i, i + 8, i + 4, i + 12
        c[i] = combine(_mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i) d[i] = combine(_mm512_unpacklo_ps(c[i], c[i + 2]), _mm512_unpackhi_ps(c[i], c[i + 2]));
    const __m512 e = combine(_mm512_unpacklo_ps(d[0], d[1]), _mm512_unpackhi_ps(d[0], d[1]));
    // Within a lane the two unpacks leave 0, 1, 2, 3; the lanes are put in order last.
    return _mm512_shuffle_f32x4(e, e, 0xd8);
}
#elif defined(__AVX__)
// The same of 8 vectors.
template <class Combine>
inline __m256 combined(const vf* v, Combine&& combine) {
    __m256 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) a[i] = (__m256)v[i];
    for (int i = 0; i < 4; ++i)  // 128-bit lanes: i, i + 4
        b[i] = combine(_mm256_permute2f128_ps(a[i], a[i + 4], 0x20), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    for (int i = 0; i < 2; ++i) c[i] = combine(_mm256_unpacklo_ps(b[i], b[i + 2]), _mm256_unpackhi_ps(b[i], b[i + 2]));
    return combine(_mm256_unpacklo_ps(c[0], c[1]), _mm256_unpackhi_ps(c[0], c[1]));
}
#endif

// out[i] = sum, or largest, of the lanes of v[i], for 16 vectors.
inline void sums_of(const vf* v, float* out) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(out, combined(v, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); }));
#elif defined(__AVX__)
    for (int i = 0; i < 16; i += 8)
        _mm256_storeu_ps(out + i, combined(v + i, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); }));
#else
    for (int i = 0; i < 16; ++i) out[i] = sum_of(v[i]);
#endif
}
inline void largest_of(const vf* v, float* out) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(out, combined(v, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); }));
#elif defined(__AVX__)
    for (int i = 0; i < 16; i += 8)
        _mm256_storeu_ps(out + i, combined(v + i, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); }));
#else
    for (int i = 0; i < 16; ++i) out[i] = max_of(v[i]);
#endif
}

// e^x to 2 ulp: x = n ln2 + r with |r| <= ln2 / 2, a degree-6 polynomial in r, then n into the exponent.
// Below -87 the result is e^-87 (1e-38), above 88 it is e^88; NaN stays NaN.
inline vf exp_of(vf x) {
    x = (x < -87.0f) ? splat(-87.0f) : x;
    x = (x > 88.0f) ? splat(88.0f) : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf shifted = x * 1.44269504088896f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    vf p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

// tanh x to 3 ulp: an odd polynomial for |x| < 0.625, else (1 - e) / (1 + e) with e = e^(-2 |x|); NaN stays NaN.
// Source of the polynomial: Cephes, tanhf.
inline vf tanh_of(vf x) {
    const vf z = x * x, size = (x < 0.0f) ? -x : x, e = exp_of(size * -2.0f);
    vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const vf large = (1.0f - e) / (1.0f + e);
    return (size < 0.625f) ? x + x * z * p : ((x < 0.0f) ? -large : large);
}

#if defined(__AVX512F__)
// 2^y to 4e-6, as weights and activations of bf16 need it: 2^n 2^f with |f| <= 1/2 and a polynomial in f.
inline vf exp2_of(vf y) {
    const vf n = (vf)_mm512_roundscale_ps((__m512)y, 8), f = y - n;
    vf p = fma_of(f, splat(0.00957008731f), splat(0.0559178591f));
    p = fma_of(p, f, splat(0.240247458f));
    p = fma_of(p, f, splat(0.693121791f));
    p = fma_of(p, f, splat(0.999999285f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#endif

// The entry points of team.cpp, in the form of an OpenMP runtime's.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread_num)();
    int (*num_threads)();
};
extern Runtime runtime;

template <class Body>
void parallel(int threads, Body& body) {  // body(thread, threads)
    if (threads <= 1) {
        body(0, 1);
        return;
    }
    runtime.parallel([](void* p) { (*static_cast<Body*>(p))(runtime.thread_num(), runtime.num_threads()); }, &body,
                     (unsigned)threads, 0);
}

// Whether memory that is read once is best fetched past L2. On AMD's CPUs it is; Intel's then read at a fifth of the speed.
inline bool past_l2() {
#if defined(__x86_64__)
    static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
    return amd;
#else
    return true;
#endif
}

// Grow-only aligned memory.
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    template <class T>
    T* get(int64_t count) {
        size_t bytes = ((size_t)count * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            if (!data_) std::abort();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// Splits 0 .. n into one contiguous range per thread.
template <class Body>
void parallel_ranges(int threads, int64_t n, Body&& body) {  // body(begin, end)
    auto part = [&](int thread, int count) {
        int64_t begin = n * thread / count, end = n * (thread + 1) / count;
        if (begin < end) body(begin, end);
    };
    parallel(threads < n ? threads : (int)n, part);
}

}  // namespace mi

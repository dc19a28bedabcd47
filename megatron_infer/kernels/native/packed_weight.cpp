// The copy of a weight that linears multiply by (packed_weight.h), made from the weight and turned back into it.
#include "checksum.h"
#include "packed_weight.h"
#include "shares.h"
#include "tiles.h"

namespace mi {

#if defined(__AVX512F__)
// Four bytes at row r, column c of 16 rows -> out[c][r]; rows are `stride` bytes apart. Streamed, the copy bypasses the
// caches: it is not read soon, and no line is fetched to be overwritten.
template <bool Streamed>
inline void transpose(const char* rows, int64_t stride, char* out) {
    auto put = [](char* p, __m512i v) { Streamed ? _mm512_stream_si512((__m512i*)p, v) : _mm512_store_si512(p, v); };
    __m512i a[16], b[16];
    for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(rows + r * stride);
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4)
        for (int i = 0; i < 2; ++i) {
            a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + i + 2]);
            a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + i + 2]);
        }
    // a[4 r + i]: of rows 4 r .. 4 r + 3 the columns i, i + 4, i + 8, i + 12
    for (int i = 0; i < 4; ++i) {
        const __m512i even = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), odd = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        put(out + i * 64, _mm512_shuffle_i32x4(even, even2, 0x88));
        put(out + (i + 8) * 64, _mm512_shuffle_i32x4(even, even2, 0xdd));
        put(out + (i + 4) * 64, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        put(out + (i + 12) * 64, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}
#endif

// to: aligned to a cache line. Streamed: see transpose.
template <bool Streamed, class T>
static void pack_panel(const T* weight, T* to, int64_t inner, int64_t rows, int64_t panel) {
    constexpr int pair = kPair<T>;
    int64_t i = 0;
#if defined(__AVX512F__)
    const int64_t step = 64 / (int64_t)sizeof(T);
    if ((panel + 1) * W <= rows && (uintptr_t)to % 64 == 0)
        for (; i + step <= inner; i += step)
            transpose<Streamed>((const char*)(weight + panel * W * inner + i), inner * (int64_t)sizeof(T), (char*)(to + i * W));
#endif
    for (int r = 0; r < W; ++r) {
        const int64_t row = panel * W + r;
        for (int64_t k = i; k < inner; k += pair)
            for (int j = 0; j < pair; ++j) to[k * W + r * pair + j] = row < rows ? weight[row * inner + k + j] : T{};
    }
}

// Whether a weight's panels can be compact here.
template <class T>
static bool fits(const T* weight, int64_t inner, int64_t rows, int threads) {
#if MI_COMPACT
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (inner % kGroup || compact_panel_bytes(inner) >= panel_bytes_of<T>(false, inner)) return false;
#if MI_TILES
        if (tiles_allowed()) return false;  // these multiply plain panels
#endif
        bool all = true;
        parallel_ranges(threads, (rows + W - 1) / W, [&](int64_t begin, int64_t end) {
            for (int64_t panel = begin; panel < end && __atomic_load_n(&all, __ATOMIC_RELAXED); ++panel) {
                const int64_t row = panel * W;
                if (!fits_compact(weight + row * inner, inner, (int)(rows - row < W ? rows - row : W)))
                    __atomic_store_n(&all, false, __ATOMIC_RELAXED);
            }
        });
        return all;
    }
#endif
    return false;
}

// Returns the weight's checksum: each stretch is packed while it is in the cache.
template <class T>
static uint64_t pack(const T* weight, void* packed, bool compact, int64_t inner, int64_t rows, int threads) {
    PackedHeader& header = *(PackedHeader*)packed;
    header = PackedHeader{compact};
    char* out = (char*)packed + sizeof(PackedHeader);
    const int64_t source = W * inner * (int64_t)sizeof(T), bytes = panel_bytes_of<T>(compact, inner);
    return checksum(weight, rows * inner * (int64_t)sizeof(T), threads, [&](int64_t from, int64_t to) {
        const int64_t begin = (from + source - 1) / source, end = (to + source - 1) / source;
        for (int64_t panel = begin; panel < end; ++panel) {
#if MI_COMPACT
            if constexpr (sizeof(T) == sizeof(bf16))
                if (compact) {
                    static thread_local Buffer buffer;
                    T* plain = buffer.get<T>(W * inner);
                    pack_panel<false>(weight, plain, inner, rows, panel);
                    if (!compress(plain, inner, (int)(rows - panel * W < W ? rows - panel * W : W), (uint8_t*)out + panel * bytes))
                        __atomic_store_n(&header.overflowed, 1, __ATOMIC_RELAXED);
                    continue;
                }
#endif
            pack_panel<true>(weight, (T*)(out + panel * bytes), inner, rows, panel);
        }
#if defined(__AVX512F__)
        _mm_sfence();
#endif
    });
}

// A panel of a packed copy, with plain values: where it lies, or in memory of the thread.
template <class T>
static const T* plain_panel(const void* packed, int64_t panel, int64_t inner) {
    const bool compact = ((const PackedHeader*)packed)->is_compact;
    const char* from = (const char*)packed + sizeof(PackedHeader) + panel * panel_bytes_of<T>(compact, inner);
#if MI_COMPACT
    if constexpr (sizeof(T) == sizeof(bf16))
        if (compact) {
            static thread_local Buffer buffer;
            T* values = buffer.get<T>(W * inner);
            expand((const uint8_t*)from, inner, values);
            return values;
        }
#endif
    return (const T*)from;
}

// Row r of a plain panel.
template <class T>
static void copy_row(const T* panel, int64_t r, int64_t inner, T* out) {
    constexpr int pair = kPair<T>;
    for (int64_t k = 0; k < inner; k += pair) std::memcpy(out + k, panel + k * W + r * pair, pair * sizeof(T));
}

// The weight of a packed copy, to the bit.
template <class T>
static void unpack(const void* packed, T* weight, int64_t inner, int64_t rows, int threads) {
    parallel_ranges(threads, (rows + W - 1) / W, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const T* plain = plain_panel<T>(packed, panel, inner);
            for (int64_t row = panel * W; row < rows && row < (panel + 1) * W; ++row)
                copy_row(plain, row % W, inner, weight + row * inner);
        }
    });
}

// Rows of the weight, by number. Returns whether there are all of them.
template <class T>
static bool select_rows(const void* packed, const int64_t* which, T* out, int64_t count, int64_t inner, int64_t rows, int threads) {
    for (int64_t i = 0; i < count; ++i)
        if (which[i] < 0 || which[i] >= rows) return false;
    parallel_ranges(count < 2 * W ? 1 : threads, count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            copy_row(plain_panel<T>(packed, which[i] / W, inner), which[i] % W, inner, out + i * inner);
    });
    return true;
}

}  // namespace mi

using namespace mi;

extern "C" {

#define MI_PACKED_WEIGHT(SUFFIX, T)                                                                                        \
    int mi_fits_compact_##SUFFIX(const void* weight, int64_t inner, int64_t rows, int threads) {                           \
        return fits((const T*)weight, inner, rows, threads);                                                               \
    }                                                                                                                      \
    int64_t mi_packed_bytes_##SUFFIX(int64_t inner, int64_t rows, int compact) {                                           \
        return (int64_t)sizeof(PackedHeader) + (rows + W - 1) / W * panel_bytes_of<T>(compact, inner);                     \
    }                                                                                                                      \
    uint64_t mi_pack_##SUFFIX(const void* weight, void* out, int64_t inner, int64_t rows, int compact, int threads) {      \
        return pack((const T*)weight, out, compact, inner, rows, threads);                                                 \
    }                                                                                                                      \
    void mi_unpack_##SUFFIX(const void* packed, void* weight, int64_t inner, int64_t rows, int threads) {                  \
        unpack(packed, (T*)weight, inner, rows, threads);                                                                  \
    }                                                                                                                      \
    int mi_select_rows_##SUFFIX(const void* packed, const int64_t* which, void* out, int64_t count, int64_t inner,         \
                                int64_t rows, int threads) {                                                               \
        return select_rows(packed, which, (T*)out, count, inner, rows, threads);                                           \
    }
MI_PACKED_WEIGHT(f32, float)
MI_PACKED_WEIGHT(bf16, bf16)
}

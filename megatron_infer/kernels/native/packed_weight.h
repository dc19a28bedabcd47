// The copy of a weight that linears multiply by (panels.cpp): a header, then panels of W weight rows.
//
// A panel holds its rows interleaved, [inner / pair][W rows][pair]. Panels of bf16 may be compact: the same values, to the
// bit, in 12 bits each. The low byte of a value is kept. The high byte, its sign and the upper 7 bits of its exponent, is one
// of 16 in a segment of the panel: both signs of the segment's largest exponent and of the 7 below it, or zero's in the
// place of the least negative one. Trained weights have few other values; a segment lists them. A weight that has more of
// them is not compact.
#pragma once

#include "common.h"
#include "tiles.h"

#if MI_BF16_DOT && defined(__AVX512BW__)
#define MI_COMPACT 1
#else
#define MI_COMPACT 0
#endif

namespace mi {

struct PackedHeader {
    uint64_t is_compact;
    uint64_t overflowed;  // a segment had more other values than it can list: the copy is not the weight's
    uint64_t unused[6];
};
static_assert(sizeof(PackedHeader) == 64, "panels are aligned to a cache line");

template <class T>
constexpr int kPair = sizeof(T) == sizeof(bf16) ? 2 : 1;  // inner entries of a row that lie side by side

constexpr int64_t kSegment = 512;  // inner entries of a segment
constexpr int64_t kGroup = 8;      // inner entries of a group: 4 vectors of values
constexpr int kGroupValues = kGroup * W;
constexpr int kGroupBytes = kGroupValues * 3 / 2;
constexpr int kMostRare = 31;
constexpr int kLow = 7;         // exponents below the largest that have a code
constexpr int kZeroCode = 15;   // of the least negative values, or of zero

struct Segment {  // its groups follow
    uint8_t largest, num_rare, has_zero, unused;
    struct {
        uint16_t at, value;
    } rare[kMostRare];  // in order; at: entry of the segment in the order of a panel
};
static_assert(sizeof(Segment) == 128, "groups are aligned to a cache line");

inline int64_t compact_panel_bytes(int64_t inner) {
    return (inner + kSegment - 1) / kSegment * (int64_t)sizeof(Segment) + inner / kGroup * kGroupBytes;
}
template <class T>
int64_t panel_bytes_of(bool compact, int64_t inner) {
    return compact && sizeof(T) == sizeof(bf16) ? compact_panel_bytes(inner) : W * inner * (int64_t)sizeof(T);
}

#if MI_COMPACT
// The high bytes that 4-bit codes stand for.
inline __m512i high_bytes(const Segment& segment) {
    const __m512i below = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i exponent = _mm512_and_si512(_mm512_sub_epi8(_mm512_set1_epi8((char)segment.largest), below), _mm512_set1_epi8(0x7f));
    const __m512i negative = _mm512_or_si512(exponent, _mm512_set1_epi8(-128));
    const __m512i both = _mm512_mask_mov_epi8(exponent, 0xff00ff00ff00ff00, negative);
    return segment.has_zero ? _mm512_mask_mov_epi8(both, 0x8000800080008000, _mm512_setzero_si512()) : both;
}

// Calls each(i, group, values) for the groups of a panel: i of the first inner entry, where the group lies, its 4 vectors.
template <class Each>
inline MI_INLINE void for_each_group(const uint8_t* p, int64_t inner, Each&& each) {
    const __m512i four_bits = _mm512_set1_epi8(15);
    for (int64_t first = 0; first < inner; first += kSegment) {
        const Segment& segment = *(const Segment*)p;
        const int64_t end = first + kSegment < inner ? first + kSegment : inner;
        const __m512i table = high_bytes(segment);
        int rare = 0;
        auto next_rare = [&] {  // inner entry of the next group that has some
            return rare < segment.num_rare ? first + segment.rare[rare].at / kGroupValues * kGroup : -1;
        };
        int64_t stop = next_rare();
        p += sizeof(Segment);
        for (int64_t i = first; i < end; i += kGroup, p += kGroupBytes) {
            const __m512i low = _mm512_loadu_si512(p), low2 = _mm512_loadu_si512(p + 64), codes = _mm512_loadu_si512(p + 128);
            const __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, four_bits));
            const __m512i high2 = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), four_bits));
            __m512i values[4] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high),
                                 _mm512_unpacklo_epi8(low2, high2), _mm512_unpackhi_epi8(low2, high2)};
            if (__builtin_expect(i == stop, 0)) {
                alignas(64) uint16_t all[kGroupValues];
                for (int v = 0; v < 4; ++v) _mm512_store_si512(all + 32 * v, values[v]);
                for (; next_rare() == i; ++rare) all[segment.rare[rare].at % kGroupValues] = segment.rare[rare].value;
                stop = next_rare();
                for (int v = 0; v < 4; ++v) values[v] = _mm512_load_si512(all + 32 * v);
            }
            each(i, p, values);
        }
    }
}

// A compact panel as a plain one.
inline void expand(const uint8_t* panel, int64_t inner, bf16* out) {
    for_each_group(panel, inner, [&](int64_t i, const uint8_t*, const __m512i* values) {
        for (int v = 0; v < 4; ++v) _mm512_storeu_si512(out + i * W + 32 * v, values[v]);
    });
}

// What decides how a segment is coded. for_each(call): call(which, values) for vectors of it and those of their values
// that count.
struct Magnitudes {
    int largest = 0;
    int64_t small = 0, zeros = 0, least_negative = 0;  // values below the codes' exponents, those that are zero, those of kZeroCode

    template <class ForEach>
    explicit Magnitudes(ForEach&& for_each) {
        const __m512i exponents = _mm512_set1_epi16(0x7f00);
        __m512i most = _mm512_setzero_si512();
        for_each([&](__mmask32 which, __m512i v) {
            most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_mov_epi16(which, v), exponents));
        });
        alignas(64) uint16_t each[32];
        _mm512_store_si512(each, most);
        for (int one : each) largest = one > largest ? one : largest;
        largest >>= 8;
        if (largest <= kLow) return;
        const __m512i least = _mm512_set1_epi16((short)((largest - kLow) << 8)), high = _mm512_set1_epi16((short)0xff00);
        const __m512i negative = _mm512_or_si512(least, _mm512_set1_epi16((short)0x8000));
        for_each([&](__mmask32 which, __m512i v) {
            small += __builtin_popcount(_mm512_mask_cmplt_epu16_mask(which, _mm512_and_si512(v, exponents), least));
            zeros += __builtin_popcount(_mm512_mask_testn_epi16_mask(which, v, high));
            least_negative += __builtin_popcount(_mm512_mask_cmpeq_epi16_mask(which, _mm512_and_si512(v, high), negative));
        });
    }
    bool has_zero() const { return zeros > least_negative; }
    bool fits() const { return (has_zero() ? small - zeros + least_negative : small) <= kMostRare; }
};

// A plain panel, of which `count` rows are a weight's, as a compact one. Values of the other rows are arbitrary. Returns
// whether all values are in it, as they are where the weight fits.
inline bool compress(const bf16* panel, int64_t inner, int count, uint8_t* out) {
    const __mmask32 own = count < W ? ((uint32_t)1 << 2 * count) - 1 : ~(uint32_t)0;
    bool whole = true;
    const __m512i byte = _mm512_set1_epi16(0xff), exponent = _mm512_set1_epi8(0x7f), lowest = _mm512_set1_epi8(kLow);
    for (int64_t first = 0; first < inner; first += kSegment, panel += kSegment * W) {
        const int64_t entries = first + kSegment < inner ? kSegment : inner - first;
        const Magnitudes found([&](auto&& call) {
            for (int64_t i = 0; i < entries * W; i += 2 * W) call(own, _mm512_loadu_si512(panel + i));
        });
        Segment& segment = *(Segment*)out;
        segment = {(uint8_t)found.largest, 0, found.has_zero()};
        out += sizeof segment;
        const __m512i largest = _mm512_set1_epi8((char)found.largest), filler = _mm512_set1_epi16((short)(found.largest << 8));
        for (int64_t i = 0; i < entries; i += kGroup, out += kGroupBytes) {
            __m512i codes[2];
            for (int half = 0; half < 2; ++half) {
                const bf16* from = panel + i * W + half * 4 * W;
                const __m512i a = _mm512_mask_loadu_epi16(filler, own, from), b = _mm512_mask_loadu_epi16(filler, own, from + 2 * W);
                const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
                const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
                const __m512i below = _mm512_sub_epi8(largest, _mm512_and_si512(high, exponent));
                const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(high, 4), _mm512_set1_epi8(8));
                __m512i code = _mm512_or_si512(_mm512_min_epu8(below, lowest), sign);
                __mmask64 rare = _mm512_cmpgt_epu8_mask(below, lowest);
                if (segment.has_zero) {
                    const __mmask64 zero = _mm512_testn_epi8_mask(high, high);
                    rare |= _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(kZeroCode));
                    rare &= ~zero;
                    code = _mm512_mask_mov_epi8(code, zero, _mm512_set1_epi8(kZeroCode));
                }
                codes[half] = code;
                _mm512_storeu_si512(out + 64 * half, low);
                if (!rare) continue;
                alignas(64) uint16_t values[4 * W], is_rare[4 * W];
                _mm512_store_si512(values, a);
                _mm512_store_si512(values + 2 * W, b);
                const __m512i marks = _mm512_movm_epi8(rare), none = _mm512_setzero_si512();
                _mm512_store_si512(is_rare, _mm512_unpacklo_epi8(marks, none));  // in the order of the values
                _mm512_store_si512(is_rare + 2 * W, _mm512_unpackhi_epi8(marks, none));
                for (int v = 0; v < 4 * W; ++v) {
                    if (!is_rare[v]) continue;
                    if (segment.num_rare < kMostRare)
                        segment.rare[segment.num_rare++] = {(uint16_t)(i * W + 4 * W * half + v), values[v]};
                    else
                        whole = false;
                }
            }
            _mm512_storeu_si512(out + 128, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
        }
    }
    return whole;
}

// Whether `count` rows of a weight make a compact panel.
inline bool fits_compact(const bf16* rows, int64_t inner, int count) {
    for (int64_t first = 0; first < inner; first += kSegment) {
        const int64_t end = first + kSegment < inner ? first + kSegment : inner;
        const Magnitudes found([&](auto&& call) {
            for (int r = 0; r < count; ++r)
                for (int64_t i = first; i < end; i += 32) {
                    const __mmask32 inside = end - i < 32 ? ((uint32_t)1 << (end - i)) - 1 : ~(uint32_t)0;
                    call(inside, _mm512_maskz_loadu_epi16(inside, rows + r * inner + i));
                }
        });
        if (!found.fits()) return false;
    }
    return true;
}
#endif

}  // namespace mi

// Blocks of a GGUF file -> float32, the values that the gguf package's numpy code gives: each product of codes and scales
// fits into a float's mantissa, so that the only rounding is that of the offset.
#include "common.h"

namespace mi {

inline float half(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, sizeof h);
    return of_half(h);
}

// The scale and the offset of part j of 8 of a Q4_K or Q5_K block: 6 bits each.
struct SixBits {
    float scale, offset;
    SixBits(const uint8_t* p, int j) {
        scale = (float)(j < 4 ? p[j] & 63 : (p[j + 4] & 15) | (p[j - 4] >> 2 & 48));
        offset = (float)(j < 4 ? p[j + 4] & 63 : p[j + 4] >> 4 | (p[j] >> 2 & 48));
    }
};

struct Q4_0 {
    static constexpr int type = 2, values = 32, bytes = 18;
    static void read(const uint8_t* p, float* out) {
        const float d = half(p);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * (float)((p[2 + i] & 15) - 8);
            out[16 + i] = d * (float)((p[2 + i] >> 4) - 8);
        }
    }
};
struct Q4_1 {
    static constexpr int type = 3, values = 32, bytes = 20;
    static void read(const uint8_t* p, float* out) {
        const float d = half(p), m = half(p + 2);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * (float)(p[4 + i] & 15) + m;
            out[16 + i] = d * (float)(p[4 + i] >> 4) + m;
        }
    }
};
struct Q8_0 {
    static constexpr int type = 8, values = 32, bytes = 34;
    static void read(const uint8_t* p, float* out) {
        const float d = half(p);
        for (int i = 0; i < 32; ++i) out[i] = d * (float)(int8_t)p[2 + i];
    }
};
struct Q4_K {
    static constexpr int type = 12, values = 256, bytes = 144;
    static void read(const uint8_t* p, float* out) {
        const float d = half(p), m = half(p + 2);
        for (int j = 0; j < 8; ++j, out += 32) {
            const SixBits part(p + 4, j);
            const float scale = d * part.scale, offset = m * part.offset;
            const uint8_t* codes = p + 16 + j / 2 * 32;
            for (int i = 0; i < 32; ++i) out[i] = scale * (float)(codes[i] >> j % 2 * 4 & 15) - offset;
        }
    }
};
struct Q5_K {
    static constexpr int type = 13, values = 256, bytes = 176;
    static void read(const uint8_t* p, float* out) {
        const float d = half(p), m = half(p + 2);
        for (int j = 0; j < 8; ++j, out += 32) {
            const SixBits part(p + 4, j);
            const float scale = d * part.scale, offset = m * part.offset;
            const uint8_t *high = p + 16, *codes = p + 48 + j / 2 * 32;
            for (int i = 0; i < 32; ++i)
                out[i] = scale * (float)((codes[i] >> j % 2 * 4 & 15) | (high[i] >> j & 1) << 4) - offset;
        }
    }
};
struct Q6_K {
    static constexpr int type = 14, values = 256, bytes = 210;
    static void read(const uint8_t* p, float* out) {
        const float d = half(p + 208);
        for (int j = 0; j < 8; ++j, out += 32) {
            const uint8_t *codes = p + j / 4 * 64 + j % 2 * 32, *high = p + 128 + j / 4 * 32;
            const int low = j % 4 / 2 * 4, shift = j % 4 * 2;
            for (int i = 0; i < 32; ++i) {
                const float scale = d * (float)(int8_t)p[192 + 2 * j + i / 16];
                out[i] = scale * (float)(((codes[i] >> low & 15) | (high[i] >> shift & 3) << 4) - 32);
            }
        }
    }
};

template <class... Types>
static int dequantise(int type, const uint8_t* blocks, float* out, int64_t count, int threads) {
    auto read = [&](auto kind) {
        using Kind = decltype(kind);
        if (type != Kind::type) return false;
        parallel_ranges(threads, count / Kind::values, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) Kind::read(blocks + i * Kind::bytes, out + i * Kind::values);
        });
        return true;
    };
    return (read(Types{}) || ...);
}

}  // namespace mi

// `count` values of whole blocks of a GGUF type; 0: of a type that is not read here.
extern "C" int mi_gguf_dequantise(int type, const void* blocks, void* out, int64_t count, int threads) {
    using namespace mi;
    return dequantise<Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K>(type, (const uint8_t*)blocks, (float*)out, count, threads);
}

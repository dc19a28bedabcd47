// A checksum that changes with a tensor's content.
#pragma once

#include "common.h"

namespace mi {

// Order-sensitive hash of n bytes: per stretch of 1 MiB, 128 independent multiply-xor lanes, folded in order.
inline uint64_t hash_stretch(const unsigned char* p, int64_t n) {
    constexpr int kLanes = 8;
    vu lanes[kLanes];
    for (int j = 0; j < kLanes; ++j)
        for (int i = 0; i < W; ++i) lanes[j][i] = 0x9e3779b9u * (uint32_t)(j * W + i + 1);
    int64_t at = 0;
    for (; at + (int64_t)sizeof lanes <= n; at += sizeof lanes)
        for (int j = 0; j < kLanes; ++j) {
            vu words;
            std::memcpy(&words, p + at + j * sizeof(vu), sizeof words);
            lanes[j] = (lanes[j] ^ words) * 0x01000193u;
            lanes[j] ^= lanes[j] >> 15;  // moves high bits to the low ones, which a product alone does not
        }
    uint64_t hash = 0xcbf29ce484222325ull;
    for (; at < n; ++at) hash = (hash ^ p[at]) * 0x100000001b3ull;
    for (int j = 0; j < kLanes; ++j)
        for (int i = 0; i < W; ++i) hash = (hash ^ lanes[j][i]) * 0x100000001b3ull;
    return hash;
}

// Checksum of `bytes` at data; then(from, to) is called for every stretch of it, on the thread that has just read it.
template <class Then>
uint64_t checksum(const void* data, int64_t bytes, int threads, Then&& then) {
    constexpr int64_t kStretch = 1 << 20, kMax = 4096;
    uint64_t hash = (uint64_t)bytes, part[kMax];
    const unsigned char* p = (const unsigned char*)data;
    for (int64_t from = 0; from < bytes; from += kStretch * kMax) {
        int64_t size = bytes - from < kStretch * kMax ? bytes - from : kStretch * kMax;
        int64_t count = (size + kStretch - 1) / kStretch;
        parallel_ranges(threads, count, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t left = size - i * kStretch, n = left < kStretch ? left : kStretch;
                const int64_t start = from + i * kStretch;
                part[i] = hash_stretch(p + start, n);
                then(start, start + n);
            }
        });
        for (int64_t i = 0; i < count; ++i) hash = (hash ^ part[i]) * 0x9e3779b97f4a7c15ull + 1;
    }
    return hash;
}

}  // namespace mi

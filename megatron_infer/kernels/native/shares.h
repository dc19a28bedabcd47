// How the threads of a linear divide its panels.
#pragma once

#include <atomic>

#include "common.h"

namespace mi {

// Parts in one range for each thread. A thread takes those of its own in order, so that it reads one stream and what it
// fetches ahead is its own; one without parts takes the last of another.
class Shares {
  public:
    static constexpr int kMost = 64;  // ranges

    Shares(int64_t parts, int ranges) : ranges_(ranges) {
        for (int i = 0; i < ranges; ++i) {
            const uint64_t begin = parts * i / ranges, end = parts * (i + 1) / ranges;
            range_[i].parts.store(begin << 32 | end, std::memory_order_relaxed);
        }
    }
    // The next part for a thread; -1: none is left.
    int64_t take(int thread) {
        const int own = thread % ranges_;
        int64_t part = take_from(own, true);
        for (int i = 1; part < 0 && i < ranges_; ++i) part = take_from((own + i) % ranges_, false);
        return part;
    }

  private:
    int64_t take_from(int range, bool first) {
        std::atomic<uint64_t>& parts = range_[range].parts;
        uint64_t now = parts.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t begin = now >> 32, end = now & 0xffffffffu;
            if (begin >= end) return -1;
            if (parts.compare_exchange_weak(now, first ? now + ((uint64_t)1 << 32) : now - 1, std::memory_order_relaxed))
                return (int64_t)(first ? begin : end - 1);
        }
    }

    struct alignas(64) Range {
        std::atomic<uint64_t> parts;  // begin << 32 | end
    };
    Range range_[kMost];
    int ranges_;
};

}  // namespace mi

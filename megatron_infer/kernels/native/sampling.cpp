// Argmax; temperature, top_k, top_p, min_p and the inverse-CDF draw; log probabilities and ranks. Rows are divided over threads.
//
// The same definition as megatron_infer/runner/sampling/filters.py: weights floor(2^40 e^s) with s = (x - max) / temperature in
// double, exact integer sums, candidates by (logit descending, id ascending). Sorting is avoided: first only the few
// candidates above a bound are sorted, and the whole row by radix when the filters reach further.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace mi {
namespace {

constexpr int L = W / 2;  // doubles in a vector
typedef double vd __attribute__((vector_size(8 * L)));
typedef int64_t vl __attribute__((vector_size(8 * L)));
typedef float vhalf __attribute__((vector_size(4 * L)));

constexpr double kScale = 1099511627776.0;  // 2^40
constexpr int64_t kGroup = 64;              // entries per entry of the table of maxima
constexpr int64_t kMany = 256;              // candidates tried before the whole row for rows without a top_k
constexpr int64_t kStretch = 512;           // entries per partial sum
constexpr size_t kRadixFrom = 1024;
constexpr int64_t kSerialElements = 1 << 15;  // fewer are not worth a parallel region
#if defined(__AVX512F__) && defined(__AVX512DQ__)
alignas(64) constexpr double kRoots[16] = {  // 2^(i / 16)
    1.0,                1.0442737824274138, 1.0905077326652577, 1.1387886347566916, 1.1892071150027210, 1.2418578120734840,
    1.2968395546510096, 1.3542555469368927, 1.4142135623730951, 1.4768261459394993, 1.5422108254079407, 1.6104903319492543,
    1.6817928305074290, 1.7562521603732995, 1.8340080864093424, 1.9152065613971474};
#endif

struct Scaling {
    double top, inverse_temperature;
};

// weights[i] = floor(2^40 e^s[i]) for s <= 0, of N vectors at once: the chain of one is long, and only so many instructions
// wait in a core. e^s after range reduction within 2 ulp of double, exactly 1 at 0: with vectors of 8 doubles by
// 2^(n / 16) from a table and degree-7 Taylor, else by degree-13 Taylor.
template <int N>
inline void weights_of(const vd (&scaled)[N], vl (&weights)[N]) {
    vd s[N], r[N], shifted[N];
    for (int i = 0; i < N; ++i) s[i] = (scaled[i] < -40.0) ? vd{} - 40.0 : scaled[i];  // 2^40 e^-40 is below 1
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    constexpr double kSteps = 16;
#else
    constexpr double kSteps = 1;
#endif
    for (int i = 0; i < N; ++i) shifted[i] = s[i] * (kSteps * 1.4426950408889634) + magic;
    for (int i = 0; i < N; ++i) r[i] = s[i] - (shifted[i] - magic) * (0.693147180369123816490 / kSteps);
    for (int i = 0; i < N; ++i) r[i] = r[i] - (shifted[i] - magic) * (1.90821492927058770002e-10 / kSteps);
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const __m512d low = _mm512_loadu_pd(kRoots), high = _mm512_loadu_pd(kRoots + 8);
    vd square[N], a[N], b[N], c[N], root[N];
    for (int i = 0; i < N; ++i) square[i] = r[i] * r[i];
    for (int i = 0; i < N; ++i) root[i] = (vd)_mm512_permutex2var_pd(low, (__m512i)shifted[i], high);  // by the lowest 4 bits
    for (int i = 0; i < N; ++i) a[i] = r[i] * (1.0 / 5040.0) + 1.0 / 720.0;
    for (int i = 0; i < N; ++i) b[i] = r[i] * (1.0 / 120.0) + 1.0 / 24.0;
    for (int i = 0; i < N; ++i) c[i] = r[i] * (1.0 / 6.0) + 0.5;
    for (int i = 0; i < N; ++i) b[i] = a[i] * square[i] + b[i];
    for (int i = 0; i < N; ++i) c[i] = b[i] * square[i] + c[i];
    for (int i = 0; i < N; ++i) c[i] = c[i] * square[i] + r[i];
    for (int i = 0; i < N; ++i) {
        const vd e = c[i] * root[i] + root[i];
        const vl power = (((vl)shifted[i] >> 4) << 52) + (40LL << 52);  // 2^40 2^floor(n / 16)
        weights[i] = (vl)_mm512_cvttpd_epi64((__m512d)((vl)e + power));
    }
#else
    constexpr double inverse[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                                  1.0 / 40320.0,      1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,
                                  1.0 / 6.0,          0.5,               1.0,              1.0};
    vd p[N];
    for (int i = 0; i < N; ++i) p[i] = vd{} + inverse[0];
    for (int k = 1; k < 14; ++k)
        for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + inverse[k];
    for (int i = 0; i < N; ++i) {
        vd e = (vd)((vl)p[i] + ((vl)shifted[i] << 52));
        weights[i] = __builtin_convertvector(e * kScale, vl);
    }
#endif
}

// Weights of N * L logits.
template <int N>
inline void weights(const float* p, Scaling scaling, vl (&out)[N]) {
    vd s[N];
    for (int i = 0; i < N; ++i) {
        vhalf half;
        std::memcpy(&half, p + i * L, sizeof half);
        s[i] = (__builtin_convertvector(half, vd) - scaling.top) * scaling.inverse_temperature;
    }
    weights_of(s, out);
}

// Weights of x[0 .. n) into out, which has room for n rounded up to W -> their sum.
int64_t weigh(const float* x, int64_t n, Scaling scaling, int64_t* out) {
    vl sum = {};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        float part[2 * W];
        store(part, load(x + i));
        store(part + W, load(x + i + W));
        vl w[4];
        weights(part, scaling, w);
        sum += (w[0] + w[1]) + (w[2] + w[3]);
        if (out) std::memcpy(out + i, w, sizeof w);
    }
    for (; i < n; i += W) {
        float part[W];
        int64_t count = std::min<int64_t>(W, n - i);
        store(part, count == W ? load(x + i) : load_part(x + i, (int)count));
        for (int64_t j = count; j < W; ++j) part[j] = -std::numeric_limits<float>::infinity();
        vl w[2];
        weights(part, scaling, w);
        sum += w[0] + w[1];
        if (out) std::memcpy(out + i, w, sizeof w);
    }
    int64_t total = 0;
    for (int j = 0; j < L; ++j) total += sum[j];
    return total;
}

// Ascending order of these is (logit descending, id ascending): 0.0 and -0.0 are equal, NaN does not occur.
uint64_t key_of(float x, int64_t id) {
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t descending = bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
    return (uint64_t)descending << 32 | (uint32_t)id;
}
float logit_of(uint64_t key) {
    uint32_t descending = (uint32_t)(key >> 32), bits = descending & 0x80000000u ? descending : ~(descending | 0x80000000u);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct Wish {
    double inverse_temperature, top_k, top_p, min_p, uniform;
};

struct Chosen {
    int64_t token;
    float top, cut_logit;
    int64_t cut_id;
    int64_t mass;  // of the whole row at temperature 1, where it was summed: the denominator of log probabilities
};

// The lowest index of an entry that equals `wanted`, 0 without any: a whole stretch is tested at once, then searched.
int64_t first_equal(const float* x, int64_t vocab, float wanted) {
    constexpr int64_t kStep = 8 * W;
    for (int64_t i = 0; i < vocab; i += kStep) {
        const int64_t stop = std::min(vocab, i + kStep);
        vi hit = {};
        if (i + kStep <= vocab)
            for (int j = 0; j < 8; ++j) hit |= (vi)(load(x + i + j * W) == splat(wanted));
        bool any = i + kStep > vocab;
        for (int j = 0; j < W; ++j) any |= hit[j] != 0;
        if (!any) continue;
        for (int64_t k = i; k < stop; ++k)
            if (x[k] == wanted) return k;
    }
    return 0;
}

class Drawer {
   public:
    Chosen draw(const float* x, int64_t vocab, const Wish& wish) {
        Chosen chosen = {0, scan(x, vocab), -std::numeric_limits<float>::infinity(), vocab, 0};
        if (!std::isfinite(chosen.top)) return chosen;
        Scaling scaling = {chosen.top, wish.inverse_temperature};
        bool has_top_k = wish.top_k < (double)vocab, has_top_p = wish.top_p < 1.0;
        if (!has_top_k && !has_top_p && wish.min_p <= 0.0) {
            int64_t total = 0;
            chosen.token = draw_any(x, vocab, scaling, wish.uniform, total);
            chosen.mass = wish.inverse_temperature == 1.0 ? total : 0;
            return chosen;
        }
        int64_t mass = has_top_p && !has_top_k ? weigh(x, vocab, scaling, nullptr) : 0;
        chosen.mass = wish.inverse_temperature == 1.0 ? mass : 0;
        int64_t few = has_top_k ? (int64_t)wish.top_k : kMany;
        collect(x, vocab, few);
        if (draw_filtered(vocab, wish, scaling, mass, chosen)) return chosen;
        collect(x, vocab, vocab);
        draw_filtered(vocab, wish, scaling, mass, chosen);
        return chosen;
    }

    // The token's log probability and rank, and the `count` most likely ids with theirs; NaN if the row has no mass.
    // mass: if above 0, that of the row, with maximum `top`: integers, so that summing it again gives the same. Below 0: only
    // `top` is known; 0: neither.
    void score(const float* x, int64_t vocab, int64_t token, int64_t count, int64_t mass, float top, float* logprob,
               int64_t* rank, int64_t* ids, float* logprobs) {
        if (mass == 0 || count) top = scan(x, vocab);
        const float own = x[token];
        double norm = std::numeric_limits<double>::quiet_NaN();
        if (mass <= 0 && std::isfinite(top)) mass = weigh(x, vocab, {top, 1.0}, nullptr);
        if (std::isfinite(top)) norm = top + std::log((double)mass / kScale);
        *logprob = (float)(own - norm);
        *rank = 1 + count_before(x, vocab, own, token);
        if (!std::isfinite(top)) {
            for (int64_t i = 0; i < count; ++i) ids[i] = i, logprobs[i] = (float)norm;
            return;
        }
        if (!count) return;
        collect(x, vocab, count);
        for (int64_t i = 0; i < count; ++i) {
            ids[i] = (int64_t)(uint32_t)keys_[i];
            logprobs[i] = (float)(x[ids[i]] - norm);
        }
    }

   private:
    // The number of entries before (own, token) in candidate order.
    static int64_t count_before(const float* x, int64_t vocab, float own, int64_t token) {
        vi above = {}, equal = {};
        int64_t i = 0, before = 0;
        for (; i + W <= vocab; i += W) {
            vf v = load(x + i);
            above -= (vi)(v > own);
            if (i + W <= token) equal -= (vi)(v == own);
        }
        for (int j = 0; j < W; ++j) before += above[j] + equal[j];
        for (int64_t j = i; j < vocab; ++j) before += x[j] > own;
        for (int64_t j = token / W * W; j < token; ++j) before += x[j] == own;
        return before;
    }

    // Maxima of all groups -> the row's maximum, NaN if any entry is.
    float scan(const float* x, int64_t vocab) {
        maxima_.resize((vocab + kGroup - 1) / kGroup);
        vi strange = {};
        float top = -std::numeric_limits<float>::infinity();
        bool broken = false;
        for (size_t g = 0; g < maxima_.size(); ++g) {
            int64_t i = (int64_t)g * kGroup, stop = std::min(vocab, i + kGroup);
            vf best = splat(-std::numeric_limits<float>::infinity());
            for (; i + W <= stop; i += W) {
                vf v = load(x + i);
                strange |= (vi)(v != v);
                best = vmax(v, best);
            }
            float most = max_of(best);
            for (; i < stop; ++i) {
                float v = x[i];
                broken |= v != v;
                most = v > most ? v : most;
            }
            maxima_[g] = most;
            top = most > top ? most : top;
        }
        for (int j = 0; j < W; ++j) broken |= strange[j] != 0;
        return broken ? std::numeric_limits<float>::quiet_NaN() : top;
    }

    // In id order: the stretch that holds the target, then the entry in it. total is 0 before and the sum after.
    int64_t draw_any(const float* x, int64_t vocab, Scaling scaling, double uniform, int64_t& total) {
        sums_.clear();
        for (int64_t i = 0; i < vocab; i += kStretch) {
            sums_.push_back(total);
            total += weigh(x + i, std::min(kStretch, vocab - i), scaling, nullptr);
        }
        int64_t target = std::min((int64_t)(uniform * (double)total), total - 1);
        int64_t stretch = std::upper_bound(sums_.begin(), sums_.end(), target) - sums_.begin() - 1;
        int64_t begin = stretch * kStretch, count = std::min(kStretch, vocab - begin), sum = sums_[stretch];
        weights_.resize(kStretch);
        weigh(x + begin, count, scaling, weights_.data());
        for (int64_t i = 0; i < count; ++i)
            if ((sum += weights_[i]) > target) return begin + i;
        return begin + count - 1;
    }

    // Sorted keys of the first candidates: at least `wanted`, and all that equal the last.
    void collect(const float* x, int64_t vocab, int64_t wanted) {
        keys_.clear();
        float bound = -std::numeric_limits<float>::infinity();
        if (wanted < (int64_t)maxima_.size()) {
            // `wanted` groups have a maximum of at least the bound: at least as many candidates reach it
            ordered_ = maxima_;
            std::nth_element(ordered_.begin(), ordered_.begin() + (wanted - 1), ordered_.end(), std::greater<float>());
            bound = ordered_[wanted - 1];
        }
        for (size_t g = 0; g < maxima_.size(); ++g) {
            if (maxima_[g] < bound) continue;
            int64_t stop = std::min(vocab, (int64_t)(g + 1) * kGroup);
            for (int64_t i = (int64_t)g * kGroup; i < stop; ++i) {
                float v = x[i];
                if (v >= bound) keys_.push_back(key_of(v, i));
            }
        }
        sort_keys();
    }

    // Keys are in id order: a stable sort by their upper halves sorts them completely.
    void sort_keys() {
        if (keys_.size() < kRadixFrom) {
            std::sort(keys_.begin(), keys_.end());
            return;
        }
        constexpr int kBits = 11, kBuckets = 1 << kBits;
        spare_.resize(keys_.size());
        for (int shift = 32; shift < 64; shift += kBits) {
            size_t start[kBuckets] = {};
            for (uint64_t key : keys_) ++start[(key >> shift) & (kBuckets - 1)];
            if (start[(keys_[0] >> shift) & (kBuckets - 1)] == keys_.size()) continue;
            size_t at = 0;
            for (size_t& bucket : start) {
                size_t count = bucket;
                bucket = at;
                at += count;
            }
            for (uint64_t key : keys_) spare_[start[(key >> shift) & (kBuckets - 1)]++] = key;
            keys_.swap(spare_);
        }
    }

    // Filters and draws among the sorted keys; false if they are too few to decide.
    bool draw_filtered(int64_t vocab, const Wish& wish, Scaling scaling, int64_t mass, Chosen& chosen) {
        int64_t count = (int64_t)keys_.size();
        logits_.resize(count);
        for (int64_t i = 0; i < count; ++i) logits_[i] = logit_of(keys_[i]);
        weights_.resize(count + W);
        weigh(logits_.data(), count, scaling, weights_.data());
        bool has_top_k = wish.top_k < (double)vocab, has_top_p = wish.top_p < 1.0;
        int64_t last = (int64_t)std::min(wish.top_k, (double)count);
        double bound = std::numeric_limits<double>::infinity();
        if (has_top_p) {
            if (has_top_k) {
                if (last < (int64_t)wish.top_k) return false;
                mass = 0;
                for (int64_t i = 0; i < last; ++i) mass += weights_[i];
            }
            bound = wish.top_p * (double)mass;
        }
        int64_t kept = 0, sum = 0;
        double least = wish.min_p * kScale;
        while (kept < last && (double)sum < bound && (double)weights_[kept] >= least) sum += weights_[kept++];
        if (kept == count && count < vocab && !(wish.top_k <= (double)count)) return false;
        if (kept == 0) sum = weights_[kept++];
        chosen.cut_logit = logits_[kept - 1];
        chosen.cut_id = (int64_t)(uint32_t)keys_[kept - 1];
        int64_t target = std::min((int64_t)(wish.uniform * (double)sum), sum - 1), drawn = 0;
        while (drawn < kept - 1 && (target -= weights_[drawn]) >= 0) ++drawn;
        chosen.token = (int64_t)(uint32_t)keys_[drawn];
        return true;
    }

    std::vector<float> maxima_, ordered_, logits_;
    std::vector<int64_t> sums_, weights_;
    std::vector<uint64_t> keys_, spare_;
};

// The lowest index of the largest entry, 0 for a row of NaN only; and that entry, NaN if any is.
void argmax_rows(const float* x, int64_t stride, int64_t rows, int64_t vocab, int64_t* id, float* top, int threads) {
    parallel_ranges(rows * vocab < kSerialElements ? 1 : threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* in = x + row * stride;
            const int64_t whole = vocab - vocab % W;
            int64_t i = 0;
            const vf lowest = splat(-std::numeric_limits<float>::infinity());
            vf best[4] = {lowest, lowest, lowest, lowest};
            vi strange = {};
            auto look = [&](int64_t at, int j) {
                const vf v = load(in + at);
                strange |= (vi)(v != v);
                best[j] = vmax(v, best[j]);
            };
            for (; i + 4 * W <= whole; i += 4 * W)
                for (int j = 0; j < 4; ++j) look(i + j * W, j);
            for (; i < whole; i += W) look(i, 0);
            float most = max_of(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
            bool broken = false;
            for (; i < vocab; ++i) {
                const float v = in[i];
                broken |= v != v;
                most = v > most ? v : most;
            }
            for (int j = 0; j < W; ++j) broken |= strange[j] != 0;
            id[row] = first_equal(in, vocab, most);
            top[row] = broken ? std::numeric_limits<float>::quiet_NaN() : most;
        }
    });
}

// columns: double [5][rows], in the order of Wish.
void draw_rows(const float* x, int64_t stride, int64_t rows, int64_t vocab, const double* columns, int64_t* token,
                      float* top, float* cut_logit, int64_t* cut_id, int64_t* mass, int threads) {
    parallel_ranges(threads, rows, [&](int64_t begin, int64_t end) {
        static thread_local Drawer drawer;
        for (int64_t row = begin; row < end; ++row) {
            const double* c = columns + row;
            Wish wish = {c[0], c[rows], c[2 * rows], c[3 * rows], c[4 * rows]};
            Chosen chosen = drawer.draw(x + row * stride, vocab, wish);
            token[row] = chosen.token;
            top[row] = chosen.top;
            cut_logit[row] = chosen.cut_logit;
            cut_id[row] = chosen.cut_id;
            mass[row] = chosen.mass;
        }
    });
}

// Per row: token in; log probability, rank, `count` ids and log probabilities out. mass and top: null, or the results of the draw.
void score_rows(const float* x, int64_t stride, int64_t rows, int64_t vocab, const int64_t* token, int64_t count,
                const int64_t* mass, const float* top, float* logprob, int64_t* rank, int64_t* ids, float* logprobs, int threads) {
    parallel_ranges(threads, rows, [&](int64_t begin, int64_t end) {
        static thread_local Drawer drawer;
        for (int64_t row = begin; row < end; ++row)
            drawer.score(x + row * stride, vocab, token[row], count, mass ? mass[row] : 0, top ? top[row] : 0.0f, logprob + row, rank + row, ids + row * count,
                         logprobs + row * count);
    });
}

}  // namespace
}  // namespace mi

using namespace mi;

extern "C" {

void mi_argmax(const float* x, int64_t stride, int64_t rows, int64_t vocab, int64_t* id, float* top, int threads) {
    argmax_rows(x, stride, rows, vocab, id, top, threads);
}
void mi_draw(const float* x, int64_t stride, int64_t rows, int64_t vocab, const double* columns, int64_t* token,
             float* top, float* cut_logit, int64_t* cut_id, int64_t* mass, int threads) {
    draw_rows(x, stride, rows, vocab, columns, token, top, cut_logit, cut_id, mass, threads);
}
void mi_score(const float* x, int64_t stride, int64_t rows, int64_t vocab, const int64_t* token, int64_t count,
              const int64_t* mass, const float* top, float* logprob, int64_t* rank, int64_t* ids, float* logprobs,
              int threads) {
    score_rows(x, stride, rows, vocab, token, count, mass, top, logprob, rank, ids, logprobs, threads);
}
}

// Temperature, top_k, top_p, min_p and the inverse-CDF draw; log probabilities and ranks. Rows are divided over threads.
//
// The same definition as megatron_infer/sampling/filters.py: weights floor(2^40 e^s) with s = (x - max) / temperature in
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

// floor(2^40 e^s) for s <= 0. e^s by degree-13 Taylor after range reduction: within 1 ulp of double, exactly 1 at 0.
vl weight_of(vd s) {
    s = (s < -40.0) ? vd{} - 40.0 : s;  // 2^40 e^-40 is below 1
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    vd shifted = s * 1.4426950408889634 + magic;
    vd n = shifted - magic;
    vd r = s - n * 0.693147180369123816490;
    r = r - n * 1.90821492927058770002e-10;
    constexpr double inverse[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                                  1.0 / 40320.0,      1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,
                                  1.0 / 6.0,          0.5,               1.0,              1.0};
    vd p = vd{} + inverse[0];
    for (int i = 1; i < 14; ++i) p = p * r + inverse[i];
    vd e = (vd)((vl)p + ((vl)shifted << 52));
    return __builtin_convertvector(e * kScale, vl);
}

struct Scaling {
    double top, inverse_temperature;
};

vl weights(const float* p, Scaling scaling) {
    vhalf half;
    std::memcpy(&half, p, sizeof half);
    return weight_of((__builtin_convertvector(half, vd) - scaling.top) * scaling.inverse_temperature);
}

// Weights of x[0 .. n) into out, which has room for n rounded up to W -> their sum.
template <class T>
int64_t weigh(const T* x, int64_t n, Scaling scaling, int64_t* out) {
    vl sum = {};
    for (int64_t i = 0; i < n; i += W) {
        float part[W];
        int64_t count = std::min<int64_t>(W, n - i);
        store(part, count == W ? load(x + i) : load_part(x + i, (int)count));
        for (int64_t j = count; j < W; ++j) part[j] = -std::numeric_limits<float>::infinity();
        for (int j = 0; j < 2; ++j) {
            vl w = weights(part + j * L, scaling);
            sum += w;
            if (out) std::memcpy(out + i + j * L, &w, sizeof w);
        }
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

class Drawer {
   public:
    template <class T>
    Chosen draw(const T* x, int64_t vocab, const Wish& wish) {
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
    // mass: if above 0, that of the row, with maximum `top`: integers, so that summing it again gives the same.
    template <class T>
    void score(const T* x, int64_t vocab, int64_t token, int64_t count, int64_t mass, float top, float* logprob,
               int64_t* rank, int64_t* ids, float* logprobs) {
        if (mass <= 0 || count) top = scan(x, vocab);
        const float own = to_float(x[token]);
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
            logprobs[i] = (float)(to_float(x[ids[i]]) - norm);
        }
    }

   private:
    // The number of entries before (own, token) in candidate order.
    template <class T>
    static int64_t count_before(const T* x, int64_t vocab, float own, int64_t token) {
        vi above = {}, equal = {};
        int64_t i = 0, before = 0;
        for (; i + W <= vocab; i += W) {
            vf v = load(x + i);
            above -= (vi)(v > own);
            if (i + W <= token) equal -= (vi)(v == own);
        }
        for (int j = 0; j < W; ++j) before += above[j] + equal[j];
        for (int64_t j = i; j < vocab; ++j) before += to_float(x[j]) > own;
        for (int64_t j = token / W * W; j < token; ++j) before += to_float(x[j]) == own;
        return before;
    }

    // Maxima of all groups -> the row's maximum, NaN if any entry is.
    template <class T>
    float scan(const T* x, int64_t vocab) {
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
                float v = to_float(x[i]);
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
    template <class T>
    int64_t draw_any(const T* x, int64_t vocab, Scaling scaling, double uniform, int64_t& total) {
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
    template <class T>
    void collect(const T* x, int64_t vocab, int64_t wanted) {
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
                float v = to_float(x[i]);
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

// columns: double [5][rows], in the order of Wish.
template <class T>
void draw_rows(const T* x, int64_t stride, int64_t rows, int64_t vocab, const double* columns, int64_t* token,
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
template <class T>
void score_rows(const T* x, int64_t stride, int64_t rows, int64_t vocab, const int64_t* token, int64_t count,
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

#define MI_SAMPLING(SUFFIX, T)                                                                                          \
    void mi_draw_##SUFFIX(const void* x, int64_t stride, int64_t rows, int64_t vocab, const double* columns,            \
                          int64_t* token, float* top, float* cut_logit, int64_t* cut_id, int64_t* mass, int threads) {  \
        draw_rows((const T*)x, stride, rows, vocab, columns, token, top, cut_logit, cut_id, mass, threads);             \
    }                                                                                                                   \
    void mi_score_##SUFFIX(const void* x, int64_t stride, int64_t rows, int64_t vocab, const int64_t* token,            \
                           int64_t count, const int64_t* mass, const float* top, float* logprob, int64_t* rank,         \
                           int64_t* ids, float* logprobs, int threads) {                                                \
        score_rows((const T*)x, stride, rows, vocab, token, count, mass, top, logprob, rank, ids, logprobs, threads);   \
    }
MI_SAMPLING(f32, float)
MI_SAMPLING(bf16, bf16)
}

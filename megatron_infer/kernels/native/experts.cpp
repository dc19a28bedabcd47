// A mixture-of-experts layer: the router's choice from its logits, and the sum of the chosen experts.
//
// A token's choice, products and sum depend on nothing but the token: its experts are added in the order of their numbers,
// each rounded as if it ran alone. Pairs of an expert and a token are sorted by expert; threads take experts.
#include <cmath>
#include <limits>

#include "experts.h"

namespace mi {

constexpr int64_t kSerialScores = 4096;  // up to so many scores are looked at by one thread
constexpr int64_t kMostPairs = 8192;     // pairs whose products are in memory at once
constexpr int64_t kRun = 256;            // pairs of an expert that one thread takes at once

static void softmax(float* x, int64_t num) {
    float top = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t i = 0; i < num; ++i)
        if (!(x[i] <= top)) top = x[i];
    for (int64_t i = 0; i < num; i += W) store_any(x, exp_of(load_any(x, i, num) - splat(top)), i, num);
    for (int64_t i = 0; i < num; ++i) sum += x[i];
    for (int64_t i = 0; i < num; ++i) x[i] /= sum;
}

// The largest free key, of equal ones the first; -1: none is free.
static int64_t best_of(const float* key, const uint8_t* free, int64_t num) {
    int64_t at = -1;
    float most = 0;
    for (int64_t i = 0; i < num; ++i)
        if (free[i] && (at < 0 || key[i] > most)) at = i, most = key[i];
    return at;
}

// Frees the experts of the groups whose largest keys have the largest sums.
static void free_best_groups(const Routing& r, const float* key, uint8_t* free, float* score, uint8_t* open) {
    const int64_t size = r.num_experts / r.num_groups, best = r.top_k / r.group_topk;
    for (int64_t g = 0; g < r.num_groups; ++g) {
        std::memset(free + g * size, 1, size);
        float sum = 0;
        for (int64_t i = 0; i < best; ++i) {
            const int64_t at = g * size + best_of(key + g * size, free + g * size, size);
            sum += key[at], free[at] = 0;
        }
        score[g] = sum, open[g] = 1;
        if (score[g] != score[g]) score[g] = std::numeric_limits<float>::infinity();
    }
    std::memset(free, 0, r.num_experts);
    for (int64_t i = 0; i < r.group_topk; ++i) {
        const int64_t g = best_of(score, open, r.num_groups);
        open[g] = 0;
        std::memset(free + g * size, 1, size);
    }
}

// One token: its experts, ascending, and their weights. score: num_experts entries; key, free: twice as many.
static void choose(const Routing& r, const float* logits, int32_t* ids, float* weights, float* score, float* key, uint8_t* free) {
    const int64_t num = r.num_experts;
    for (int64_t e = 0; e < num; e += W) {
        const vf x = load_any(logits, e, num);
        store_any(score, r.is_sigmoid ? splat(1.0f) / (exp_of(-x) + 1.0f) : x, e, num);
    }
    const bool scores_all = r.is_sigmoid || r.pre_softmax;
    if (r.pre_softmax && !r.is_sigmoid) softmax(score, num);
    for (int64_t e = 0; e < num; ++e) {
        key[e] = r.is_sigmoid && r.bias ? score[e] + r.bias[e] : score[e];
        if (key[e] != key[e]) key[e] = std::numeric_limits<float>::infinity();  // as torch sorts it
    }
    if (r.group_topk)
        free_best_groups(r, key, free, key + num, free + num);
    else
        std::memset(free, 1, num);
    std::memset(free + num, 0, num);
    for (int64_t k = 0; k < r.top_k; ++k) {
        const int64_t at = best_of(key, free, num);
        free[at] = 0, free[num + at] = 1;
    }
    for (int64_t e = 0, k = 0; e < num; ++e)
        if (free[num + e]) ids[k] = (int32_t)e, weights[k++] = score[e];
    if (r.is_sigmoid && r.top_k > 1) {
        float sum = 0;
        for (int64_t k = 0; k < r.top_k; ++k) sum += weights[k];
        sum += 1e-20f;
        for (int64_t k = 0; k < r.top_k; ++k) weights[k] /= sum;
    } else if (!scores_all) {
        softmax(weights, r.top_k);
    }
    for (int64_t k = 0; r.scaling && k < r.top_k; ++k) weights[k] = weights[k] * r.scaling;
}

static void route(const Routing& r, const float* logits, int32_t* ids, float* weights, int64_t tokens, int threads) {
    const int64_t num = r.num_experts;
    parallel_ranges(tokens * num <= kSerialScores ? 1 : threads, tokens, [&](int64_t begin, int64_t end) {
        static thread_local Buffer scores, marks;
        float* score = scores.get<float>(3 * num);
        uint8_t* free = marks.get<uint8_t>(2 * num);
        for (int64_t t = begin; t < end; ++t)
            choose(r, logits + t * num, ids + t * r.top_k, weights + t * r.top_k, score, score + num, free);
    });
}

template <class T>
struct SiluMul;
template <>
struct SiluMul<float> {
    static constexpr auto run = mi_silu_mul_f32;
};
template <>
struct SiluMul<bf16> {
    static constexpr auto run = mi_silu_mul_bf16;
};

// Neighbouring pairs of one expert.
struct Run {
    int64_t expert, begin, count;
};

// bias * weight. Not inlined: the sum after it must not be fused with it.
template <class T>
__attribute__((noinline)) static void scale_bias(const T* bias, float weight, float* out, int64_t dim) {
    for (int64_t i = 0; i < dim; ++i) out[i] = to_float(bias[i]) * weight;
}

// The weighted products of a run, each as if its expert ran alone. from: where each pair's input is.
template <class T>
static void run_expert(const ExpertsCall& call, const Run& run, const T* x, const int32_t* token, const float* weight,
                       T* product, int threads) {
    static thread_local Buffer inputs, firsts, middles, biases;
    const Experts& e = *call.experts;
    T* in = inputs.get<T>(run.count * e.inner);
    T* first = firsts.get<T>(run.count * e.fc1_rows);
    T* middle = middles.get<T>(run.count * e.ffn);
    for (int64_t p = 0; p < run.count; ++p)
        std::memcpy(in + p * e.inner, x + token[run.begin + p] * e.inner, e.inner * sizeof(T));
    call.linear(in, e.inner, e.fc1[run.expert], e.fc1_bias ? e.fc1_bias[run.expert] : nullptr, first, run.count, e.inner,
                e.fc1_rows, threads);
    if (e.activation == kSwiGLU)
        SiluMul<T>::run(first, middle, run.count, e.ffn, threads);
    else
        activate(e.activation, first, middle, run.count, e.ffn);
    for (int64_t p = 0; p < run.count; ++p) {
        T* row = middle + p * e.ffn;
        for (int64_t i = 0; i < e.ffn; i += W) store_any(row, load_any(row, i, e.ffn) * weight[run.begin + p], i, e.ffn);
    }
    product += run.begin * e.outer;
    call.linear(middle, e.ffn, e.fc2[run.expert], nullptr, product, run.count, e.ffn, e.outer, threads);
    if (!e.fc2_bias) return;
    float* bias = biases.get<float>(e.outer);
    for (int64_t p = 0; p < run.count; ++p) {
        scale_bias((const T*)e.fc2_bias[run.expert], weight[run.begin + p], bias, e.outer);
        T* row = product + p * e.outer;
        for (int64_t i = 0; i < e.outer; i += W)
            store_any(row, load_any(row, i, e.outer) + load_any(bias, i, e.outer), i, e.outer);
    }
}

inline vf rounded_to(const float*, vf v) { return v; }
inline vf rounded_to(const bf16*, vf v) {
    bf16 part[W];
    store(part, v);
    return load(part);
}

// Adds the products of some tokens' experts to out.
template <class T>
static void add_some(const ExpertsCall& call, const T* x, const int32_t* ids, const float* weights, T* out, int64_t tokens) {
    static thread_local Buffer places, pairs, scales, list, products;
    const Experts& e = *call.experts;
    const int64_t top_k = call.top_k, most = tokens * top_k;
    int64_t* next = places.get<int64_t>(e.count + 1);
    std::memset(next, 0, (e.count + 1) * sizeof *next);
    const auto local = [&](int64_t i) {
        const int64_t expert = ids[i] - e.first;
        return expert >= 0 && expert < e.count ? expert : -1;
    };
    for (int64_t i = 0; i < most; ++i)
        if (local(i) >= 0) ++next[local(i) + 1];
    Run* runs = list.get<Run>(e.count + most / kRun + 1);
    int64_t num_runs = 0;
    for (int64_t expert = 0; expert < e.count; ++expert) {
        const int64_t begin = next[expert], count = next[expert + 1];
        for (int64_t from = 0; from < count; from += kRun)
            runs[num_runs++] = {expert, begin + from, count - from < kRun ? count - from : kRun};
        next[expert + 1] += begin;
    }
    int32_t* token = pairs.get<int32_t>(2 * most);
    int32_t* place = token + most;
    float* weight = scales.get<float>(most);
    for (int64_t i = 0; i < most; ++i) {
        if (local(i) < 0) {
            place[i] = -1;
            continue;
        }
        const int64_t at = next[local(i)]++;
        token[at] = (int32_t)(i / top_k), weight[at] = weights[i], place[i] = (int32_t)at;
    }
    T* product = products.get<T>(most * e.outer);
    const int threads = (int)call.threads;
    if (num_runs < 2 * threads) {  // too few to share
        for (int64_t i = 0; i < num_runs; ++i) run_expert(call, runs[i], x, token, weight, product, threads);
    } else {
        int64_t taken = 0;
        auto body = [&](int, int) {
            for (int64_t i; (i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < num_runs;)
                run_expert(call, runs[i], x, token, weight, product, 1);
        };
        parallel(threads, body);
    }
    parallel_ranges(most * e.outer < (1 << 15) ? 1 : threads, tokens, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t i = 0; i < e.outer; i += W) {
                vf sum = load_any(out + t * e.outer, i, e.outer);
                for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k)
                    if (place[k] >= 0) sum = rounded_to(out, sum + load_any(product + place[k] * e.outer, i, e.outer));
                store_any(out + t * e.outer, sum, i, e.outer);
            }
    });
}

template <class T>
static void add_experts(const ExpertsCall& call, const T* x, const int32_t* ids, const float* weights, T* out, int64_t tokens) {
    const int64_t at_once = call.top_k < kMostPairs ? kMostPairs / call.top_k : 1;
    for (int64_t t = 0; t < tokens; t += at_once)
        add_some(call, x + t * call.experts->inner, ids + t * call.top_k, weights + t * call.top_k,
                 out + t * call.experts->outer, tokens - t < at_once ? tokens - t : at_once);
}

}  // namespace mi

using namespace mi;

extern "C" {

void mi_route(const Routing* routing, const float* logits, int32_t* ids, float* weights, int64_t tokens, int threads) {
    route(*routing, logits, ids, weights, tokens, threads);
}

#define MI_EXPERTS(SUFFIX, T)                                                                                              \
    void mi_add_experts_##SUFFIX(const ExpertsCall* call, const void* x, const int32_t* ids, const float* weights,         \
                                 void* out, int64_t tokens) {                                                              \
        add_experts(*call, (const T*)x, ids, weights, (T*)out, tokens);                                                    \
    }
MI_EXPERTS(f32, float)
MI_EXPERTS(bf16, bf16)
}

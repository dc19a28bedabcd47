// The arguments of the attention kernels: three structs of 8-byte fields, mirrored in cpu_native.py.
//
// Scheduling must not change any bit of an answer. The two kernels sum in different orders, so the position alone decides
// between them: prefill.cpp computes prompt positions, decode.cpp output positions.
//   prompt  whole, in chunks (also of one token), after a prefix hit, again after an eviction   -> prefill_rows
//   output  one per step as it is drawn, or many in a slice when they are recomputed            -> decode_rows
// Each sums a query's keys in an order that depends on its position and the window, not on the rest of the step.
#pragma once

#include <vector>

#include "common.h"

namespace mi {

struct Step {  // once per step
    int64_t num_tokens, num_rows, num_decode, threads;
    const int32_t *q_len, *kv_len, *cu_q, *table_row, *num_prompt_queries, *block_table;
    int64_t table_stride;
    const int64_t* kv_pos;
    const void *cos, *sin;  // [tokens, rotary_stride] in the activation dtype; null: nothing rotates
    int64_t rotary_stride;
    const int32_t* elsewhere;  // of each row: another call computes its prompt queries; null: of none
};

struct Spec {  // once per kind of layer
    int64_t num_kv, group, head_dim, block_size, rotary_dim, interleaved, window;  // window 0: none
    double scale, softcap;  // softcap 0: none
    int64_t rotary_at;      // first column of cos and sin
    int64_t value_dim;      // less than head_dim: values are the last dims of keys, and nothing else is kept
    const void* sinks;      // a logit of each query head, in fp32 or T; null: none
    int64_t sinks_fp32;
    int64_t key_stride;     // from a head's key to the next one's; between them is what no query reads, or their value
};

struct Call {  // once per layer; strides in elements, the last dimension is contiguous. Without k nothing is appended.
    const void *q, *k, *v;
    void *out, *keys, *values;
    int64_t q_token, q_kv, q_group, k_token, k_head, v_token, v_head;
};

constexpr int kMaxHeadDim = 704;

// Workspace of one backend object; never shared between engines.
struct Context {
    Buffer partials, arrivals, packed, items;
    std::vector<Buffer> scratch;  // one per thread
};

template <class T>
void decode_rows(Context& context, const Step& step, const Spec& spec, const Call& call);
template <class T>
void prefill_rows(Context& context, const Step& step, const Spec& spec, const Call& call);

inline float highest_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return max_of(v);
#endif
}

// Products of query and key, `from` to `to` in whole vectors -> scores; with a softcap c they become c tanh(scale s / c).
inline void cap_scores(const Spec& spec, float* s, int from, int to) {
    if (spec.softcap <= 0) return;
    const float cap = (float)spec.softcap, inner = (float)(spec.scale / spec.softcap);
    for (int t = from; t < to; t += W) store(s + t, tanh_of(load(s + t) * inner) * cap);
}
// What is left to multiply scores with.
inline float scale_of(const Spec& spec) { return spec.softcap > 0 ? 1.0f : (float)spec.scale; }

// e^(scale (s - top)) for s <= top, as weights of T are made of: of bf16 to 4e-6, below its own rounding.
template <class T>
struct Softmax {
    float top, scale;
    Softmax(float top, float scale) : top(top), scale(scale) {}
    vf operator()(vf s) const { return exp_of((s - top) * scale); }
};
#if defined(__AVX512F__)
template <>
struct Softmax<bf16> {
    vf factor, shift;
    Softmax(float top, float scale) : factor(splat(scale * 1.44269504088896f)), shift(splat(top) * -factor) {}
    vf operator()(vf s) const { return exp2_of(fma_of(s, factor, shift)); }
};
#endif

// Sums over values of a query's keys as numbers relative to e^top, and their mass -> the factor that makes the sums the
// output. A sink is one more key, whose value is 0; `top` is in units of the scaled scores.
template <class T>
inline float factor_of(const Spec& spec, int64_t head, float top, float mass) {
    if (!spec.sinks) return 1.0f / mass;
    const float sink = spec.sinks_fp32 ? ((const float*)spec.sinks)[head] : to_float(((const T*)spec.sinks)[head]);
    if (sink <= top) return 1.0f / (mass + __builtin_expf(sink - top));
    const float shrink = __builtin_expf(top - sink);
    return shrink / (mass * shrink + 1.0f);
}

// dst = src with its leading rotary_dim dims rotated by the token's angle, computed in fp32 and rounded once.
template <class T>
inline void rotate_head(const Step& step, const Spec& spec, int64_t token, const T* src, T* dst) {
    const int dim = step.cos ? (int)spec.rotary_dim : 0, half = dim / 2;
    const T* cos = (const T*)step.cos + token * step.rotary_stride + spec.rotary_at;
    const T* sin = (const T*)step.sin + token * step.rotary_stride + spec.rotary_at;
    if (spec.interleaved) {
        for (int i = 0; i < dim; i += 2) {
            float even = to_float(src[i]), odd = to_float(src[i + 1]);
            set(dst[i], even * to_float(cos[i]) - odd * to_float(sin[i]));
            set(dst[i + 1], odd * to_float(cos[i + 1]) + even * to_float(sin[i + 1]));
        }
    } else {
        int i = 0;
        for (; i + W <= half; i += W) {
            vf low = load(src + i), high = load(src + half + i);
            store(dst + i, low * load(cos + i) - high * load(sin + i));
            store(dst + half + i, high * load(cos + half + i) + low * load(sin + half + i));
        }
        for (; i < half; ++i) {
            float low = to_float(src[i]), high = to_float(src[half + i]);
            set(dst[i], low * to_float(cos[i]) - high * to_float(sin[i]));
            set(dst[half + i], high * to_float(cos[half + i]) + low * to_float(sin[half + i]));
        }
    }
    if (dim < spec.head_dim) std::memcpy(dst + dim, src + dim, (spec.head_dim - dim) * sizeof(T));
}

// Rotate a token's key and write key and value of one kv head to the cache; a value that is a part of the key is there then.
template <class T>
inline void append(const Step& step, const Spec& spec, const Call& call, int64_t token, int64_t head) {
    int64_t at = (step.kv_pos[token] * spec.num_kv + head) * spec.key_stride;
    const T* key = (const T*)call.k + token * call.k_token + head * call.k_head;
    rotate_head(step, spec, token, key, (T*)call.keys + at);
    if (spec.key_stride > spec.head_dim)
        std::memcpy((T*)call.keys + at + spec.head_dim, key + spec.head_dim, (spec.key_stride - spec.head_dim) * sizeof(T));
    if (spec.value_dim == spec.head_dim)
        std::memcpy((T*)call.values + at, (const T*)call.v + token * call.v_token + head * call.v_head,
                    spec.head_dim * sizeof(T));
}

}  // namespace mi

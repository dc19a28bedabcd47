// What the native calls know of a mixture-of-experts layer.
#pragma once

#include "layer_ops.h"

namespace mi {

struct Routing {  // mirrored in native_experts.py, as are all of these
    int64_t num_experts, top_k, is_sigmoid, pre_softmax, num_groups, group_topk;  // group_topk 0: experts of all groups
    double scaling;     // 0: none
    const float* bias;  // of sigmoid scores, for the choice alone; may be null
};

enum MLPActivation : int64_t { kSwiGLU, kReLU, kSquaredReLU };

// One of those that are not gated: each entry has the bits that torch gives it.
template <class T>
inline void activate(int64_t kind, const T* first, T* middle, int64_t rows, int64_t width) {
    for (int64_t i = 0, n = rows * width; i < n; i += W) {
        const vf x = load_any(first, i, n), up = (x > 0.0f) | (x != x) ? x : vf{};
        store_any(middle, kind == kSquaredReLU ? up * up : up, i, n);
    }
}

struct Experts {  // those of this rank: [first, first + count) of all
    const void *const *fc1, *const *fc2, *const *fc1_bias, *const *fc2_bias;  // packed weights; biases may be null
    int64_t first, count, inner, fc1_rows, ffn, outer, activation;
};

struct ExpertsCall {
    const Experts* experts;
    Linear* linear;
    int64_t top_k, threads;
};

}  // namespace mi

extern "C" {
void mi_route(const mi::Routing* routing, const float* logits, int32_t* ids, float* weights, int64_t tokens, int threads);
#define MI_EXPERT_OPS(SUFFIX)                                                                                              \
    void mi_add_experts_##SUFFIX(const mi::ExpertsCall* call, const void* x, const int32_t* ids, const float* weights,     \
                                 void* out, int64_t tokens);
MI_EXPERT_OPS(f32)
MI_EXPERT_OPS(bf16)
#undef MI_EXPERT_OPS
}

// The operations that one call runs for many layers (layers.cpp), or for others, as the files that define them must declare
// them.
#pragma once

#include "attention.h"

namespace mi {
struct LoraWeights;
struct LoraStep;

// y = x . weight^T + bias from a packed copy of the weight.
using Linear = void(const void* x, int64_t x_stride, const void* panels, const void* bias, void* out, int64_t tokens,
                    int64_t inner, int64_t rows, int threads);
}  // namespace mi

extern "C" {
#define MI_LAYER_OPS(SUFFIX)                                                                                               \
    void mi_attend_##SUFFIX(mi::Context* context, const mi::Step* step, const mi::Spec* spec, const mi::Call* call);       \
    void mi_rms_norm_##SUFFIX(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t dim,     \
                              float eps, int zero_centered, int threads);                                                  \
    void mi_rms_norm_wide_##SUFFIX(const void* x, void* residual, const void* weight, void* out, int64_t rows,             \
                                   int64_t dim, float eps, int zero_centered, int threads);                                \
    mi::Linear mi_panel_linear_##SUFFIX, mi_int8_linear_##SUFFIX, mi_int4_linear_##SUFFIX;                                 \
    int64_t mi_candidates_##SUFFIX(const void* x, int64_t x_stride, const void* packed, int64_t packed_rows, int32_t* found, \
                                   uint64_t* needs, int64_t tokens, int64_t inner, int64_t rows, int threads);             \
    void mi_silu_mul_##SUFFIX(const void* x, void* out, int64_t rows, int64_t dim, int threads);                           \
    void mi_sigmoid_mul_##SUFFIX(const void* x, const void* gate, int64_t gate_stride, void* out, int64_t rows,            \
                                 int64_t dim, int threads);                                                                \
    void mi_gelu_mul_##SUFFIX(const void* x, void* out, int64_t rows, int64_t dim, int threads);                           \
    void mi_lora_##SUFFIX(const mi::LoraWeights* weights, const mi::LoraStep* step, void* y, const void* x,                \
                          int64_t y_stride, int64_t x_stride);
MI_LAYER_OPS(f32)
MI_LAYER_OPS(bf16)
#undef MI_LAYER_OPS
}

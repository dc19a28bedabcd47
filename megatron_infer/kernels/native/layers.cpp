// The operations of many layers in one call: the kernels of the other files, one after the other, without the time that a
// caller in Python takes between them. Each output goes to one of two buffers in turn, which stay in the caches.
#include <time.h>

#include "experts.h"

namespace mi {

// kLora: a part of a linear, with a time of its own. kActivate: between a shared expert's linears.
enum Kind : int64_t { kNorm, kLinear, kAttend, kSiluMul, kLora, kExperts, kActivate };

struct ExpertsOp;

struct LayerOp {  // mirrored in native_layers.py
    int64_t kind;
    const void *weight, *bias;          // norm: weight; linear: panels and bias or null
    int64_t inner, outer;               // entries of a token before and after the operation
    const Spec* spec;                   // of attention, as are the rest
    int64_t layer, at_q, at_k, at_v, cell;  // columns of the first query, key and value, and from one kv head to the next
    double eps;                         // of a norm, as are the next two
    int64_t zero_centered, alone;       // alone: it norms x without the residual, which it leaves as it is
    int64_t gates_by_gelu;              // of kSiluMul
    const LoraWeights* lora;            // of a linear: the pairs of adapters, or null
    const ExpertsOp* experts;           // of a mixture of experts
};

struct ExpertsOp {  // mirrored in native_experts.py
    Routing routing;
    Experts experts;
    const LayerOp *router, *shared;  // linear; operations of the shared expert, num_shared of them
    const LayerOp* gate;             // null, or the linear whose sigmoid each token weighs the shared expert by
    const LayerOp* around;           // null, or two linears: into the latent space of the experts, and out of it
    int64_t num_shared;
    int64_t number;                  // among the model's mixtures of experts
};

struct LayerCall {  // mirrored in native_layers.py
    const LayerOp* ops;
    int64_t num_ops, tokens, threads;
    Context* context;
    const Step* step;
    const void* x;
    void* residual;  // fp32
    void *buffers[2], *out;
    char *keys, *values;     // of the first layer
    int64_t layer_bytes;     // from one layer's keys to the next one's
    int64_t starts_residual; // the first norm sets the residual
    const LoraStep* lora;    // null: no token has an adapter
    Linear *linear, *wide_linear;  // read the copies of the linears' weights; outputs are of the model's dtype, or fp32
    char* routing;           // routing output, [tokens, layers, top_k]; null: no request returns its routing
    int64_t routing_bytes, routing_token, routing_layer;  // of a number; from a token, and a layer, to the next, in numbers
    const int64_t* kept;     // the tokens that operations from number `narrows_at` on compute, fewer than all
    int64_t num_kept, narrows_at;  // narrows_at 0: all operations compute all tokens
    int64_t* ns;             // time of each kind of operation, added up
};

template <class T>
struct Kernels;

#define MI_TABLE(SUFFIX, T)                                  \
    template <>                                              \
    struct Kernels<T> {                                      \
        static constexpr auto attend = mi_attend_##SUFFIX;   \
        static constexpr auto norm = mi_rms_norm_##SUFFIX;   \
        static constexpr auto add_norm = mi_rms_norm_wide_##SUFFIX; \
        static constexpr auto silu_mul = mi_silu_mul_##SUFFIX;      \
        static constexpr auto gelu_mul = mi_gelu_mul_##SUFFIX;      \
        static constexpr auto sigmoid_mul = mi_sigmoid_mul_##SUFFIX; \
        static constexpr auto lora = mi_lora_##SUFFIX;              \
        static constexpr auto add_experts = mi_add_experts_##SUFFIX; \
    };
MI_TABLE(f32, float)
MI_TABLE(bf16, bf16)

static int64_t clock_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

template <class T>
static void run_experts(const LayerCall& call, const ExpertsOp& op, int64_t tokens, const T* x, T* out);

template <class T>
static void run_op(const LayerCall& call, const LayerOp& op, int64_t tokens, const T* x, T* out, bool starts_residual) {
    using K = Kernels<T>;
    const int threads = (int)call.threads;
    switch (op.kind) {
        case kNorm:
            if (!starts_residual && !op.alone) {
                K::add_norm(x, call.residual, op.weight, out, tokens, op.inner, (float)op.eps, (int)op.zero_centered, threads);
                return;
            }
            for (int64_t i = 0, n = starts_residual ? tokens * op.inner : 0; i < n; i += W)
                store_any((float*)call.residual, load_any(x, i, n), i, n);
            K::norm(x, nullptr, op.weight, out, tokens, op.inner, (float)op.eps, (int)op.zero_centered, threads);
            return;
        case kLinear:
            call.linear(x, op.inner, op.weight, op.bias, out, tokens, op.inner, op.outer, threads);
            return;
        case kAttend: {
            const int64_t dim = op.spec->head_dim, at = op.layer * call.layer_bytes;
            const Call attend = {x + op.at_q, x + op.at_k, x + op.at_v, out, call.keys + at, call.values + at, op.inner,
                                 op.cell, dim, op.inner, op.cell, op.inner, op.cell};
            K::attend(call.context, call.step, op.spec, &attend);
            return;
        }
        case kExperts: run_experts(call, *op.experts, tokens, x, out); return;
        case kActivate: activate(op.layer, x, out, tokens, op.outer); return;
        default: (op.gates_by_gelu ? K::gelu_mul : K::silu_mul)(x, out, tokens, op.outer, threads);
    }
}

template <class T>
static void add_lora(const LayerCall& call, const LayerOp& op, const T* x, T* out) {
    if (call.lora && op.lora) Kernels<T>::lora(op.lora, call.lora, out, x, op.outer, op.inner);
}

template <class T>
static void run_linear(const LayerCall& call, const LayerOp& op, int64_t tokens, const T* x, T* out) {
    run_op(call, op, tokens, x, out, false);
    add_lora(call, op, x, out);
}

// The shared expert's output, or zeros, and to it the chosen ones', in the order of their numbers. With a latent space
// these are added up there, and the shared expert's is added last.
template <class T>
static void run_experts(const LayerCall& call, const ExpertsOp& op, int64_t tokens, const T* x, T* out) {
    static thread_local Buffer scores, choices, scales, between[2], latents[2], shared;
    const int threads = (int)call.threads;
    const int64_t all = op.routing.num_experts, top_k = op.routing.top_k;
    float* logits = scores.get<float>(tokens * all);
    int32_t* ids = choices.get<int32_t>(tokens * top_k);
    float* weights = scales.get<float>(tokens * top_k);
    const LayerOp& router = *op.router;
    call.wide_linear(x, router.inner, router.weight, router.bias, logits, tokens, router.inner, all, threads);
    mi_route(&op.routing, logits, ids, weights, tokens, threads);
    if (call.routing)
        for (int64_t i = 0; i < tokens * top_k; ++i) {
            const int64_t at = i / top_k * call.routing_token + op.number * call.routing_layer + i % top_k;
            std::memcpy(call.routing + at * call.routing_bytes, ids + i, call.routing_bytes);  // of a little-endian number
        }
    const T* from = x;
    T* last = op.around ? shared.get<T>(tokens * router.inner) : out;
    for (int64_t i = 0; i < op.num_shared; ++i) {
        T* to = i + 1 < op.num_shared ? between[i & 1].get<T>(tokens * op.shared[i].outer) : last;
        run_linear(call, op.shared[i], tokens, from, to);
        from = to;
    }
    if (op.gate) {
        static thread_local Buffer gates, rows;
        const int64_t width = router.inner;
        T *gate = gates.get<T>(tokens), *row = rows.get<T>(tokens * width);
        run_linear(call, *op.gate, tokens, x, gate);
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t i = 0; i < width; ++i) row[t * width + i] = gate[t];
        Kernels<T>::sigmoid_mul(last, row, width, last, tokens, width, threads);
    }
    const ExpertsCall experts = {&op.experts, call.linear, top_k, call.threads};
    const int64_t width = op.experts.outer;
    T* sum = op.around ? latents[1].get<T>(tokens * width) : out;
    if (op.around || !op.num_shared) std::memset(sum, 0, tokens * width * sizeof(T));
    if (!op.around) {
        Kernels<T>::add_experts(&experts, x, ids, weights, sum, tokens);
        return;
    }
    T* latent = latents[0].get<T>(tokens * width);
    run_linear(call, op.around[0], tokens, x, latent);
    Kernels<T>::add_experts(&experts, latent, ids, weights, sum, tokens);
    run_linear(call, op.around[1], tokens, sum, out);
    for (int64_t i = 0, n = op.num_shared ? tokens * router.inner : 0; i < n; i += W)
        store_any(out, load_any(out, i, n) + load_any(last, i, n), i, n);
}

// The first `num` rows of x become its rows `which`.
template <class T>
static void gather(T* x, int64_t width, const int64_t* which, int64_t num) {
    static thread_local Buffer buffer;
    T* rows = buffer.get<T>(num * width);
    for (int64_t i = 0; i < num; ++i) std::memcpy(rows + i * width, x + which[i] * width, width * sizeof(T));
    std::memcpy(x, rows, num * width * sizeof(T));
}

template <class T>
static void run_layers(const LayerCall& call) {
    const T* x = (const T*)call.x;
    int64_t begin = clock_ns(), tokens = call.tokens;
    for (int64_t i = 0; i < call.num_ops; ++i) {
        const LayerOp& op = call.ops[i];
        if (i && i == call.narrows_at) {
            tokens = call.num_kept;
            gather((T*)x, op.inner, call.kept, tokens);
            gather((float*)call.residual, call.ops[call.num_ops - 1].outer, call.kept, tokens);
        }
        if (!tokens) return;
        T* out = (T*)(i + 1 < call.num_ops ? call.buffers[i & 1] : call.out);
        run_op(call, op, tokens, x, out, i == 0 && call.starts_residual);
        int64_t end = clock_ns();
        call.ns[op.kind] += end - begin;
        if (call.lora && op.lora) {
            begin = end;
            add_lora(call, op, x, out);
            end = clock_ns();
            call.ns[kLora] += end - begin;
        }
        x = out;
        begin = end;
    }
}

}  // namespace mi

using namespace mi;

extern "C" {
void mi_run_layers_f32(const LayerCall* call) { run_layers<float>(*call); }
void mi_run_layers_bf16(const LayerCall* call) { run_layers<bf16>(*call); }
}

// A stack of causal convolutions over fixed-point activations, for the audio codec: a row's sound in one call.
//
// Activations are whole multiples of 2^-step_bits below a limit, weights of another power of two, so that every sum of
// products is a double without rounding: no order, tile or number of threads changes a bit. A row is computed by one
// thread through all layers; what lies between two layers stays in its cache.
#include "common.h"

namespace mi {

// y[t] = round(bias + sum over k, i of act(x[t - (kernel - 1 - k) * dilation])[i] * weight[k, i, :]), and with `adds` what
// the other buffer holds besides, rounded again. Steps before 0 are zero. The fields of _Layer in kernels/conv_stack.py.
struct ConvLayer {
    const double* weight;  // [kernel * inner, padded]
    const double* bias;    // [padded]
    int64_t inner, outer, padded, kernel, dilation, activates, adds;
};

struct ConvStack {
    const ConvLayer* layers;
    int64_t num_layers, inner, widest;  // widest: values of any layer's output, for each step of the input
    double step, limit, slope;
};

constexpr int V = W / 2;   // doubles in a vector
constexpr int kSteps = 6;  // steps of a tile
typedef double vd __attribute__((vector_size(8 * V)));
typedef float vs __attribute__((vector_size(4 * V)));

inline vd load_d(const double* p) {
    vd v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// The first `count` of a vector.
inline vs load_s(const float* p, int64_t count) {
    vs v = {};
    if (count >= V)
        std::memcpy(&v, p, sizeof v);
    else
        std::memcpy(&v, p, count * sizeof(float));
    return v;
}

// To the nearest step, ties to even, within the limit. 1.5 * 2^52 steps: adding it leaves no digits below a step.
inline vd to_step(vd x, double step, double limit) {
    const vd high = vd{} + limit, low = vd{} - limit, magic = vd{} + 6755399441055744.0 * step;
    x = (x > high) ? high : (x < low) ? low : x;
    return (x + magic) - magic;
}

struct ConvRow {
    const ConvStack& stack;
    const ConvLayer& layer;
    const double* x;  // [steps, inner], activated
    float* y;         // [steps, outer]
    int64_t steps;

    // N vectors of outputs from column `column` on, of the S steps from t on.
    template <int S, int N>
    void tile(int64_t t, int64_t column) const {
        vd acc[S][N];
        for (int s = 0; s < S; ++s)
            for (int n = 0; n < N; ++n) acc[s][n] = load_d(layer.bias + column + n * V);
        for (int64_t k = 0; k < layer.kernel; ++k) {
            const int64_t back = (layer.kernel - 1 - k) * layer.dilation;
            const double *w = layer.weight + k * layer.inner * layer.padded + column, *in[S];
            for (int s = 0; s < S; ++s) in[s] = x + (t + s - back) * layer.inner;  // `run` puts zeros before step 0
            for (int64_t i = 0; i < layer.inner; ++i, w += layer.padded) {
                vd weights[N];
                for (int n = 0; n < N; ++n) weights[n] = load_d(w + n * V);
                for (int s = 0; s < S; ++s)
                    for (int n = 0; n < N; ++n) acc[s][n] += (vd{} + in[s][i]) * weights[n];
            }
        }
        for (int s = 0; s < S; ++s)
            for (int n = 0; n < N; ++n) put(t + s, column + n * V, acc[s][n]);
    }

    void put(int64_t t, int64_t column, vd sum) const {
        const int64_t count = layer.outer - column;
        float* out = y + t * layer.outer + column;
        sum = to_step(sum, stack.step, stack.limit);
        vs before = {};
        if (layer.adds) {
            before = load_s(out, count);
            sum = to_step(__builtin_convertvector(before, vd) + sum, stack.step, stack.limit);
        }
        before = __builtin_convertvector(sum, vs);
        if (count >= V)
            std::memcpy(out, &before, sizeof before);
        else
            std::memcpy(out, &before, count * sizeof(float));
    }

    template <int S>
    void columns(int64_t t) const {
        int64_t column = 0;
        for (; column + 4 * V <= layer.padded; column += 4 * V) tile<S, 4>(t, column);
        switch ((layer.padded - column) / V) {
            case 1: return tile<S, 1>(t, column);
            case 2: return tile<S, 2>(t, column);
            case 3: return tile<S, 3>(t, column);
        }
    }

    void run() const {
        int64_t t = 0;
        for (; t + kSteps <= steps; t += kSteps) columns<kSteps>(t);
        for (; t < steps; ++t) columns<1>(t);
    }
};

// x: [steps, inner] -> the buffer that holds the last layer's output.
static const float* run_row(const ConvStack& stack, const float* x, int64_t steps, Buffer* buffers) {
    int64_t reach = 0;
    for (int64_t l = 0; l < stack.num_layers; ++l) {
        const ConvLayer& layer = stack.layers[l];
        const int64_t before = (layer.kernel - 1) * layer.dilation * layer.inner;
        reach = before > reach ? before : reach;
    }
    float *from = buffers[0].get<float>(steps * stack.widest), *to = buffers[1].get<float>(steps * stack.widest);
    double* active = buffers[2].get<double>(reach + steps * stack.widest);
    std::memset(active, 0, reach * sizeof(double));
    int64_t total = steps * stack.inner;
    std::memcpy(from, x, total * sizeof(float));
    for (int64_t l = 0; l < stack.num_layers; ++l) {
        const ConvLayer& layer = stack.layers[l];
        const double slope = layer.activates ? stack.slope : 1.0;
        for (int64_t i = 0; i < total; ++i) active[reach + i] = from[i] < 0 ? from[i] * slope : from[i];
        const int64_t count = total / layer.inner;
        ConvRow{stack, layer, active + reach, to, count}.run();
        total = count * layer.outer;
        float* written = to;
        to = from;
        from = written;
    }
    return from;
}

}  // namespace mi

using namespace mi;

extern "C" {

int mi_conv_stack_lanes() { return V; }

// x: [rows, steps, inner] -> out: [rows, size], `size` the values of a row behind the last layer.
void mi_conv_stack(const ConvStack* stack, const float* x, float* out, int64_t rows, int64_t steps, int64_t size, int threads) {
    parallel_ranges(threads, rows, [&](int64_t begin, int64_t end) {
        static thread_local Buffer buffers[3];
        for (int64_t row = begin; row < end; ++row)
            std::memcpy(out + row * size, run_row(*stack, x + row * steps * stack->inner, steps, buffers), size * sizeof(float));
    });
}
}

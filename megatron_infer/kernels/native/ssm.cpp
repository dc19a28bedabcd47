// Layers with a recurrent state: causal convolution, step sizes, recurrence; updates the state slot of every row of a step.
//
// Each token is computed by the recurrence itself, whatever the rest of the step:
//     Mamba-2            h = exp(dt A) h + (dt x) B              y = C h + D x
//     gated delta net    h = g h,  h = h + beta (v - k h) k      y = q h        (x, B, C below are v, k, q)
// so a position has the same bits in a decode row, in any chunk and in a whole prompt, and a captured state is the state of
// a chunk that ends there. On a CPU this costs no more than a chunked scan: a few lines h[p, 0..N) stay in registers
// through a tile of tokens while B and C come from L1. A decode row reads and writes its state once.
//
// The step is processed in stretches of tokens. First, over channels: convolution, silu, softplus into fp32 work rows
//     [ x of all heads | B of each group | C of each group ]     each part padded with zeros to whole vectors
// then, over (piece of a row, head, lines of the head): the recurrence. A piece is the part of a row in a stretch; the state
// of a row that a stretch ends in is passed on in fp32.
#include <type_traits>
#include <vector>

#include "common.h"

namespace mi {

struct ScanStep {  // once per step; mirrored in native_scan.py
    int64_t num_rows, threads;
    const int32_t *q_len, *kv_len, *cu_q, *slot;
    int64_t num_captures;
    const int32_t *capture_row, *capture_tokens, *capture_slot;  // by row, then by tokens
};

struct ScanSpec {  // once per kind of layer
    int64_t heads, head_dim, state_dim, groups, taps, is_delta;
    double dt_min, dt_max;
};

struct ScanCall {  // once per layer; strides in elements
    const void *x, *dt;
    void *y, *conv, *ssm;
    const float *conv_weight, *conv_bias, *decay, *skip, *dt_bias;  // conv_bias may be null; skip is, in a delta net
    int64_t x_stride, dt_stride, conv_stride, ssm_stride;
    int64_t conv_is_bf16, ssm_is_bf16, channel_skip;
};

constexpr int64_t kStretch = 256;  // tokens whose work rows are computed, then scanned, while they are in L2
constexpr int64_t kTile = 32;      // tokens whose B and C stay in L1 for all lines of a head
constexpr int64_t kFew = 16;       // tokens of a row whose B and C stay in L1 beside states that are not copied there
constexpr int kBlock = 4 * W;      // channels convolved together
constexpr int kMaxTaps = 8;
constexpr float kL2Eps = 1e-6f;    // L2_EPS in kernels/ssm.py
constexpr int64_t kSerialElements = 32768;  // state entries below which a parallel region costs more than it saves

struct ScanContext {
    Buffer work, steps, carry, tiles;
    std::vector<struct Piece> pieces;
};

// Tokens [from, to) of a row: its part in one stretch.
struct Piece {
    int64_t row, from, to;
    int64_t work;               // its first work row
    int64_t capture, captures;  // its captures: first, end
};

// log(1 + e^x), relative error of a few ulp also where it is tiny: log1p(u) = 2 atanh(u / (2 + u)).
inline vf softplus_of(vf x) {
    const vf u = exp_of((x > 0.0f) ? -x : x), s = u / (u + 2.0f), z = s * s;
    vf p = splat(1.0f / 15);
    const float series[] = {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
    for (float term : series) p = fma_of(p, z, splat(term));
    return fma_of(s + s, p, (x > 0.0f) ? x : vf{});
}

// The tensors of one call, and the work rows between its two halves.
struct Scan {
    const ScanStep& step;
    const ScanSpec& spec;
    const ScanCall& call;
    int64_t inner, state_pad, group_width, work_stride, step_stride;
    float *work, *dt, *decay;  // [tokens, work_stride], [tokens, step_stride] twice; in a delta net dt is beta
    float* qk;                 // [tokens, groups], a delta net's q k
    const float* carried;      // states [heads, head_dim, state_pad] of the row that the last stretch ended in
    float* carry;              // the same for the next
    float* tiles;              // [threads, head_dim, state_pad]

    bool fresh(int64_t row) const { return step.kv_len[row] == step.q_len[row]; }
};

// First half: work rows and step sizes of a piece, and the convolution's states.
template <class T>
struct Prepare : Scan {
    const T* input(int64_t row, int64_t token) const {
        return (const T*)call.x + (step.cu_q[row] + token) * call.x_stride;
    }

    // The inputs of `taps` tokens up to `end` become a slot's convolution state; those before the slice are in `history`.
    template <class S>
    void keep_inputs(int64_t row, int64_t end, int64_t slot, int64_t channel, int n, const float (*history)[kBlock]) const {
        const int taps = (int)spec.taps;
        S* to = (S*)call.conv + slot * call.conv_stride + channel * taps;
        for (int k = 0; k < taps; ++k) {
            const int64_t token = end - taps + k;
            if (token < 0)
                for (int c = 0; c < n; ++c) set(to[c * taps + k], history[taps + token][c]);
            else
                for (int c = 0; c < n; ++c) set(to[c * taps + k], to_float(input(row, token)[channel + c]));
        }
    }

    // The products of `convolve`. TAPS 0: any number. A window of inputs moves along; short runs of tokens stay on few
    // pages for all vectors of the block.
    template <int TAPS>
    void mix(const Piece& piece, int64_t channel, int n, int64_t out, int padded, const float (*weight)[kBlock],
             const float (*history)[kBlock], const float* bias) const {
        constexpr int kMost = TAPS ? TAPS : kMaxTaps;
        constexpr int64_t kRun = 32;
        const int taps = TAPS ? TAPS : (int)spec.taps;
        for (int64_t first = piece.from; first < piece.to; first += kRun) {
            const int64_t stop = first + kRun < piece.to ? first + kRun : piece.to;
            for (int i = 0; i < padded; i += W) {
                const int real = n - i;  // channels of this vector
                const T* in = input(piece.row, 0) + channel + i;
                auto read = [&](int64_t token) {
                    if (real >= W) return load(in + token * call.x_stride);
                    return real > 0 ? load_part(in + token * call.x_stride, real) : vf{};
                };
                vf window[kMost], factor[kMost];
                for (int k = 0; k < taps; ++k) factor[k] = load(weight[k] + i);
                for (int k = 1; k < taps; ++k) {
                    const int64_t token = first - taps + k;
                    window[k] = token < 0 ? load(history[taps + token] + i) : read(token);
                }
                const vf base = load(bias + i);
                float* to = work + (piece.work + first - piece.from) * work_stride + out + i;
                for (int64_t token = first; token < stop; ++token, to += work_stride) {
                    for (int k = 1; k < taps; ++k) window[k - 1] = window[k];
                    window[taps - 1] = read(token);
                    vf sum = base;
                    for (int k = 0; k < taps; ++k) sum = fma_of(window[k], factor[k], sum);
                    store(to, sum / (exp_of(-sum) + 1.0f));
                }
            }
        }
    }

    // n channels from `channel` on for all tokens of a piece -> work columns out .. out + padded; updates their states.
    template <class S>
    void convolve(const Piece& piece, int64_t channel, int n, int64_t out, int padded) const {
        const int taps = (int)spec.taps;
        alignas(64) float weight[kMaxTaps][kBlock] = {}, history[kMaxTaps][kBlock] = {}, bias[kBlock] = {};
        for (int c = 0; c < n; ++c)
            for (int k = 0; k < taps; ++k) weight[k][c] = call.conv_weight[(channel + c) * taps + k];
        if (call.conv_bias) std::memcpy(bias, call.conv_bias + channel, n * sizeof(float));
        if (piece.from < taps && !fresh(piece.row)) {
            const S* state = (const S*)call.conv + step.slot[piece.row] * call.conv_stride + channel * taps;
            for (int c = 0; c < n; ++c)
                for (int k = 0; k < taps; ++k) history[k][c] = to_float(state[c * taps + k]);
        }
        switch (taps) {
            case 2: mix<2>(piece, channel, n, out, padded, weight, history, bias); break;
            case 3: mix<3>(piece, channel, n, out, padded, weight, history, bias); break;
            case 4: mix<4>(piece, channel, n, out, padded, weight, history, bias); break;
            default: mix<0>(piece, channel, n, out, padded, weight, history, bias);
        }
        for (int64_t i = piece.capture; i < piece.captures; ++i)
            keep_inputs<S>(piece.row, step.capture_tokens[i], step.capture_slot[i], channel, n, history);
        if (piece.to == step.q_len[piece.row])
            keep_inputs<S>(piece.row, piece.to, step.slot[piece.row], channel, n, history);
    }

    // beta and decays of a delta net's tokens.
    void gates(const Piece& piece) const {
        for (int64_t token = piece.from; token < piece.to; ++token) {
            const T* in = (const T*)call.dt + (step.cu_q[piece.row] + token) * call.dt_stride;
            const int64_t at = (piece.work + token - piece.from) * step_stride;
            for (int64_t h = 0; h < spec.heads; h += W) {
                store(dt + at + h, 1.0f / (exp_of(-load_any(in, h, spec.heads)) + 1.0f));
                const vf v = softplus_of(load_any(in + spec.heads, h, spec.heads) + load_any(call.dt_bias, h, spec.heads));
                store(decay + at + h, exp_of(v * load_any(call.decay, h, spec.heads)));
            }
        }
    }

    // q and k of a group of a delta net get length 1, q also the factor 1 / sqrt(N); their product.
    void normalise(const Piece& piece, int64_t group) const {
        const float factor = 1.0f / __builtin_sqrtf((float)spec.state_dim);
        for (int64_t token = 0; token < piece.to - piece.from; ++token) {
            float* k = work + (piece.work + token) * work_stride + inner + group * state_pad;
            float* q = k + group_width;
            vf of_q = {}, of_k = {}, both = {};
            for (int64_t i = 0; i < state_pad; i += W) {
                const vf a = load(q + i), b = load(k + i);
                of_q = fma_of(a, a, of_q), of_k = fma_of(b, b, of_k);
            }
            const vf to_q = splat(factor / __builtin_sqrtf(sum_of(of_q) + kL2Eps));
            const vf to_k = splat(1.0f / __builtin_sqrtf(sum_of(of_k) + kL2Eps));
            for (int64_t i = 0; i < state_pad; i += W) {
                const vf a = load(q + i) * to_q, b = load(k + i) * to_k;
                store(q + i, a), store(k + i, b);
                both = fma_of(a, b, both);
            }
            qk[(piece.work + token) * spec.groups + group] = sum_of(both);
        }
    }

    // Step sizes and decays of a piece's tokens.
    void step_sizes(const Piece& piece) const {
        if (spec.is_delta) return gates(piece);
        const float low = (float)spec.dt_min, high = (float)spec.dt_max;
        for (int64_t token = piece.from; token < piece.to; ++token) {
            const T* in = (const T*)call.dt + (step.cu_q[piece.row] + token) * call.dt_stride;
            const int64_t at = (piece.work + token - piece.from) * step_stride;
            for (int64_t h = 0; h < spec.heads; h += W) {
                vf v = softplus_of(load_any(in, h, spec.heads) + load_any(call.dt_bias, h, spec.heads));
                v = (v < low) ? splat(low) : v;
                v = (v > high) ? splat(high) : v;
                store(dt + at + h, v);
                store(decay + at + h, exp_of(v * load_any(call.decay, h, spec.heads)));
            }
        }
    }

    int64_t blocks_of(int64_t width) const { return (width + kBlock - 1) / kBlock; }

    // Items of a piece: blocks of x, then of each group's B, then C, then the step sizes. In a delta net x comes last.
    int64_t items() const { return blocks_of(inner) + 2 * spec.groups * blocks_of(state_pad) + 1; }

    void run(const Piece& piece, int64_t item) const {
        const int64_t of_x = blocks_of(inner), of_state = blocks_of(state_pad), real = spec.heads * spec.head_dim;
        int64_t first = 0, width = real, padded = inner, out = 0, block = item;
        if (item >= of_x) {
            const int64_t part = (item - of_x) / of_state;
            if (part == 2 * spec.groups) return step_sizes(piece);
            block = (item - of_x) % of_state;
            const int64_t place = spec.is_delta ? (part + spec.groups) % (2 * spec.groups) : part;  // q, then k
            first = (spec.is_delta ? 0 : real) + place * spec.state_dim, width = spec.state_dim;
            out = inner + part * state_pad, padded = state_pad;
        } else if (spec.is_delta) {
            first = 2 * spec.groups * spec.state_dim;
        }
        const int64_t from = block * kBlock, left = width - from, room = padded - from;
        const int n = (int)(left < 0 ? 0 : left < kBlock ? left : kBlock), wide = (int)(room < kBlock ? room : kBlock);
        if (call.conv_is_bf16)
            convolve<bf16>(piece, first + from, n, out + from, wide);
        else
            convolve<float>(piece, first + from, n, out + from, wide);
    }
};

// Second half: the recurrence of lines of a head, V vectors a line.
template <class T, int V>
struct Recur : Scan {
    static constexpr int L = V <= 4 ? 4 : V <= 8 ? 2 : 1;  // lines in registers at once
    static constexpr int kTokens = 16 / L;

    // A line of a state in its own dtype; lanes behind state_dim are zeros.
    template <class S>
    void load_as(const S* from, vf* h) const {
        if (spec.state_dim == V * W) {
#pragma GCC unroll 32
            for (int v = 0; v < V; ++v) h[v] = load(from + v * W);
        } else {
            for (int64_t i = 0; i < spec.state_dim; i += W) h[i / W] = load_any(from, i, spec.state_dim);
        }
    }
    template <class S>
    void store_as(S* to, const vf* h) const {
        if (spec.state_dim == V * W) {
#pragma GCC unroll 32
            for (int v = 0; v < V; ++v) store(to + v * W, h[v]);
        } else {
            for (int64_t i = 0; i < spec.state_dim; i += W) store_any(to, h[i / W], i, spec.state_dim);
        }
    }
    void load_state(int64_t slot, int64_t line, vf* h) const {
        const int64_t at = slot * call.ssm_stride + line * spec.state_dim;
        if (call.ssm_is_bf16)
            load_as((const bf16*)call.ssm + at, h);
        else
            load_as((const float*)call.ssm + at, h);
    }
    void store_state(int64_t slot, int64_t line, const vf* h) const {
        const int64_t at = slot * call.ssm_stride + line * spec.state_dim;
        if (call.ssm_is_bf16)
            store_as((bf16*)call.ssm + at, h);
        else
            store_as((float*)call.ssm + at, h);
    }

    // One token of L lines: sums[q] are the vectors whose lanes add up to C h.
    static inline void advance(vf (*h)[V], const float* x, float dt, float decay, const float* b, const float* c, vf* sums) {
        const vf keep = splat(decay);
        vf add[L], sum[L];
#pragma GCC unroll 4
        for (int q = 0; q < L; ++q) add[q] = splat(x[q] * dt), sum[q] = vf{};
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) {
            const vf to = load(b + v * W), from = load(c + v * W);
#pragma GCC unroll 4
            for (int q = 0; q < L; ++q) {
                h[q][v] = fma_of(h[q][v], keep, add[q] * to);
                sum[q] = fma_of(h[q][v], from, sum[q]);
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < L; ++q) sums[q] = sum[q];
    }

    // y[q] = sums[q] + D x[q] for n lines of a head from line p on.
    void finish(const Piece& piece, int64_t token, int64_t head, int64_t p, int n, const float* x, const float* sums) const {
        const int64_t at = head * spec.head_dim + p;
        T* to = (T*)call.y + (step.cu_q[piece.row] + piece.from + token) * spec.heads * spec.head_dim + at;
        for (int q = 0; q < n; ++q) set(to[q], fma_of(call.skip[call.channel_skip ? at + q : head], x[q], sums[q]));
    }

    // The addresses of a head's inputs, from a piece's first token on.
    struct Inputs {
        const float *x, *b, *c, *dt, *decay;
    };
    Inputs inputs_of(const Piece& piece, int64_t head) const {
        const float* row = work + piece.work * work_stride;
        const float* b = row + inner + head / (spec.heads / spec.groups) * state_pad;
        const int64_t sizes = piece.work * step_stride + head;
        return {row + head * spec.head_dim, b, b + group_width, dt + sizes, decay + sizes};
    }

    // Tokens [first, stop) of a piece for lines [begin, end), whose states are in `tile`.
    void pass(const Piece& piece, const Inputs& in, int64_t head, int64_t begin, int64_t end, int64_t first, int64_t stop,
              float* tile) const {
        for (int64_t p = begin; p < end; p += L) {
            const int real = (int)(end - p < L ? end - p : L);
            float* lines = tile + (p - begin) * V * W;  // room for a multiple of L
            vf h[L][V];
#pragma GCC unroll 4
            for (int q = 0; q < L; ++q)
#pragma GCC unroll 32
                for (int v = 0; v < V; ++v) h[q][v] = load(lines + (q * V + v) * W);
            for (int64_t token = first; token < stop; token += kTokens) {
                const int count = (int)(stop - token < kTokens ? stop - token : kTokens);
                vf parts[16] = {};
                for (int t = 0; t < count; ++t) {
                    const int64_t at = (token + t) * work_stride, size = (token + t) * step_stride;
                    advance(h, in.x + at + p, in.dt[size], in.decay[size], in.b + at, in.c + at, parts + t * L);
                }
                float sums[16];
                sums_of(parts, sums);
                for (int t = 0; t < count; ++t)
                    finish(piece, token + t, head, p, real, in.x + (token + t) * work_stride + p, sums + t * L);
            }
#pragma GCC unroll 4
            for (int q = 0; q < L; ++q)
#pragma GCC unroll 32
                for (int v = 0; v < V; ++v) store(lines + (q * V + v) * W, h[q][v]);
        }
    }

    // Lines [begin, end) of a head through a piece.
    void run_many(const Piece& piece, int64_t head, int64_t begin, int64_t end, float* tile) const {
        const int64_t row = piece.row, slot = step.slot[row], first_line = head * spec.head_dim + begin;
        const int64_t lines = end - begin, size = lines * V * W, count = piece.to - piece.from;
        if (piece.from)
            std::memcpy(tile, carried + first_line * V * W, size * sizeof(float));
        else
            std::memset(tile, 0, size * sizeof(float));
        vf h[V] = {};
        auto keep_in = [&](int64_t to) {
            for (int64_t i = 0; i < lines; ++i) {
                for (int v = 0; v < V; ++v) h[v] = load(tile + (i * V + v) * W);
                store_state(to, first_line + i, h);
            }
        };
        if (!piece.from && !fresh(row))
            for (int64_t i = 0; i < lines; ++i) {
                load_state(slot, first_line + i, h);
                for (int v = 0; v < V; ++v) store(tile + (i * V + v) * W, h[v]);
            }
        const Inputs in = inputs_of(piece, head);
        int64_t capture = piece.capture;
        for (int64_t first = 0, stop; first < count; first = stop) {
            stop = first + kTile < count ? first + kTile : count;
            const int64_t cut = capture < piece.captures ? step.capture_tokens[capture] - piece.from : count + 1;
            if (cut < stop) stop = cut;
            pass(piece, in, head, begin, end, first, stop, tile);
            if (cut == stop) keep_in(step.capture_slot[capture++]);
        }
        if (piece.to == step.q_len[row])
            keep_in(slot);
        else
            std::memcpy(carry + first_line * V * W, tile, size * sizeof(float));
    }

    // The same for a row of one token, from state to state: one sum of lanes serves 16 lines.
    void run_one(const Piece& piece, int64_t head, int64_t begin, int64_t end) const {
        const int64_t slot = step.slot[piece.row], first_line = head * spec.head_dim;
        const bool zeros = fresh(piece.row);
        const Inputs in = inputs_of(piece, head);
        for (int64_t p = begin; p < end; p += 16) {
            const int count = (int)(end - p < 16 ? end - p : 16);
            vf parts[16] = {};
            for (int at = 0; at < count; at += L) {
                vf h[L][V] = {};
                const int real = count - at < L ? count - at : L;
#pragma GCC unroll 4
                for (int q = 0; q < L; ++q)
                    if (q < real && !zeros) load_state(slot, first_line + p + at + q, h[q]);
                advance(h, in.x + p + at, *in.dt, *in.decay, in.b, in.c, parts + at);
#pragma GCC unroll 4
                for (int q = 0; q < L; ++q)
                    if (q < real) store_state(slot, first_line + p + at + q, h[q]);
            }
            float sums[16];
            sums_of(parts, sums);
            finish(piece, 0, head, p, count, in.x + p, sums);
        }
    }

    // The same for a whole row of a few tokens, of which drafts are the usual case: each state is read once, and stored from
    // registers wherever it is kept.
    void run_few(const Piece& piece, int64_t head, int64_t begin, int64_t end) const {
        const int64_t slot = step.slot[piece.row], first_line = head * spec.head_dim, count = piece.to;
        const bool zeros = fresh(piece.row);
        // A kept state is read only if the draft behind it fails: one of many, once.
        const bool aligned = call.ssm_stride % W == 0 && (uintptr_t)call.ssm % (4 * W) == 0;
        const bool streams = aligned && !call.ssm_is_bf16 && spec.state_dim == V * W;
        const Inputs in = inputs_of(piece, head);
        for (int64_t p = begin; p < end; p += L) {
            const int real = (int)(end - p < L ? end - p : L);
            vf h[L][V] = {};
            auto keep_in = [&](int64_t to) {
#pragma GCC unroll 4
                for (int q = 0; q < L; ++q)
                    if (q < real) store_state(to, first_line + p + q, h[q]);
            };
            auto capture_in = [&](int64_t to) {
                if (!streams) return keep_in(to);
#pragma GCC unroll 4
                for (int q = 0; q < L; ++q)
                    if (q < real) {
                        float* line = (float*)call.ssm + to * call.ssm_stride + (first_line + p + q) * spec.state_dim;
                        for (int v = 0; v < V; ++v) stream(line + v * W, h[q][v]);
                    }
            };
#pragma GCC unroll 4
            for (int q = 0; q < L; ++q)
                if (q < real && !zeros) load_state(slot, first_line + p + q, h[q]);
            int64_t capture = piece.capture;
            for (int64_t first = 0; first < count; first += kTokens) {
                const int tokens = (int)(count - first < kTokens ? count - first : kTokens);
                vf parts[16] = {};
                for (int t = 0; t < tokens; ++t) {
                    const int64_t token = first + t, at = token * work_stride, size = token * step_stride;
                    advance(h, in.x + at + p, in.dt[size], in.decay[size], in.b + at, in.c + at, parts + t * L);
                    if (capture < piece.captures && step.capture_tokens[capture] == token + 1)
                        capture_in(step.capture_slot[capture++]);
                }
                float sums[16];
                sums_of(parts, sums);
                for (int t = 0; t < tokens; ++t)
                    finish(piece, first + t, head, p, real, in.x + (first + t) * work_stride + p, sums + t * L);
            }
            keep_in(slot);
        }
        if (streams) stream_end();
    }

    void run(const Piece& piece, int64_t head, int64_t begin, int64_t end, float* tile) const {
        const int64_t count = step.q_len[piece.row];
        if (count == 1)
            run_one(piece, head, begin, end);
        else if (count <= kFew && piece.to - piece.from == count)
            run_few(piece, head, begin, end);
        else
            run_many(piece, head, begin, end, tile);
    }
};

// Second half of a delta net. Sixteen lines at a time pass through the tokens of a piece, their states in L1.
template <class T, int V>
struct Delta : Recur<T, V> {
    using Base = Recur<T, V>;
    static constexpr int kLines = 16;

    // One token of 16 lines: x is v, of which `real` exist, y is q h.
    MI_INLINE static inline void advance(float* lines, const float* x, int real, float beta, float decay, float qk,
                                         const float* b, const float* c, float* y) {
        vf of_k[kLines], of_q[kLines];
        for (int p = 0; p < kLines; ++p) {
            const float* line = lines + p * V * W;
            vf sum_k = {}, sum_q = {};
#pragma GCC unroll 32
            for (int v = 0; v < V; ++v) {
                const vf h = load(line + v * W);
                sum_k = fma_of(h, load(b + v * W), sum_k), sum_q = fma_of(h, load(c + v * W), sum_q);
            }
            of_k[p] = sum_k, of_q[p] = sum_q;
        }
        float k_h[kLines], q_h[kLines], add[kLines] = {};
        sums_of(of_k, k_h), sums_of(of_q, q_h);
        for (int p = 0; p < real; ++p) {
            add[p] = beta * fma_of(-decay, k_h[p], x[p]);
            y[p] = fma_of(add[p], qk, decay * q_h[p]);
        }
        const vf keep = splat(decay);
        for (int p = 0; p < real; ++p) {
            float* line = lines + p * V * W;
            const vf more = splat(add[p]);
#pragma GCC unroll 32
            for (int v = 0; v < V; ++v)
                store(line + v * W, fma_of(load(line + v * W), keep, more * load(b + v * W)));
        }
    }

    // Lines [begin, end) of a head through a piece.
    void run(const Piece& piece, int64_t head, int64_t begin, int64_t end) const {
        const ScanStep& step = this->step;
        const ScanSpec& spec = this->spec;
        const int64_t row = piece.row, slot = step.slot[row], count = piece.to - piece.from;
        const int64_t first_line = head * spec.head_dim, group = head / (spec.heads / spec.groups);
        const auto in = this->inputs_of(piece, head);
        T* out = (T*)this->call.y + (step.cu_q[row] + piece.from) * spec.heads * spec.head_dim + first_line;
        alignas(64) float lines[kLines * V * W];
        for (int64_t p = begin; p < end; p += kLines) {
            const int real = (int)(end - p < kLines ? end - p : kLines);
            float* carried = (float*)this->carried + (first_line + p) * V * W;
            vf h[V] = {};
            auto keep_in = [&](int64_t to) {
                for (int i = 0; i < real; ++i) {
                    for (int v = 0; v < V; ++v) h[v] = load(lines + (i * V + v) * W);
                    this->store_state(to, first_line + p + i, h);
                }
            };
            std::memset(lines, 0, sizeof lines);
            if (piece.from) {
                std::memcpy(lines, carried, real * V * W * sizeof(float));
            } else if (!this->fresh(row)) {
                for (int i = 0; i < real; ++i) {
                    this->load_state(slot, first_line + p + i, h);
                    for (int v = 0; v < V; ++v) store(lines + (i * V + v) * W, h[v]);
                }
            }
            int64_t capture = piece.capture;
            for (int64_t token = 0; token < count; ++token) {
                const int64_t at = token * this->work_stride, size = token * this->step_stride;
                float y[kLines];
                advance(lines, in.x + at + p, real, in.dt[size], in.decay[size],
                        this->qk[(piece.work + token) * spec.groups + group], in.b + at, in.c + at, y);
                T* to = out + token * spec.heads * spec.head_dim + p;
                for (int i = 0; i < real; ++i) set(to[i], y[i]);
                if (capture < piece.captures && step.capture_tokens[capture] == piece.from + token + 1)
                    keep_in(step.capture_slot[capture++]);
            }
            if (piece.to == step.q_len[row])
                keep_in(slot);
            else
                std::memcpy(this->carry + (first_line + p) * V * W, lines, real * V * W * sizeof(float));
        }
    }
};

// body(item, thread) for each item; a free thread takes the next one.
template <class Body>
static void each(int threads, int64_t items, Body&& body) {
    int64_t next = 0;
    auto take = [&](int thread, int) {
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (item >= items) return;
            body(item, thread);
        }
    };
    parallel((int)(items < threads ? items : threads), take);
}

// The pieces of one stretch from (row, token) on; advances all three arguments.
static void next_stretch(const ScanStep& step, std::vector<Piece>& pieces, int64_t& row, int64_t& token, int64_t& capture) {
    pieces.clear();
    for (int64_t tokens = 0; row < step.num_rows && tokens < kStretch;) {
        const int64_t left = step.q_len[row] - token, room = kStretch - tokens;
        const int64_t to = token + (left < room ? left : room), first = capture;
        while (capture < step.num_captures && step.capture_row[capture] == row && step.capture_tokens[capture] <= to) ++capture;
        pieces.push_back({row, token, to, tokens, first, capture});
        tokens += to - token;
        token = to;
        if (to == step.q_len[row]) ++row, token = 0;
    }
}

template <class T, int V>
static void scan_with(ScanContext& context, const ScanStep& step, const ScanSpec& spec, const ScanCall& call) {
    Scan scan{step, spec, call};
    scan.inner = (spec.heads * spec.head_dim + W - 1) / W * W;
    scan.state_pad = V * W;
    scan.group_width = spec.groups * scan.state_pad;
    scan.work_stride = scan.inner + 2 * scan.group_width;
    scan.step_stride = (spec.heads + W - 1) / W * W;
    const int64_t all = step.cu_q[step.num_rows], most = all < kStretch ? all : kStretch;
    scan.work = context.work.get<float>(most * scan.work_stride);
    scan.dt = context.steps.get<float>(most * (2 * scan.step_stride + spec.groups));
    scan.decay = scan.dt + most * scan.step_stride;
    scan.qk = scan.decay + most * scan.step_stride;
    const int64_t lines = spec.heads * spec.head_dim, tile = (spec.head_dim + Recur<T, V>::L) * V * W;
    scan.tiles = context.tiles.get<float>(step.threads * tile);
    const int threads = all * lines * spec.state_dim < kSerialElements ? 1 : (int)step.threads;
    // Two: a stretch may finish one row and end in another.
    float *carry = context.carry.get<float>(all > kStretch ? 2 * lines * V * W : 0), *other = carry + lines * V * W;
    for (int64_t row = 0, token = 0, capture = 0; row < step.num_rows;) {
        next_stretch(step, context.pieces, row, token, capture);
        scan.carried = carry, scan.carry = other;
        other = carry, carry = scan.carry;
        const Piece* piece = context.pieces.data();
        const int64_t pieces = (int64_t)context.pieces.size();
        const Prepare<T> prepare{scan};
        const int64_t blocks = prepare.items();
        each(threads, pieces * blocks, [&](int64_t item, int) { prepare.run(piece[item / blocks], item % blocks); });
        if (spec.is_delta)
            each(threads, pieces * spec.groups,
                 [&](int64_t item, int) { prepare.normalise(piece[item / spec.groups], item % spec.groups); });
        int64_t size = spec.head_dim;  // lines of an item: fewer where there are too few heads for the threads
        while (size > 16 && pieces * spec.heads * ((spec.head_dim + size - 1) / size) < 4 * threads) size = (size / 2 + 15) / 16 * 16;
        const int64_t parts = (spec.head_dim + size - 1) / size;
        const Recur<T, V> recur{scan};
        const Delta<T, V> delta{{scan}};
        each(threads, pieces * spec.heads * parts, [&](int64_t item, int thread) {
            const int64_t begin = item % parts * size, end = begin + size < spec.head_dim ? begin + size : spec.head_dim;
            const Piece& mine = piece[item / parts / spec.heads];
            const int64_t head = item / parts % spec.heads;
            if (spec.is_delta) return delta.run(mine, head, begin, end);
            recur.run(mine, head, begin, end, scan.tiles + thread * tile);
        });
    }
}

template <class T>
static void scan_rows(ScanContext& context, const ScanStep& step, const ScanSpec& spec, const ScanCall& call) {
    const int64_t vectors = (spec.state_dim + W - 1) / W;
    if (vectors <= 1) return scan_with<T, 1>(context, step, spec, call);
    if (vectors <= 2) return scan_with<T, 2>(context, step, spec, call);
    if (vectors <= 4) return scan_with<T, 4>(context, step, spec, call);
    if (vectors <= 6) return scan_with<T, 6>(context, step, spec, call);
    if (vectors <= 8) return scan_with<T, 8>(context, step, spec, call);
    if (vectors <= 12) return scan_with<T, 12>(context, step, spec, call);
    if (vectors <= 16) return scan_with<T, 16>(context, step, spec, call);
    if constexpr (W < 16) {
        if (vectors <= 24) return scan_with<T, 24>(context, step, spec, call);
        if (vectors <= 32) return scan_with<T, 32>(context, step, spec, call);
    }
}

}  // namespace mi

using namespace mi;

extern "C" {

void* mi_scan_context_new() { return new ScanContext; }
void mi_scan_context_free(void* context) { delete (ScanContext*)context; }
void mi_scan_f32(void* context, const ScanStep* step, const ScanSpec* spec, const ScanCall* call) {
    scan_rows<float>(*(ScanContext*)context, *step, *spec, *call);
}
void mi_scan_bf16(void* context, const ScanStep* step, const ScanSpec* spec, const ScanCall* call) {
    scan_rows<bf16>(*(ScanContext*)context, *step, *spec, *call);
}
}

// y = x . weight^T + bias from a packed copy of the weight.
//
// A panel holds W weight rows interleaved, [inner / pair][W rows][pair], so one vector load serves W outputs and nothing is
// summed across lanes. A block of tokens keeps one accumulator each; their inputs are broadcast. While the first block of
// tokens is computed, the weights are fetched ahead into L2: reading them then overlaps with the arithmetic, and steps of 8
// to 64 tokens, which need much of both, take little longer than the larger of the two. An output is summed in the same
// order for any number of tokens, so a token's result does not depend on the rest of the step.
#include <cmath>
#include <limits>
#include <type_traits>

#include "layer_ops.h"
#include "packed_weight.h"
#include "shares.h"
#include "tiles.h"

namespace mi {

constexpr int kBlock = 12;        // tokens with an accumulator each
constexpr int kPanels = 2;        // side by side, each for half as many tokens where registers are few
constexpr int64_t kManyTokens = 20;  // fewer are bound by memory; for more, values of bf16 are widened once where the CPU multiplies floats alone
constexpr int64_t kWideTokens = W == 16 ? kManyTokens : 1;  // least tokens for panels side by side, which are as many streams of memory
constexpr int64_t kTokens = 256;  // about so many tokens are multiplied by a stretch of panels before the next tokens
constexpr int64_t kMostTokens = kTokens + 32;  // so that few more are no pass of their own
constexpr int64_t kAlone = 1 << 15;  // fewer inputs are widened by one thread
constexpr int kCompactBlock = 16;  // up to so many tokens are multiplied by the values of compact panels as they are read

// pair: inner entries of one multiplication. In: what inputs are multiplied as.
template <class T>
struct Product;
template <>
struct Product<float> {
    static constexpr int pair = kPair<float>;
    using In = float;
    using Vec = vf;
    static Vec weights(const float* p) { return load(p); }
    static vf add(vf acc, Vec w, const float* x) { return fma_of(w, splat(*x), acc); }
};
template <>
struct Product<bf16> {
    static constexpr int pair = kPair<bf16>;
#if MI_BF16_DOT
    using In = bf16;
    using Vec = __m512bh;
    static Vec weights(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static vf add(vf acc, Vec w, const bf16* x) {
        int both;
        std::memcpy(&both, x, sizeof both);
        return (vf)_mm512_dpbf16_ps((__m512)acc, w, (__m512bh)_mm512_set1_epi32(both));
    }
#else  // a bf16 is the upper half of its float
    using In = float;
    struct Vec {
        vf even, odd;
    };
    static Vec weights(const bf16* p) {
        vu both;
        std::memcpy(&both, p, sizeof both);
        return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
    }
    static vf add(vf acc, Vec w, const float* x) {
        return fma_of(w.odd, splat(x[1]), fma_of(w.even, splat(x[0]), acc));
    }
#endif
};

// The inputs of some tokens as they are multiplied, `stride` from token to token.
template <class T>
struct PanelInputs {
    using In = typename Product<T>::In;
    const In* x;
    int64_t stride;

    PanelInputs(const void* from, int64_t from_stride, int64_t tokens, int64_t inner, int threads)
        : x((const In*)from), stride(from_stride) {
        if constexpr (!std::is_same<T, In>::value) widen((const T*)from, tokens, inner, threads);
    }

  private:
    void widen(const T* from, int64_t tokens, int64_t inner, int threads) {
        static thread_local Buffer buffer;
        const int64_t between = stride;
        stride = (inner + W - 1) / W * W + 16;  // one line further, so that tokens do not share a set of L1
        In* to = buffer.get<In>(tokens * stride);
        x = to;
        const auto body = [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
                for (int64_t i = 0; i < inner; i += W) store(to + t * stride + i, load_any(from + t * between, i, inner));
        };
        parallel_ranges(tokens * inner < kAlone ? 1 : threads, tokens, body);
    }
};

template <class T>
struct PanelLinear {
    using P = Product<T>;
    using In = typename P::In;
    const In* x;
    const T* bias;
    Outputs<T> out;
    int64_t x_stride, inner, rows;
    bool compact;
    const char* panels;
    int64_t bytes;  // of a panel

    PanelLinear(PanelInputs<T> in, const void* packed, const void* bias, Outputs<T> out, int64_t inner, int64_t rows)
        : x(in.x), bias((const T*)bias), out(out), x_stride(in.stride), inner(inner), rows(rows),
          compact(((const PackedHeader*)packed)->is_compact), panels((const char*)packed + sizeof(PackedHeader)),
          bytes(panel_bytes_of<T>(compact, inner)) {}

    // M tokens by N neighbouring panels, which lie at w: one broadcast of an input serves N products. Meanwhile `step` bytes
    // from `next` on are fetched for each vector that is multiplied; null: nothing is.
    template <int M, int N, class V>
    void block(int64_t token, int64_t panel, const V* w, const char* next, int step) const {
        using P = Product<V>;
        const In* in = x + token * x_stride;
        vf acc[N][M] = {};
        // inlined whatever else calls this: sums that a function took by reference would live in memory
        auto advance = [&](int64_t i) MI_INLINE {
            typename P::Vec column[N];
            for (int n = 0; n < N; ++n) column[n] = P::weights(w + n * W * inner);
            for (int m = 0; m < M; ++m)
                for (int n = 0; n < N; ++n) acc[n][m] = P::add(acc[n][m], column[n], in + m * x_stride + i);
        };
        auto fetching = [&](auto locality) MI_INLINE {
            for (int64_t i = 0; i < inner; i += P::pair, w += W * P::pair) {
                // the panels are contiguous and are fetched as one
                for (int n = 0; n < N; ++n) __builtin_prefetch(next + n * step, 0, decltype(locality)::value);
                next += N * step;
                advance(i);
            }
        };
        if (next && M <= 4 && past_l2())  // few tokens are one block: no other reads these weights from L2
            fetching(std::integral_constant<int, 0>{});
        else if (next)
            fetching(std::integral_constant<int, 2>{});
        else
            for (int64_t i = 0; i < inner; i += P::pair, w += W * P::pair) advance(i);
        for (int n = 0; n < N; ++n)
            out.put(bias, rows, panel + n, token, M, [&](int m) { return acc[n][m]; });
    }

    template <int M, int N, class V>
    void block_of(int64_t count, int64_t token, int64_t panel, const V* w, const char* next, int step) const {
        if constexpr (M > 0) {
            if (count == M) return block<M, N>(token, panel, w, next, step);
            block_of<M - 1, N>(count, token, panel, w, next, step);
        }
    }

    // N panels, which lie at w, for all tokens, in blocks of nearly equal size.
    template <int N, class V>
    void blocks(int64_t panel, int64_t first, int64_t count, const V* w, const char* next, int step) const {
        constexpr int kMost = W == 16 || N == 1 ? kBlock : kBlock / 2;
        const int64_t number = (count + kMost - 1) / kMost;
        for (int64_t b = 0; b < number; ++b) {
            const int64_t from = count * b / number, to = count * (b + 1) / number;
            block_of<kMost, N>(to - from, first + from, panel, w, b == 0 ? next : nullptr, step);
        }
    }

#if MI_COMPACT
    // M tokens by a compact panel, whose values are multiplied as they are read: in the order of `block`.
    template <int M>
    void compact_block(int64_t token, int64_t panel) const {
        constexpr int64_t ahead = M > 4 ? 8192 : 4096;
        const T* in = x + token * x_stride;
        vf acc[M] = {};
        auto multiply = [&](auto locality) MI_INLINE {
            auto each = [&](int64_t i, const uint8_t* p, const __m512i* values) MI_INLINE {
                for (int line = 0; line < kGroupBytes; line += 64) __builtin_prefetch(p + ahead + line, 0, decltype(locality)::value);
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v)
#pragma GCC unroll 16
                    for (int m = 0; m < M; ++m) acc[m] = P::add(acc[m], (__m512bh)values[v], in + m * x_stride + i + 2 * v);
            };
            for_each_group((const uint8_t*)panels + panel * bytes, inner, each);
        };
        if (past_l2())
            multiply(std::integral_constant<int, 0>{});
        else
            multiply(std::integral_constant<int, 2>{});
        out.put(bias, rows, panel, token, M, [&](int m) { return acc[m]; });
    }

    template <int M>
    void compact_block_of(int64_t count, int64_t token, int64_t panel) const {
        if constexpr (M > 0) {
            if (count == M) return compact_block<M>(token, panel);
            compact_block_of<M - 1>(count, token, panel);
        }
    }

    // As `run`. For many tokens panels are expanded, while those behind them are fetched.
    void run_compact(int64_t begin, int64_t end, int64_t first, int64_t count) const {
        if (count <= kCompactBlock) {
            // Inputs a multiple of 4 KiB apart share one set of L1, which holds those of 8 tokens beside the weights.
            const int64_t most = x_stride * (int64_t)sizeof(T) % 4096 ? kCompactBlock : kCompactBlock / 2;
            const int64_t number = (count + most - 1) / most;
            for (int64_t panel = begin; panel < end; ++panel)
                for (int64_t b = 0; b < number; ++b) {
                    const int64_t from = count * b / number, to = count * (b + 1) / number;
                    compact_block_of<kCompactBlock>(to - from, first + from, panel);
                }
            return;
        }
        static thread_local Buffer buffer;
        T* plain = buffer.get<T>(kPanels * W * inner);
        for (int64_t panel = begin; panel < end;) {
            const int width = count >= kWideTokens && panel + kPanels <= end ? kPanels : 1;
            const char* at = panels + panel * bytes;
            for (int n = 0; n < width; ++n) expand((const uint8_t*)at + n * bytes, inner, plain + n * W * inner);
            if (width == 1)
                blocks<1>(panel, first, count, plain, at + bytes, kGroupBytes / 4);
            else
                blocks<kPanels>(panel, first, count, plain, at + kPanels * bytes, kGroupBytes / 4);
            panel += width;
        }
    }
#endif

#if MI_TILES
    // Products of up to two groups of 16 tokens with N neighbouring panels; `from`, `from2`: their inputs behind the last whole
    // product, filled up with zeros.
    template <bool Two, int N>
    void tiles(int64_t token, int64_t panel, int first, int second, bool fetch, const bf16* from, const bf16* from2) const {
        const bf16* w = (const bf16*)panels + panel * W * inner;
        const bf16 *in = x + token * x_stride, *in2 = in + kTileLines * x_stride;
        const char* next = (const char*)(w + (N > 1 ? N * W * inner : 2048));
        const int64_t stride = x_stride * (int64_t)sizeof(bf16), whole = inner / kTileInner * kTileInner;
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (Two) _tile_zero(2);
        if constexpr (Two && N > 1) _tile_zero(3);
        auto advance = [&](const bf16* a, const bf16* a2, int64_t stride, const bf16* b, const bf16* b2) {
            _tile_loadd(6, b, 64);
            _tile_loadd(4, a, stride);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (N > 1) {
                _tile_loadd(7, b2, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (Two) {
                _tile_loadd(5, a2, stride);
                _tile_dpbf16ps(2, 5, 6);
                if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
            }
        };
        for (int64_t i = 0; i < whole; i += kTileInner) {
            if (fetch)
                for (int n = 0; n < N * kTileLines; ++n, next += 64) __builtin_prefetch(next, 0, 2);
            advance(in + i, in2 + i, stride, w + i * W, w + (inner + i) * W);
        }
        if (whole < inner) {
            alignas(64) bf16 rest[N][kTileInner * W] = {};
            for (int n = 0; n < N; ++n)
                std::memcpy(rest[n], w + (n * inner + whole) * W, (inner - whole) * W * sizeof(bf16));
            before_tiles(rest);
            advance(from, from2, 2 * kTileInner, rest[0], rest[N - 1]);
        }
        alignas(64) float sums[4][kTileLines * W];
        _tile_stored(0, sums[0], 64);
        if constexpr (N > 1) _tile_stored(1, sums[1], 64);
        if constexpr (Two) _tile_stored(2, sums[2], 64);
        if constexpr (Two && N > 1) _tile_stored(3, sums[3], 64);
        for (int n = 0; n < N; ++n) {
            put_tile(sums[n], token, panel + n, first);
            if constexpr (Two) put_tile(sums[2 + n], token + kTileLines, panel + n, second);
        }
    }

    void put_tile(const float* sums, int64_t token, int64_t panel, int count) const {
        out.put(bias, rows, panel, token, count, [&](int m) { return load(sums + m * W); });
    }

    // As `run`. The groups of 16 tokens are multiplied in pairs; what is left is one group or two, the last of them shorter.
    void run_tiles(int64_t begin, int64_t end, int64_t first, int64_t count) const {
        const int64_t whole = inner / kTileInner * kTileInner;
        alignas(64) bf16 from[kMostTokens][kTileInner];
        if (whole < inner)
            for (int64_t t = 0; t < count; ++t) {
                std::memset(from[t], 0, sizeof from[t]);
                std::memcpy(from[t], x + (first + t) * x_stride + whole, (inner - whole) * sizeof(bf16));
            }
        before_tiles(from);
        before_tiles(x);
        constexpr int64_t pair = 2 * kTileLines;
        const int64_t pairs = count / pair * pair, left = count - pairs;
        const int shorter = (int)(left > kTileLines ? left - kTileLines : 0), longer = (int)(left < kTileLines ? left : kTileLines);
        bool shaped = false;
        for (int64_t panel = begin; panel < end;) {
            const int width = panel + 2 <= end ? 2 : 1;
            if (pairs && !(shaped && !left)) shape_tiles(kTileLines, kTileLines), shaped = true;
            for (int64_t t = 0; t < pairs; t += pair) {
                const auto call = width == 2 ? &PanelLinear::tiles<true, 2> : &PanelLinear::tiles<true, 1>;
                (this->*call)(first + t, panel, kTileLines, kTileLines, t == 0, from[t], from[t + kTileLines]);
            }
            if (left) {
                if (pairs || !shaped) shape_tiles(longer, shorter), shaped = true;
                const auto call = shorter ? width == 2 ? &PanelLinear::tiles<true, 2> : &PanelLinear::tiles<true, 1>
                                  : width == 2 ? &PanelLinear::tiles<false, 2> : &PanelLinear::tiles<false, 1>;
                (this->*call)(first + pairs, panel, longer, shorter, !pairs, from[pairs], from[(pairs + kTileLines) % kMostTokens]);
            }
            panel += width;
        }
        release_tiles();
    }
#endif

    // As `run`, for many tokens: panels are widened once.
    void run_widened(int64_t begin, int64_t end, int64_t first, int64_t count) const {
        static thread_local Buffer buffer;
        float* wide = buffer.get<float>(kPanels * W * inner);
        for (int64_t panel = begin; panel < end;) {
            const int width = panel + kPanels <= end ? kPanels : 1;
            const T* at = (const T*)(panels + panel * bytes);
            for (int64_t i = 0; i < width * W * inner; i += 2 * W) {
                const auto both = P::weights(at + i);
                store(wide + i, both.even);
                store(wide + i + W, both.odd);
            }
            const char* next = (const char*)(at + width * W * inner);
            if (width == 1)
                blocks<1>(panel, first, count, (const float*)wide, next, 2 * W);
            else
                blocks<kPanels>(panel, first, count, (const float*)wide, next, 2 * W);
            panel += width;
        }
    }

    // Panels begin .. end for tokens first .. first + count.
    void run(int64_t begin, int64_t end, int64_t first, int64_t count) const {
#if MI_TILES
        if constexpr (sizeof(T) == sizeof(bf16))
            if (tiles_allowed()) return run_tiles(begin, end, first, count);
#endif
#if MI_COMPACT
        if constexpr (sizeof(T) == sizeof(bf16))
            if (compact) return run_compact(begin, end, first, count);
#endif
        if constexpr (sizeof(In) > sizeof(T))
            if (count > kManyTokens) return run_widened(begin, end, first, count);
        for (int64_t panel = begin; panel < end;) {
            const int width = count >= kWideTokens && panel + kPanels <= end ? kPanels : 1;
            const char* at = panels + panel * bytes;
            if (width == 1)
                blocks<1>(panel, first, count, (const T*)at, at + (count > 4 ? 8192 : 4096), 4 * W);
            else
                blocks<kPanels>(panel, first, count, (const T*)at, at + kPanels * bytes, 4 * W);
            panel += width;
        }
    }
};

template <class T>
static void linear(const PanelLinear<T>& task, int64_t tokens, int threads) {
    const int64_t panels = (task.rows + W - 1) / W;
    const int64_t least = tokens >= kWideTokens ? kPanels : 1;
    int64_t size = panels / (threads * 16) / least * least;
    size = size < least ? least : size;
    const int64_t stretches = (panels + size - 1) / size;
    const int64_t spans = tokens <= kMostTokens ? 1 : (tokens + 2 * kTokens - kMostTokens - 1) / kTokens;
    threads = (int)(stretches < threads ? stretches : threads);
    Shares shares(stretches * spans, threads < Shares::kMost ? threads : Shares::kMost);
    auto body = [&](int thread, int) {
        for (int64_t part; (part = shares.take(thread)) >= 0;) {
            const int64_t begin = part % stretches * size, span = part / stretches;
            const int64_t first = tokens * span / spans, last = tokens * (span + 1) / spans;
            task.run(begin, begin + size < panels ? begin + size : panels, first, last - first);
        }
    };
    parallel(threads, body);
}

// The largest output of each token and its lowest row, among panels `which` of the first `rows` rows; panel i for the tokens
// whose bits are set in the ith words of `needs` alone.
template <class T>
static void largest(const PanelLinear<T>& task, const int32_t* which, const uint64_t* needs, int64_t count, int64_t tokens,
                    int64_t rows, int64_t* id, uint8_t* bad, int threads) {
    struct Largest {
        float value;
        bool has_nan;
        int64_t row;
        void take(float v, int64_t at) {
            if (v > value || (v == value && at < row)) value = v, row = at;
        }
    };
    static thread_local Buffer buffer;
    Largest* found = buffer.get<Largest>(threads * tokens);
    for (int64_t i = 0; i < threads * tokens; ++i) found[i] = {-std::numeric_limits<float>::infinity(), false, rows};
    const int64_t words = (tokens + 63) / 64;
    Shares shares(count, threads < Shares::kMost ? threads : Shares::kMost);
    auto body = [&](int thread, int) {
        using In = typename Product<T>::In;
        static thread_local Buffer inputs, outputs, list;
        In* x = inputs.get<In>(kTokens * task.inner);
        float* out = outputs.get<float>(kTokens * W);
        int32_t* own = list.get<int32_t>(kTokens);
        for (int64_t i; (i = shares.take(thread)) >= 0;) {
            const int64_t row = which[i] * (int64_t)W, left = rows - row;
            const vi inside = [&] {
                vi v{};
                for (int r = 0; r < W; ++r) v[r] = r < left ? -1 : 0;
                return v;
            }();
            for (int64_t first = 0; first < tokens; first += kTokens) {
                int64_t num = 0;
                for (int64_t t = first; t < tokens && t < first + kTokens; ++t)
                    if (needs[i * words + t / 64] >> (t % 64) & 1) own[num++] = (int32_t)t;
                if (!num) continue;
                const bool all = num == (tokens - first < kTokens ? tokens - first : kTokens);
                for (int64_t j = 0; j < num && !all; ++j)
                    std::memcpy(x + j * task.inner, task.x + own[j] * task.x_stride, task.inner * sizeof(In));
                PanelLinear<T> one = task;
                one.x = all ? task.x + first * task.x_stride : x;
                one.x_stride = all ? task.x_stride : task.inner;
                one.panels += which[i] * task.bytes, one.out = {out, true}, one.rows = W;
                one.run(0, 1, 0, num);
                for (int64_t j = 0; j < num; ++j) {
                    Largest& best = found[thread * tokens + own[j]];
                    const vf v = load(out + j * W), lowest = splat(-std::numeric_limits<float>::infinity());
                    const vi strange = (vi)(v != v) & inside;
                    for (int r = 0; r < W; ++r) best.has_nan |= strange[r] != 0;
                    const vf mine = (inside & ~strange) ? v : lowest;
                    const float top = max_of(mine);
                    if (top < best.value) continue;
                    int r = 0;
                    while (r < W - 1 && mine[r] != top) ++r;
                    best.take(top, row + r);
                }
            }
        }
    };
    parallel((int)(count < threads ? count : threads), body);
    for (int64_t t = 0; t < tokens; ++t) {
        Largest best = found[t];
        for (int i = 1; i < threads; ++i) {
            best.take(found[i * tokens + t].value, found[i * tokens + t].row);
            best.has_nan |= found[i * tokens + t].has_nan;
        }
        bad[t] = best.has_nan || !std::isfinite(best.value);
        id[t] = bad[t] ? 0 : best.row;
    }
}

// Returns 0 where too much is needed: more than `most` panels by any token, or, of many tokens, on the mean over them.
template <class T, class Candidates>
static int argmax_linear(Candidates&& candidates, const void* x, int64_t x_stride, const void* panels, const void* bounds,
                         int64_t* id, uint8_t* bad, int64_t tokens, int64_t inner, int64_t packed_rows, int64_t rows,
                         int64_t most, int threads) {
    static thread_local Buffer list, bits;
    const int64_t num_panels = (rows + W - 1) / W, words = (tokens + 63) / 64;
    int32_t* which = list.get<int32_t>(num_panels);
    uint64_t* needs = bits.get<uint64_t>(num_panels * words);
    const int64_t count = candidates(x, x_stride, bounds, packed_rows, which, needs, tokens, inner, rows, threads);
    int64_t pairs = 0;
    for (int64_t i = 0; i < count * words; ++i) pairs += __builtin_popcountll(needs[i]);
    // The time of few tokens is that of reading the panels, of many that of the products.
    if ((tokens < kManyTokens ? count * tokens : pairs) > most * tokens) return 0;
    const PanelInputs<T> in(x, x_stride, tokens, inner, threads);
    largest(PanelLinear<T>(in, panels, nullptr, {}, inner, W), which, needs, count, tokens, rows, id, bad, threads);
    return 1;
}

}  // namespace mi

using namespace mi;

extern "C" {

int mi_panel_rows() { return W; }

#define MI_PANEL_LINEAR(SUFFIX, T, IS_FP32)                                                                                \
    void mi_panel_linear_##SUFFIX(const void* x, int64_t x_stride, const void* panels, const void* bias, void* out,       \
                                   int64_t tokens, int64_t inner, int64_t rows, int threads) {                             \
        const PanelInputs<T> in(x, x_stride, tokens, inner, threads);                                                      \
        linear(PanelLinear<T>(in, panels, bias, {out, IS_FP32}, inner, rows), tokens, threads);                            \
    }
MI_PANEL_LINEAR(f32, float, true)
MI_PANEL_LINEAR(bf16, bf16, false)
MI_PANEL_LINEAR(bf16_f32, bf16, true)

#define MI_PANELS(SUFFIX, T)                                                                                               \
    int mi_argmax_linear_##SUFFIX(const void* x, int64_t x_stride, const void* panels, const void* bounds, int64_t* id,     \
                                      uint8_t* bad, int64_t tokens, int64_t inner, int64_t packed_rows, int64_t rows,        \
                                      int64_t most, int threads) {                                                         \
        return argmax_linear<T>(mi_candidates_##SUFFIX, x, x_stride, panels, bounds, id, bad, tokens, inner, packed_rows,  \
                                rows, most, threads);                                                                      \
    }
MI_PANELS(f32, float)
MI_PANELS(bf16, bf16)
}

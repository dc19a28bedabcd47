// Paged attention of prompt positions: tiles of queries times packed tiles of keys, with a running softmax.
//
// Key tiles begin at multiples of kTile, and a tile that a query does not see adds exactly nothing to it: a query's result
// depends on its position alone, not on its chunk (for the reason see attention.h).
// 1. every token's key is rotated and appended;  2. keys and values of each (row, kv head) are packed once into panels the
// inner loop can stream;  3. each (row, kv head, tile of queries) goes over the key tiles it sees. The heads of a group are
// rows of one tile, so keys and values are read once for all of them.
// Source: the tiling and running softmax of FlashAttention-2, arXiv:2307.08691.
#include "layer_ops.h"
#include "tiles.h"

namespace mi {

constexpr int kTile = 128;                // keys in a tile
constexpr int kTileRows = 48;             // (query, head) pairs in a tile
constexpr int kMicroRows = 6;             // rows that the inner loop keeps in registers
constexpr int kPanel = W == 16 ? 4 : 2;   // vectors per row that the inner loop keeps in registers
constexpr int64_t kPackedBytes = 1 << 25; // rows are processed in groups that pack into about this much
constexpr float kMasked = -1e30f;

// How operands of the inner product are stored: bf16 in pairs where the CPU multiplies pairs, else fp32.
template <class T>
struct Operand {
    using type = float;
    static constexpr int pair = 1;
};
#if MI_BF16_DOT
template <>
struct Operand<bf16> {
    using type = bf16;
    static constexpr int pair = 2;
};
#endif

// C[r][j] (+)= sum over p of A[r][p] . B[p][j] for kMicroRows rows and NV vectors of columns; B is a panel of b_wide vectors.
template <int NV, bool Accumulate>
static void multiply(const float* a, int a_stride, const float* b, int b_wide, int steps, float* c, int c_stride) {
    vf acc[kMicroRows][NV];
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = Accumulate ? load(c + r * c_stride + j * W) : vf{};
    for (int p = 0; p < steps; ++p, b += b_wide * W) {
        vf column[NV];
        for (int j = 0; j < NV; ++j) column[j] = load(b + j * W);
        for (int r = 0; r < kMicroRows; ++r)
            for (int j = 0; j < NV; ++j) acc[r][j] = fma_of(splat(a[r * a_stride + p]), column[j], acc[r][j]);
    }
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j) store(c + r * c_stride + j * W, acc[r][j]);
}
#if MI_BF16_DOT
template <int NV, bool Accumulate>
static void multiply(const bf16* a, int a_stride, const bf16* b, int b_wide, int steps, float* c, int c_stride) {
    __m512 acc[kMicroRows][NV];
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j)
            acc[r][j] = Accumulate ? _mm512_loadu_ps(c + r * c_stride + j * W) : _mm512_setzero_ps();
    for (int p = 0; p < steps; ++p, b += 2 * b_wide * W) {
        __m512bh column[NV];
        for (int j = 0; j < NV; ++j) column[j] = (__m512bh)_mm512_loadu_si512(b + 2 * j * W);
        for (int r = 0; r < kMicroRows; ++r) {
            int pair;
            std::memcpy(&pair, a + r * a_stride + 2 * p, sizeof pair);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < NV; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], column[j], row);
        }
    }
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j) _mm512_storeu_ps(c + r * c_stride + j * W, acc[r][j]);
}
#endif

struct PrefillRow {
    int64_t row, token, packed;  // packed: offset of this row's panels, in elements
    int q_len, first_position;   // of its prompt queries, which come first
    int kv_len;                  // keys the last of them sees
    int first_key, num_tiles;    // packed keys start here, on a tile boundary
    int64_t first_pack_item, first_item;
    int query_tiles;
};

template <class T>
struct PrefillTask {
    using Op = typename Operand<T>::type;
    static constexpr int pair = Operand<T>::pair;
    const Step& step;
    const Spec& spec;
    const Call& call;
    int dim, wide;        // of a key, of a value
    int group;
    int lanes;            // heads of a group in one tile
    int lane_groups;      // tiles a group is cut into (only groups above kTileRows)
    int tile_tokens;      // queries in a tile
    bool tiles;           // whether products use the matrix registers: a question of machine and head size alone
    Op* packed;

    PrefillTask(const Step& step, const Spec& spec, const Call& call)
        : step(step), spec(spec), call(call), dim((int)spec.head_dim), wide((int)spec.value_dim), group((int)spec.group) {
        lanes = group < kTileRows ? group : kTileRows;
        lane_groups = (group + lanes - 1) / lanes;
        tile_tokens = kTileRows / lanes;
        tiles = false;
#if MI_TILES
        tiles = sizeof(T) == sizeof(bf16) && dim % kTileInner == 0 && tiles_allowed();
#endif
        packed = nullptr;
    }

    int64_t tile_size() const { return (int64_t)kTile * (dim + wide); }  // elements of a packed tile: keys, then values
    int64_t scratch_bytes() const {
        return kTileRows * ((int64_t)dim * sizeof(Op) + (int64_t)wide * sizeof(float) + kTile * (sizeof(Op) + sizeof(float))) +
               4096;
    }

    void put(T from, float* to) const { *to = to_float(from); }
    void put(T from, bf16* to) const { std::memcpy(to, &from, sizeof *to); }
    void put_head(const T* from, float* to) const {
        for (int d = 0; d < dim; d += W) store(to + d, load(from + d));
    }
    void put_head(const T* from, bf16* to) const { std::memcpy(to, from, dim * sizeof *to); }

    // Keys as [panel of keys][dim / pair][keys][pair], values as [panel of dims][keys / pair][dims][pair]; what is behind the
    // row's last key is 0.
    void pack_tile(const PrefillRow& row, int64_t head, int tile) const {
        Op* keys = packed + row.packed + (head * row.num_tiles + tile) * tile_size();
        const int begin = row.first_key + tile * kTile, kv_len = row.kv_len;
        const int n = kv_len - begin < kTile ? kv_len - begin : kTile;
        const int32_t* table = step.block_table + step.table_row[row.row] * step.table_stride;
        const T* from[kTile];
        for (int t = 0; t < n; ++t) {
            const int64_t position = begin + t, column = position / spec.block_size;
            const int64_t at = table[column] * spec.block_size + position % spec.block_size;
            from[t] = (const T*)call.keys + (at * spec.num_kv + head) * spec.key_stride;
        }
        pack_keys(from, n, keys);
        pack_values(from, (const T*)call.values - (const T*)call.keys, n, keys + (int64_t)kTile * dim);
    }

    void pack_keys(const T* const* from, int n, Op* keys) const {
        constexpr int kWide = kPanel * W;
#if defined(__AVX512F__)
        if constexpr (sizeof(T) * pair == 4) {
            for (int t = 0; t < kTile; t += 16)
                for (int d = 0; d < dim; d += 16 * pair)
                    transpose(from + t, n - t, d, keys + (int64_t)(t / kWide) * kWide * dim + d * kWide + (t % kWide) * pair);
            return;
        }
#endif
        if (n < kTile) std::memset(keys, 0, (int64_t)kTile * dim * sizeof(Op));
        for (int t = 0; t < n; ++t) {
            Op* to = keys + (t / kWide) * kWide * dim + (t % kWide) * pair;
            for (int d = 0; d < dim; d += pair, to += kWide * pair)
                for (int i = 0; i < pair; ++i) put(from[t][d + i], to + i);
        }
    }

#if defined(__AVX512F__)
    // 16 words of dims, from d on, of 16 keys of which n are there -> one vector of keys for each word.
    void transpose(const T* const* from, int n, int d, Op* to) const {
        const int words = (dim - d) / pair < 16 ? (dim - d) / pair : 16;
        const __mmask16 mask = (__mmask16)((1u << words) - 1);
        __m512i a[16], b[16];
        for (int r = 0; r < 16; ++r) a[r] = r < n ? _mm512_maskz_loadu_epi32(mask, from[r] + d) : _mm512_setzero_si512();
        for (int r = 0; r < 16; r += 2) {
            b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
            b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
        }
        for (int r = 0; r < 16; r += 4)
            for (int i = 0; i < 2; ++i) {
                a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + 2 + i]);
                a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + 2 + i]);
            }
        // Of 4 keys from r on, a[r + i] has word i + 4 l in 128-bit lane l.
        for (int i = 0; i < 4; ++i) {
            const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44), high = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44);
            const __m512i low2 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee), high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
            b[i] = _mm512_shuffle_i32x4(low, high, 0x88);
            b[4 + i] = _mm512_shuffle_i32x4(low, high, 0xdd);
            b[8 + i] = _mm512_shuffle_i32x4(low2, high2, 0x88);
            b[12 + i] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
        }
        for (int w = 0; w < words; ++w) _mm512_storeu_si512(to + w * kPanel * W * pair, b[w]);
    }
#endif

    void pack_values(const T* const* from, ptrdiff_t to_value, int n, Op* values) const {
        constexpr int kWide = kPanel * W;
        const int whole = wide / kWide * kWide;
        for (int d = 0; d < wide; d += W) {
            const int columns = d < whole ? kWide : W, panel = d < whole ? d / kWide * kWide : d;
            Op* out = values + panel * kTile + (d - panel) * pair;
            for (int t = 0; t < kTile; t += pair, out += columns * pair) {
                if constexpr (pair == 1) {
                    store(out, t < n ? load(from[t] + to_value + d) : vf{});
                } else {
                    const vu even = t < n ? (vu)load(from[t] + to_value + d) : vu{};
                    const vu odd = t + 1 < n ? (vu)load(from[t + 1] + to_value + d) : vu{};
                    const vu both = even >> 16 | odd;  // a bf16 is the upper half of its float
                    std::memcpy(out, &both, sizeof both);
                }
            }
        }
    }

    struct Scratch {
        Op *queries, *weights;
        float *scores, *out, top[kTileRows], mass[kTileRows];
        int position[kTileRows];
        int rows, padded;
    };

    void attend_tile(const PrefillRow& row, int64_t head, int lane_group, int tile, Scratch& s) const {
        const int first = tile * tile_tokens, first_lane = lane_group * lanes;
        const int tokens = row.q_len - first < tile_tokens ? row.q_len - first : tile_tokens;
        const int heads = group - first_lane < lanes ? group - first_lane : lanes;
        s.rows = tokens * heads;
        const int together = tiles ? 16 : kMicroRows;
        s.padded = (s.rows + together - 1) / together * together;
        for (int r = 0; r < s.rows; ++r) {
            const int64_t token = row.token + first + r / heads;
            const T* q = (const T*)call.q + token * call.q_token + head * call.q_kv + (first_lane + r % heads) * call.q_group;
            T turned[kMaxHeadDim];
            rotate_head(step, spec, token, q, turned);
            put_head(turned, s.queries + r * dim);
            s.position[r] = row.first_position + first + r / heads;
            s.top[r] = kMasked;
            s.mass[r] = 0;
        }
        std::memset(s.queries + s.rows * dim, 0, (s.padded - s.rows) * dim * sizeof(Op));
        std::memset(s.weights + s.rows * kTile, 0, (s.padded - s.rows) * kTile * sizeof(Op));
        std::memset(s.out, 0, s.padded * wide * sizeof(float));

        const int low = first_visible(s.position[0]), high = s.position[s.rows - 1] + 1;
        const Op* tiles = packed + row.packed + head * row.num_tiles * tile_size();
        for (int t = (low - row.first_key) / kTile; row.first_key + t * kTile < high; ++t)
            attend_keys(tiles + t * tile_size(), row.first_key + t * kTile, s);

        for (int r = 0; r < s.rows; ++r) {
            const int64_t token = row.token + first + r / heads;
            const int64_t query_head = head * group + first_lane + r % heads;
            T* out = (T*)call.out + (token * spec.num_kv * group + query_head) * wide;
            const float factor = factor_of<T>(spec, query_head, s.top[r] * scale_of(spec), s.mass[r]);
            for (int d = 0; d < wide; d += W) store(out + d, load(s.out + r * wide + d) * factor);
        }
    }

    int first_visible(int position) const {
        return spec.window && position + 1 > spec.window ? (int)(position + 1 - spec.window) : 0;
    }

    // Scores of all rows for the first `vectors` of a panel's keys.
    template <int NV>
    void score(const Op* keys, int panel, int vectors, Scratch& s) const {
        if constexpr (NV > 1)
            if (vectors < NV) return score<NV - 1>(keys, panel, vectors, s);
        for (int r = 0; r < s.padded; r += kMicroRows)
            multiply<NV, false>(s.queries + r * dim, dim, keys, kPanel, dim / pair, s.scores + r * kTile + panel, kTile);
    }

    void attend_keys(const Op* keys, int first_key, Scratch& s) const {
        constexpr int kWide = kPanel * W;
        // Keys that some row of the tile sees. A key outside weighs exactly 0 in the rows that do not see it.
        int low = first_visible(s.position[0]) - first_key, high = s.position[s.rows - 1] + 1 - first_key;
        const int together = tiles ? 32 : pair;
        low = low < 0 ? 0 : low / kWide * kWide;
        high = high > kTile ? kTile : (high + together - 1) / together * together;
        const Op* values = keys + (int64_t)kTile * dim;
#if MI_TILES
        if constexpr (sizeof(Op) == sizeof(bf16))
            if (tiles) return attend_tiles(keys, values, first_key, low, high, s);
#endif
        for (int panel = low; panel < high; panel += kWide) score<kPanel>(keys + panel * dim, panel, (high - panel + W - 1) / W, s);
        weigh(first_key, low, high, s);
        const int whole = wide / kWide * kWide, steps = (high - low) / pair;
        for (int d = 0; d < wide;) {
            const bool full = d < whole;
            const Op* from = values + d * kTile + low * (full ? kWide : W);
            for (int r = 0; r < s.padded; r += kMicroRows) {
                const Op* weights = s.weights + r * kTile + low;
                if (full)
                    multiply<kPanel, true>(weights, kTile, from, kPanel, steps, s.out + r * wide + d, wide);
                else
                    multiply<1, true>(weights, kTile, from, 1, steps, s.out + r * wide + d, wide);
            }
            d += full ? kWide : W;
        }
    }

#if MI_TILES
    void attend_tiles(const Op* keys, const Op* values, int first_key, int low, int high, Scratch& s) const {
        constexpr int kWide = kPanel * W, kLine = kWide * pair;
        const int groups = s.padded / kTileLines, whole = wide / kWide * kWide, steps = (high - low) / kTileInner;
        for (int panel = low; panel < high; panel += kWide)
            multiply_tiles<false>(s.queries, dim, keys + panel * dim, kLine, groups, kPanel, dim / kTileInner, s.scores + panel, kTile);
        weigh(first_key, low, high, s);
        for (int d = 0; d < wide;) {
            const int columns = d < whole ? kWide : W;
            multiply_tiles<true>(s.weights + low, kTile, values + d * kTile + low * columns, columns * pair, groups, columns / W,
                                 steps, s.out + d, wide);
            d += columns;
        }
    }
#endif

    // Keys of this tile that row r sees, within low .. high.
    void seen_by(int r, int first_key, int low, int high, const Scratch& s, int* begin, int* end) const {
        *begin = first_visible(s.position[r]) - first_key, *end = s.position[r] + 1 - first_key;
        *begin = *begin < low ? low : *begin;
        *end = *end > high ? high : *end;
    }

    // Scores of all rows over keys low .. high of this tile -> weights; rescales the rows' sums so far. What combines the
    // lanes of a vector does so for 16 rows at once.
    void weigh(int first_key, int low, int high, Scratch& s) const {
        const float scale = scale_of(spec);
        vf each[kTileRows];
        float found[kTileRows], shrink[kTileRows];
        for (int r = 0; r < kTileRows; ++r) each[r] = r < s.rows ? highest(r, first_key, low, high, s) : splat(kMasked);
        for (int r = 0; r < s.rows; r += 16) largest_of(each + r, found + r);
        for (int r = 0; r < s.rows; r += W) {
            const vf before = load(s.top + r), top = vmax(load(found + r), before);
            store(shrink + r, exp_of((before - top) * scale));
            store(s.mass + r, load(s.mass + r) * load(shrink + r));
            store(s.top + r, top);
        }
        for (int r = 0; r < s.rows; ++r) {
            if (shrink[r] != 1.0f)
                for (int d = 0; d < wide; d += W) store(s.out + r * wide + d, load(s.out + r * wide + d) * splat(shrink[r]));
            each[r] = weights_of(r, first_key, low, high, scale, s);
        }
        for (int r = 0; r < s.rows; r += 16) sums_of(each + r, found + r);
        for (int r = 0; r < s.rows; r += W) store(s.mass + r, load(s.mass + r) + load(found + r));
    }

    // The largest scores of row r, by lane. Caps scores and marks keys that it does not see, in the vectors in which it sees some.
    vf highest(int r, int first_key, int low, int high, Scratch& s) const {
        float* score = s.scores + r * kTile;
        int begin, end;
        seen_by(r, first_key, low, high, s, &begin, &end);
        vf best[2] = {splat(kMasked), splat(kMasked)};
        if (begin >= end) return best[0];
        int t = begin / W * W;
        const int to = (end + W - 1) / W * W;
        cap_scores(spec, score, t, to);
        for (int i = t; i < begin; ++i) score[i] = kMasked;
        for (int i = end; i < to; ++i) score[i] = kMasked;
        for (; t + 2 * W <= to; t += 2 * W) {
            best[0] = vmax(load(score + t), best[0]);
            best[1] = vmax(load(score + t + W), best[1]);
        }
        if (t < to) best[0] = vmax(load(score + t), best[0]);
        return vmax(best[0], best[1]);
    }

    // Weights of row r; returns their sums, by lane.
    vf weights_of(int r, int first_key, int low, int high, float scale, Scratch& s) const {
        const float* score = s.scores + r * kTile;
        Op* weight = s.weights + r * kTile;
        int begin, end;
        seen_by(r, first_key, low, high, s, &begin, &end);
        vf mass = {};
        if (begin >= end) {
            std::memset(weight + low, 0, (high - low) * sizeof(Op));
            return mass;
        }
        const Softmax<T> weight_of(s.top[r], scale);
        for (int t = begin / W * W; t < end; t += W) {
            vf e = weight_of(load(score + t));
            store(weight + t, e);
            mass += e;
        }
        // What is left of masked keys, e^-87 at most, differs with the chunk: it vanishes in the sum, and the weights are 0.
        std::memset(weight + low, 0, (begin - low) * sizeof(Op));
        if (end < high) std::memset(weight + end, 0, (high - end) * sizeof(Op));
        return mass;
    }
};

// Divide one thread's workspace.
template <class T>
static typename PrefillTask<T>::Scratch carve(char* memory, int dim, int wide) {
    using Op = typename Operand<T>::type;
    auto take = [&](int64_t bytes) {
        char* at = memory;
        memory += (bytes + 63) / 64 * 64;
        return at;
    };
    typename PrefillTask<T>::Scratch s;
    s.queries = (Op*)take((int64_t)kTileRows * dim * sizeof(Op));
    s.weights = (Op*)take((int64_t)kTileRows * kTile * sizeof(Op));
    s.scores = (float*)take((int64_t)kTileRows * kTile * sizeof(float));
    s.out = (float*)take((int64_t)kTileRows * wide * sizeof(float));
    return s;
}

template <class T>
static void run_group(Context& context, PrefillTask<T>& task, const PrefillRow* rows, int64_t count, int64_t elements) {
    const Step& step = task.step;
    const int64_t num_kv = task.spec.num_kv;
    task.packed = context.packed.get<typename Operand<T>::type>(elements);
    const PrefillRow& last = rows[count - 1];

    const int64_t pack_items = last.first_pack_item + last.num_tiles * num_kv;
    int64_t next_pack = 0, next = 0;
    auto pack = [&](int, int) {
        int64_t at = 0;
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next_pack, 1, __ATOMIC_RELAXED);
            if (item >= pack_items) return;
            while (at + 1 < count && rows[at + 1].first_pack_item <= item) ++at;
            const int64_t within = item - rows[at].first_pack_item;
            task.pack_tile(rows[at], within % num_kv, (int)(within / num_kv));
        }
    };
    parallel((int)(pack_items < step.threads ? pack_items : step.threads), pack);

    const int64_t items = last.first_item + last.query_tiles * num_kv * task.lane_groups;
    auto attend = [&](int thread, int) {
        auto scratch = carve<T>(context.scratch[thread].template get<char>(task.scratch_bytes()), task.dim, task.wide);
#if MI_TILES
        if (task.tiles) shape_tiles(kTileLines, kTileLines);
#endif
        int64_t at = 0;
        for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) {
            while (at + 1 < count && rows[at + 1].first_item <= item) ++at;
            const int64_t within = item - rows[at].first_item, width = num_kv * task.lane_groups;
            const int tile = rows[at].query_tiles - 1 - (int)(within / width);  // the last queries see the most keys
            task.attend_tile(rows[at], within % width / task.lane_groups, (int)(within % task.lane_groups), tile, scratch);
        }
#if MI_TILES
        if (task.tiles) release_tiles();
#endif
    };
    parallel((int)(items < step.threads ? items : step.threads), attend);
}

template <class T>
void prefill_rows(Context& context, const Step& step, const Spec& spec, const Call& call) {
    PrefillTask<T> task(step, spec, call);
    PrefillRow* rows = context.items.get<PrefillRow>(step.num_rows);
    if ((int64_t)context.scratch.size() < step.threads) context.scratch = std::vector<Buffer>(step.threads);

    const int64_t budget = kPackedBytes / (int64_t)sizeof(typename Operand<T>::type);
    for (int64_t i = step.num_decode; i < step.num_rows;) {
        int64_t count = 0, elements = 0, pack_items = 0, items = 0;
        for (; i < step.num_rows && elements < budget; ++i) {
            if (!step.num_prompt_queries[i] || (step.elsewhere && step.elsewhere[i])) continue;
            PrefillRow& row = rows[count++];
            row.row = i;
            row.token = step.cu_q[i];
            row.q_len = step.num_prompt_queries[i];
            row.first_position = step.kv_len[i] - step.q_len[i];
            row.kv_len = row.first_position + row.q_len;
            row.first_key = task.first_visible(row.first_position) / kTile * kTile;
            row.num_tiles = (row.kv_len - row.first_key + kTile - 1) / kTile;
            row.packed = elements;
            row.first_pack_item = pack_items;
            row.first_item = items;
            row.query_tiles = (row.q_len + task.tile_tokens - 1) / task.tile_tokens;
            elements += row.num_tiles * spec.num_kv * task.tile_size();
            pack_items += row.num_tiles * spec.num_kv;
            items += row.query_tiles * spec.num_kv * task.lane_groups;
        }
        if (!count) break;
        run_group(context, task, rows, count, elements);
    }
}

template void prefill_rows<float>(Context&, const Step&, const Spec&, const Call&);
template void prefill_rows<bf16>(Context&, const Step&, const Spec&, const Call&);

}  // namespace mi

using namespace mi;

// Keys and values of all slices are written first: a row may read blocks that another slice of this step fills (a shared
// prefix).
template <class T>
static void append_slices(const Step& step, const Spec& spec, const Call& call) {
    if (step.num_rows == step.num_decode || !call.k) return;
    const int64_t from = step.cu_q[step.num_decode];
    parallel_ranges((int)step.threads, step.num_tokens - from, [&](int64_t begin, int64_t end) {
        for (int64_t token = from + begin; token < from + end; ++token)
            for (int64_t head = 0; head < spec.num_kv; ++head) append<T>(step, spec, call, token, head);
    });
}

template <class T>
static void attend(Context* context, const Step* step, const Spec* spec, const Call* call) {
    append_slices<T>(*step, *spec, *call);
    decode_rows<T>(*context, *step, *spec, *call);
    prefill_rows<T>(*context, *step, *spec, *call);
}

extern "C" {

void* mi_context_new() { return new Context; }
void mi_context_free(void* context) { delete (Context*)context; }
void mi_attend_f32(Context* context, const Step* step, const Spec* spec, const Call* call) {
    attend<float>(context, step, spec, call);
}
void mi_attend_bf16(Context* context, const Step* step, const Spec* spec, const Call* call) {
    attend<bf16>(context, step, spec, call);
}
}

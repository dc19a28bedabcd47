// Paged attention of prompt positions: tiles of queries times packed tiles of keys, with a running softmax.
//
// Key tiles begin at multiples of kTile, and a tile that a query does not see adds exactly nothing to it: a query's result
// depends on its position alone, not on its chunk (for the reason see attention.h).
// 1. every token's key is rotated and appended;  2. keys and values of each (row, kv head) are packed once into panels the
// inner loop can stream;  3. each (row, kv head, tile of queries) goes over the key tiles it sees. The heads of a group are
// rows of one tile, so keys and values are read once for all of them.
// Source: the tiling and running softmax of FlashAttention-2, arXiv:2307.08691.
#include "attention.h"

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

// C[r][j] (+)= sum over p of A[r][p] . B[p][j] for kMicroRows rows and NV vectors of columns; B is one panel.
template <int NV, bool Accumulate>
static void multiply(const float* a, int a_stride, const float* b, int steps, float* c, int c_stride) {
    vf acc[kMicroRows][NV];
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] = Accumulate ? load(c + r * c_stride + j * W) : vf{};
    for (int p = 0; p < steps; ++p, b += NV * W) {
        vf column[NV];
        for (int j = 0; j < NV; ++j) column[j] = load(b + j * W);
        for (int r = 0; r < kMicroRows; ++r)
            for (int j = 0; j < NV; ++j) acc[r][j] += a[r * a_stride + p] * column[j];
    }
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j) store(c + r * c_stride + j * W, acc[r][j]);
}
#if MI_BF16_DOT
template <int NV, bool Accumulate>
static void multiply(const bf16* a, int a_stride, const bf16* b, int steps, float* c, int c_stride) {
    __m512 acc[kMicroRows][NV];
    for (int r = 0; r < kMicroRows; ++r)
        for (int j = 0; j < NV; ++j)
            acc[r][j] = Accumulate ? _mm512_loadu_ps(c + r * c_stride + j * W) : _mm512_setzero_ps();
    for (int p = 0; p < steps; ++p, b += 2 * NV * W) {
        __m512bh column[NV];
        for (int j = 0; j < NV; ++j) column[j] = (__m512bh)_mm512_loadu_si512(b + 2 * j * W);
        for (int r = 0; r < kMicroRows; ++r) {
            int pair;
            std::memcpy(&pair, a + r * a_stride + 2 * p, sizeof pair);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < NV; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], row, column[j]);
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
    int dim, group;
    int lanes;            // heads of a group in one tile
    int lane_groups;      // tiles a group is cut into (only groups above kTileRows)
    int tile_tokens;      // queries in a tile
    Op* packed;

    PrefillTask(const Step& step, const Spec& spec, const Call& call)
        : step(step), spec(spec), call(call), dim((int)spec.head_dim), group((int)spec.group) {
        lanes = group < kTileRows ? group : kTileRows;
        lane_groups = (group + lanes - 1) / lanes;
        tile_tokens = kTileRows / lanes;
        packed = nullptr;
    }

    int64_t tile_size() const { return 2 * (int64_t)kTile * dim; }  // elements of a packed tile: keys, then values
    static int64_t scratch_bytes(int dim) {
        return kTileRows * ((int64_t)dim * (sizeof(Op) + sizeof(float)) + kTile * (sizeof(Op) + sizeof(float))) + 4096;
    }

    void put(T from, float* to) const { *to = to_float(from); }
    void put(T from, bf16* to) const { std::memcpy(to, &from, sizeof *to); }

    // Keys as [panel of keys][dim / pair][keys][pair], values as [panel of dims][keys / pair][dims][pair].
    void pack_tile(const PrefillRow& row, int64_t head, int tile) const {
        Op* keys = packed + row.packed + (head * row.num_tiles + tile) * tile_size();
        Op* values = keys + (int64_t)kTile * dim;
        const int begin = row.first_key + tile * kTile, kv_len = row.kv_len;
        const int n = kv_len - begin < kTile ? kv_len - begin : kTile;
        if (n < kTile) std::memset(keys, 0, tile_size() * sizeof(Op));
        const int32_t* table = step.block_table + step.table_row[row.row] * step.table_stride;
        constexpr int kWide = kPanel * W;
        const int whole = dim / kWide * kWide;
        for (int t = 0; t < n; ++t) {
            const int position = begin + t;
            const int64_t at = (table[position / spec.block_size] * spec.block_size + position % spec.block_size);
            const T* key = (const T*)call.keys + (at * spec.num_kv + head) * dim;
            const T* value = (const T*)call.values + (at * spec.num_kv + head) * dim;
            Op* to = keys + (t / kWide) * kWide * dim + (t % kWide) * pair;
            for (int d = 0; d < dim; d += pair, to += kWide * pair)
                for (int i = 0; i < pair; ++i) put(key[d + i], to + i);
            for (int d = 0; d < dim; d += W) {
                const int wide = d < whole ? kWide : W;
                const int panel = d < whole ? d / kWide * kWide : d;
                Op* out = values + panel * kTile + (int64_t)(t / pair) * wide * pair + (d - panel) * pair + t % pair;
                for (int i = 0; i < W; ++i) put(value[d + i], out + i * pair);
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
        s.padded = (s.rows + kMicroRows - 1) / kMicroRows * kMicroRows;
        for (int r = 0; r < s.rows; ++r) {
            const int64_t token = row.token + first + r / heads;
            const T* q = (const T*)call.q + token * call.q_token + head * call.q_kv + (first_lane + r % heads) * call.q_group;
            T turned[kMaxHeadDim];
            rotate_head(step, spec, token, q, turned);
            for (int d = 0; d < dim; ++d) put(turned[d], s.queries + r * dim + d);
            s.position[r] = row.first_position + first + r / heads;
            s.top[r] = kMasked;
            s.mass[r] = 0;
        }
        std::memset(s.queries + s.rows * dim, 0, (s.padded - s.rows) * dim * sizeof(Op));
        std::memset(s.weights + s.rows * kTile, 0, (s.padded - s.rows) * kTile * sizeof(Op));
        std::memset(s.out, 0, s.padded * dim * sizeof(float));

        const int low = first_visible(s.position[0]), high = s.position[s.rows - 1] + 1;
        const Op* tiles = packed + row.packed + head * row.num_tiles * tile_size();
        for (int t = (low - row.first_key) / kTile; row.first_key + t * kTile < high; ++t)
            attend_keys(tiles + t * tile_size(), row.first_key + t * kTile, s);

        for (int r = 0; r < s.rows; ++r) {
            const int64_t token = row.token + first + r / heads;
            T* out = (T*)call.out + ((token * spec.num_kv + head) * group + first_lane + r % heads) * dim;
            const float scale = 1.0f / s.mass[r];
            for (int d = 0; d < dim; d += W) store(out + d, load(s.out + r * dim + d) * scale);
        }
    }

    int first_visible(int position) const {
        return spec.window && position + 1 > spec.window ? (int)(position + 1 - spec.window) : 0;
    }

    void attend_keys(const Op* keys, int first_key, Scratch& s) const {
        constexpr int kWide = kPanel * W;
        const Op* values = keys + (int64_t)kTile * dim;
        for (int panel = 0; panel < kTile; panel += kWide)
            for (int r = 0; r < s.padded; r += kMicroRows)
                multiply<kPanel, false>(s.queries + r * dim, dim, keys + panel * dim, dim / pair,
                                        s.scores + r * kTile + panel, kTile);
        for (int r = 0; r < s.rows; ++r) weigh(r, first_key, s);
        const int whole = dim / kWide * kWide;
        for (int d = 0; d < dim;) {
            const bool full = d < whole;
            for (int r = 0; r < s.padded; r += kMicroRows) {
                if (full)
                    multiply<kPanel, true>(s.weights + r * kTile, kTile, values + d * kTile, kTile / pair,
                                           s.out + r * dim + d, dim);
                else
                    multiply<1, true>(s.weights + r * kTile, kTile, values + d * kTile, kTile / pair, s.out + r * dim + d,
                                      dim);
            }
            d += full ? kWide : W;
        }
    }

    // Scores of row r over this tile -> weights; rescales the row's sums so far.
    void weigh(int r, int first_key, Scratch& s) const {
        float* score = s.scores + r * kTile;
        Op* weight = s.weights + r * kTile;
        int begin = first_visible(s.position[r]) - first_key, end = s.position[r] + 1 - first_key;
        begin = begin < 0 ? 0 : begin;
        end = end > kTile ? kTile : end;
        if (begin >= end) {
            std::memset(weight, 0, kTile * sizeof(Op));
            return;
        }
        for (int t = 0; t < begin; ++t) score[t] = kMasked;
        for (int t = end; t < kTile; ++t) score[t] = kMasked;
        vf best[2] = {splat(s.top[r]), splat(kMasked)};
        for (int t = 0; t < kTile; t += 2 * W) {
            best[0] = vmax(load(score + t), best[0]);
            best[1] = vmax(load(score + t + W), best[1]);
        }
        const float top = max_of(vmax(best[0], best[1])), scale = (float)spec.scale;
        if (top > s.top[r]) {
            const vf shrink = exp_of(splat((s.top[r] - top) * scale));
            s.mass[r] *= shrink[0];
            s.top[r] = top;
            for (int d = 0; d < dim; d += W) store(s.out + r * dim + d, load(s.out + r * dim + d) * shrink);
        }
        vf mass = {};
        for (int t = 0; t < kTile; t += W) {
            vf e = exp_of((load(score + t) - top) * scale);
            store(weight + t, e);
            mass += e;
        }
        s.mass[r] += sum_of(mass);
        // Masked keys have e^-87, and differ with the chunk. In the sum of all weights they vanish.
        std::memset(weight, 0, begin * sizeof(Op));
        std::memset(weight + end, 0, (kTile - end) * sizeof(Op));
    }
};

// Divide one thread's workspace.
template <class T>
static typename PrefillTask<T>::Scratch carve(char* memory, int dim) {
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
    s.out = (float*)take((int64_t)kTileRows * dim * sizeof(float));
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
        auto scratch = carve<T>(context.scratch[thread].template get<char>(PrefillTask<T>::scratch_bytes(task.dim)), task.dim);
        int64_t at = 0;
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (item >= items) return;
            while (at + 1 < count && rows[at + 1].first_item <= item) ++at;
            const int64_t within = item - rows[at].first_item, width = num_kv * task.lane_groups;
            const int tile = rows[at].query_tiles - 1 - (int)(within / width);  // the last queries see the most keys
            task.attend_tile(rows[at], within % width / task.lane_groups, (int)(within % task.lane_groups), tile, scratch);
        }
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
            if (!step.num_prompt_queries[i]) continue;
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
    if (step.num_rows == step.num_decode) return;
    const int64_t from = step.cu_q[step.num_decode];
    parallel_ranges((int)step.threads, step.num_tokens - from, [&](int64_t begin, int64_t end) {
        for (int64_t token = from + begin; token < from + end; ++token)
            for (int64_t head = 0; head < spec.num_kv; ++head) append<T>(step, spec, call, token, head);
    });
}

template <class T>
static void attend(void* context, const Step* step, const Spec* spec, const Call* call) {
    append_slices<T>(*step, *spec, *call);
    decode_rows<T>(*(Context*)context, *step, *spec, *call);
    prefill_rows<T>(*(Context*)context, *step, *spec, *call);
}

extern "C" {

void* mi_context_new() { return new Context; }
void mi_context_free(void* context) { delete (Context*)context; }
void mi_attend_f32(void* context, const Step* step, const Spec* spec, const Call* call) {
    attend<float>(context, step, spec, call);
}
void mi_attend_bf16(void* context, const Step* step, const Spec* spec, const Call* call) {
    attend<bf16>(context, step, spec, call);
}
}

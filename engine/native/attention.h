// Paged causal attention over KV blocks that are read where they lie (Kwon et al., 2023), with an online softmax over
// runs of keys (Dao et al., 2022).
//
// A block holds 16 tokens of every key head, laid out for bfloat16 dot products of pairs: keys [dim / 2][16 tokens][2],
// so that 16 scores come of one pass over a query, and values [8 pairs of tokens][dim][2]. In int8 the two are
// [16 tokens][dim] bytes each, with a float32 scale a token, and are widened to the same layout before use.
//
// A row's result depends on that row alone, bit for bit: runs start at multiples of RUN_KEYS, and a run that a row
// does not see leaves its sums as they are.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace farthing {

constexpr int64_t BLOCK_TOKENS = 16;
constexpr int64_t RUN_BLOCKS = 8;
constexpr int64_t RUN_KEYS = RUN_BLOCKS * BLOCK_TOKENS;
constexpr int64_t UNIT_ROWS = 24;  // query rows (positions x heads that share a key head) of one unit of work
constexpr int SUB_ROWS = 6;        // rows of one register tile

struct KvShape {
    int64_t kv_heads, dim, int8;  // int8: 1 or 0

    int64_t wide_dim() const { return ceil_div(dim, 16) * 16; }
    int64_t key_bytes() const { return int8 ? BLOCK_TOKENS * (dim + 4) : dim * BLOCK_TOKENS * 2; }
    int64_t value_bytes() const { return int8 ? BLOCK_TOKENS * (dim + 4) : wide_dim() * BLOCK_TOKENS * 2; }
    int64_t head_bytes() const { return ceil_div(key_bytes() + value_bytes(), 64) * 64; }
    int64_t block_bytes() const { return kv_heads * head_bytes(); }
};

inline float quantise_head(const float* x, int64_t dim, int8_t* out) {
    float largest = 0;
    for (int64_t d = 0; d < dim; d++) largest = std::max(largest, std::fabs(x[d]));
    const float steps = largest > 0 ? 127 / largest : 0;
    for (int64_t d = 0; d < dim; d++) out[d] = static_cast<int8_t>(std::nearbyint(x[d] * steps));
    return largest / 127;
}

// Store one token's key and value [dim] of one head. `block`: that head's part of its block.
inline void store_token(const KvShape& shape, uint8_t* block, int64_t token, const float* key, const float* value) {
    uint8_t* values = block + shape.key_bytes();
    if (shape.int8) {
        float* scales = reinterpret_cast<float*>(block + BLOCK_TOKENS * shape.dim);
        scales[token] = quantise_head(key, shape.dim, reinterpret_cast<int8_t*>(block) + token * shape.dim);
        scales = reinterpret_cast<float*>(values + BLOCK_TOKENS * shape.dim);
        scales[token] = quantise_head(value, shape.dim, reinterpret_cast<int8_t*>(values) + token * shape.dim);
        return;
    }
    uint32_t* pairs = reinterpret_cast<uint32_t*>(block) + token;
    uint16_t* line = reinterpret_cast<uint16_t*>(values) + token / 2 * shape.wide_dim() * 2 + token % 2;
    for (int64_t d = 0; d < shape.dim; d += 16) {
        const int64_t count = std::min<int64_t>(16, shape.dim - d);
        alignas(32) uint16_t keys[16], halves[16];
        _mm256_store_si256((__m256i*)keys, narrow(_mm512_maskz_loadu_ps(first_lanes(count), key + d)));
        _mm256_store_si256((__m256i*)halves, narrow(_mm512_maskz_loadu_ps(first_lanes(count), value + d)));
        for (int64_t i = 0; i < count / 2; i++) std::memcpy(pairs + (d / 2 + i) * BLOCK_TOKENS, keys + 2 * i, 4);
        for (int64_t i = 0; i < count; i++) line[2 * (d + i)] = halves[i];
    }
}

// What a thread needs while it attends: kept between units, grown as needed.
struct Workspace {
    std::vector<uint32_t> queries, weights;
    std::vector<float> scores, out, largest, sum;
    std::vector<uint8_t> widened;
};

// An int8 block's keys and values as the pairs that the bfloat16 layout has.
inline void widen_block(const KvShape& shape, const uint8_t* block, uint8_t* out) {
    const auto row = [&](const uint8_t* part, int64_t token, int64_t d) {
        const int8_t* values = reinterpret_cast<const int8_t*>(part) + token * shape.dim + d;
        const float scale = reinterpret_cast<const float*>(part + BLOCK_TOKENS * shape.dim)[token];
        const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(shape.dim - d), values);
        return narrow(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(scale)));
    };
    uint32_t* pairs = reinterpret_cast<uint32_t*>(out);
    uint16_t* lines = reinterpret_cast<uint16_t*>(out + shape.dim * BLOCK_TOKENS * 2);
    for (int64_t t = 0; t < BLOCK_TOKENS; t++)
        for (int64_t d = 0; d < shape.dim; d += 16) {
            alignas(32) uint16_t keys[16], values[16];
            _mm256_store_si256((__m256i*)keys, row(block, t, d));
            _mm256_store_si256((__m256i*)values, row(block + shape.key_bytes(), t, d));
            const int64_t count = std::min<int64_t>(16, shape.dim - d);
            for (int64_t i = 0; i < count / 2; i++) std::memcpy(pairs + (d / 2 + i) * BLOCK_TOKENS + t, keys + 2 * i, 4);
            uint16_t* line = lines + t / 2 * shape.wide_dim() * 2 + t % 2;
            for (int64_t i = 0; i < count; i++) line[2 * (d + i)] = values[i];
        }
}

// Scores of R rows against the 16 keys of each of B blocks. queries: [R][dim / 2] pairs, scaled already.
template <int R, int B>
__attribute__((noinline)) void score_blocks(const uint32_t* queries, const uint8_t* const* blocks, int64_t pairs,
                                            float* scores) {
    __m512 sums[R * B];
    each<R * B>([&](auto i) __attribute__((always_inline)) { sums[i] = _mm512_setzero_ps(); });
    const uint32_t* keys[B];
    each<B>([&](auto b) __attribute__((always_inline)) { keys[b] = reinterpret_cast<const uint32_t*>(blocks[b]); });
    for (int64_t d = 0; d < pairs; d++) {
        __m512i key[B];
        each<B>([&](auto b) __attribute__((always_inline)) { key[b] = _mm512_loadu_si512(keys[b] + d * BLOCK_TOKENS); });
        each<R>([&](auto r) __attribute__((always_inline)) {
            const __m512i query = _mm512_set1_epi32(queries[r * pairs + d]);
            each<B>([&](auto b) __attribute__((always_inline)) { sums[r * B + b] = dot_pairs(sums[r * B + b], key[b], query); });
        });
    }
    each<R * B>([&](auto i) __attribute__((always_inline)) {
        _mm512_storeu_ps(scores + i / B * RUN_KEYS + i % B * BLOCK_TOKENS, sums[i]);
    });
}

// Add the weighted values of a run to C x 16 elements of R rows. weights: [R][RUN_KEYS / 2] pairs. offset: of the
// elements' first value in a block.
template <int R, int C>
__attribute__((noinline)) void weigh_blocks(const uint32_t* weights, const uint8_t* const* blocks, int64_t count,
                                            int64_t offset, int64_t wide_dim, float* out) {
    __m512 sums[R * C];
    each<R * C>([&](auto i) __attribute__((always_inline)) {
        sums[i] = _mm512_loadu_ps(out + i / C * wide_dim + 16 * (i % C));
    });
    for (int64_t b = 0; b < count; b++, weights += BLOCK_TOKENS / 2) {
        const uint32_t* lines = reinterpret_cast<const uint32_t*>(blocks[b] + offset);
        for (int64_t t = 0; t < BLOCK_TOKENS / 2; t++, lines += wide_dim) {
            __m512i value[C];
            each<C>([&](auto c) __attribute__((always_inline)) { value[c] = _mm512_loadu_si512(lines + 16 * c); });
            each<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i weight = _mm512_set1_epi32(weights[r * (RUN_KEYS / 2) + t]);
                each<C>([&](auto c) __attribute__((always_inline)) {
                    sums[r * C + c] = dot_pairs(sums[r * C + c], value[c], weight);
                });
            });
        }
    }
    each<R * C>([&](auto i) __attribute__((always_inline)) {
        _mm512_storeu_ps(out + i / C * wide_dim + 16 * (i % C), sums[i]);
    });
}

// The new tokens first..first + count of one sequence, whose token t lies in `table[t / 16]`.
struct Unit {
    const int32_t* table;
    int64_t first_row, first_position, count;
};

struct Attention {
    KvShape shape;
    int64_t group;  // query heads that share a key head
    int64_t query_stride, out_stride;
    float scale, softcap;  // softcap: 0 for none
    int64_t window;        // 0 for none
};

template <int R>
void score_run(const Attention& a, Workspace& work, int64_t row, const uint8_t* const* blocks, int64_t count) {
    const int64_t pairs = a.shape.dim / 2;
    const uint32_t* queries = work.queries.data() + row * pairs;
    float* scores = work.scores.data() + row * RUN_KEYS;
    int64_t b = 0;
    for (; b + 2 <= count; b += 2) score_blocks<R, 2>(queries, blocks + b, pairs, scores + b * BLOCK_TOKENS);
    if (b < count) score_blocks<R, 1>(queries, blocks + b, pairs, scores + b * BLOCK_TOKENS);
}

template <int R>
void weigh_run(const Attention& a, Workspace& work, int64_t row, const uint8_t* const* blocks, int64_t count) {
    const int64_t wide = a.shape.wide_dim(), offset = a.shape.dim * BLOCK_TOKENS * 2;
    const uint32_t* weights = work.weights.data() + row * (RUN_KEYS / 2);
    float* out = work.out.data() + row * wide;
    int64_t first = 0;
    for (; first + 64 <= wide; first += 64) weigh_blocks<R, 4>(weights, blocks, count, offset + 4 * first, wide, out + first);
    for (; first < wide; first += 16) weigh_blocks<R, 1>(weights, blocks, count, offset + 4 * first, wide, out + first);
}

// Scores of one row's run to weights: mask, soft-cap, and the online softmax's bookkeeping. Keys are first_key.. .
inline void soften_row(const Attention& a, Workspace& work, int64_t row, int64_t position, int64_t first_key, int64_t count) {
    float* scores = work.scores.data() + row * RUN_KEYS;
    const int64_t begin = a.window ? std::max<int64_t>(0, position - a.window + 1 - first_key) : 0;
    const int64_t end = std::min<int64_t>(count * BLOCK_TOKENS, position + 1 - first_key);
    uint32_t* weights = work.weights.data() + row * (RUN_KEYS / 2);
    if (end <= begin) {
        std::memset(weights, 0, count * BLOCK_TOKENS / 2 * sizeof *weights);
        return;
    }
    const int64_t keys = count * BLOCK_TOKENS;
    if (a.softcap > 0) {  // scores are in units of log2
        const __m512 cap = _mm512_set1_ps(a.softcap * LOG2_E);
        for (int64_t k = 0; k < keys; k += 16)
            _mm512_storeu_ps(scores + k, _mm512_mul_ps(tanh(_mm512_div_ps(_mm512_loadu_ps(scores + k), cap)), cap));
    }
    for (int64_t k = 0; k < begin; k++) scores[k] = -INFINITY;
    for (int64_t k = end; k < keys; k++) scores[k] = -INFINITY;
    __m512 most = _mm512_loadu_ps(scores);
    for (int64_t k = 16; k < keys; k += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + k));
    const float before = work.largest[row], largest = std::max(before, _mm512_reduce_max_ps(most));
    if (largest > before) {
        const float shrink = std::exp2(before - largest);  // 0 in the first run
        work.sum[row] *= shrink;
        float* out = work.out.data() + row * a.shape.wide_dim();
        for (int64_t d = 0; d < a.shape.wide_dim(); d += 16)
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), _mm512_set1_ps(shrink)));
        work.largest[row] = largest;
    }
    const __m512 top = _mm512_set1_ps(largest);
    __m512 total = _mm512_setzero_ps();
    uint16_t* halves = reinterpret_cast<uint16_t*>(weights);
    for (int64_t k = 0; k < keys; k += 16) {
        const __m512 weight = exp2_short(_mm512_sub_ps(_mm512_loadu_ps(scores + k), top));
        total = _mm512_add_ps(total, weight);
        _mm256_storeu_si256((__m256i*)(halves + k), narrow(weight));
    }
    work.sum[row] += _mm512_reduce_add_ps(total);
}

// One unit's rows for one key head. queries, out: row 0 of the step, at that key head's first query head.
inline void attend(const Attention& a, const Unit& unit, int64_t head, const float* queries, const uint8_t* pool,
                   Workspace& work, float* out) {
    const int64_t dim = a.shape.dim, pairs = dim / 2, wide = a.shape.wide_dim(), rows = unit.count * a.group;
    work.queries.resize(rows * pairs);
    work.weights.resize(rows * RUN_KEYS / 2);
    work.scores.resize(rows * RUN_KEYS);
    work.out.assign(rows * wide, 0.0f);
    work.largest.assign(rows, -INFINITY);
    work.sum.assign(rows, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
        const float* query = queries + (unit.first_row + r / a.group) * a.query_stride + r % a.group * dim;
        uint16_t* scaled = reinterpret_cast<uint16_t*>(work.queries.data() + r * pairs);
        const __m512 factor = _mm512_set1_ps(a.scale * LOG2_E);
        for (int64_t d = 0; d < dim; d += 16) {
            const __mmask16 some = first_lanes(dim - d);
            _mm256_mask_storeu_epi16(scaled + d, some, narrow(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, query + d), factor)));
        }
    }
    const int64_t last_position = unit.first_position + unit.count - 1;
    const int64_t first_seen = a.window ? std::max<int64_t>(0, unit.first_position - a.window + 1) : 0;
    for (int64_t key = first_seen / RUN_KEYS * RUN_KEYS; key <= last_position; key += RUN_KEYS) {
        const int64_t count = std::min(RUN_BLOCKS, (last_position - key) / BLOCK_TOKENS + 1);
        const uint8_t* blocks[RUN_BLOCKS];
        // Blocks before the window may have been given away; their keys are masked, so any block stands in for them.
        for (int64_t b = 0; b < count; b++)
            blocks[b] = pool + unit.table[key / BLOCK_TOKENS + b] * a.shape.block_bytes() + head * a.shape.head_bytes();
        if (rows < UNIT_ROWS)  // few rows: what they take from memory is not hidden by what they compute
            for (int64_t b = 0; b < count; b++)
                for (int64_t byte = 0; byte < a.shape.head_bytes(); byte += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(blocks[b] + byte), _MM_HINT_T0);
        if (a.shape.int8) {
            const int64_t size = (dim + wide) * BLOCK_TOKENS * 2;
            work.widened.resize(RUN_BLOCKS * size);
            for (int64_t b = 0; b < count; b++) {
                widen_block(a.shape, blocks[b], work.widened.data() + b * size);
                blocks[b] = work.widened.data() + b * size;
            }
        }
        int64_t row = 0;
        for (; row + SUB_ROWS <= rows; row += SUB_ROWS) score_run<SUB_ROWS>(a, work, row, blocks, count);
        switch (rows - row) {
            case 5: score_run<5>(a, work, row, blocks, count); break;
            case 4: score_run<4>(a, work, row, blocks, count); break;
            case 3: score_run<3>(a, work, row, blocks, count); break;
            case 2: score_run<2>(a, work, row, blocks, count); break;
            case 1: score_run<1>(a, work, row, blocks, count); break;
        }
        for (int64_t r = 0; r < rows; r++) soften_row(a, work, r, unit.first_position + r / a.group, key, count);
        row = 0;
        for (; row + SUB_ROWS <= rows; row += SUB_ROWS) weigh_run<SUB_ROWS>(a, work, row, blocks, count);
        switch (rows - row) {
            case 5: weigh_run<5>(a, work, row, blocks, count); break;
            case 4: weigh_run<4>(a, work, row, blocks, count); break;
            case 3: weigh_run<3>(a, work, row, blocks, count); break;
            case 2: weigh_run<2>(a, work, row, blocks, count); break;
            case 1: weigh_run<1>(a, work, row, blocks, count); break;
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float* target = out + (unit.first_row + r / a.group) * a.out_stride + r % a.group * dim;
        const float inverse = 1 / work.sum[r];
        for (int64_t d = 0; d < dim; d += 16) {
            const __mmask16 some = first_lanes(dim - d);
            const __m512 sum = _mm512_maskz_loadu_ps(some, work.out.data() + r * wide + d);
            _mm512_mask_storeu_ps(target + d, some, _mm512_mul_ps(sum, _mm512_set1_ps(inverse)));
        }
    }
}

}  // namespace farthing

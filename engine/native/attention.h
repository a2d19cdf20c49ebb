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
    uint32_t* pairs = reinterpret_cast<uint32_t*>(block);
    for (int64_t d = 0; d < shape.dim / 2; d++) pairs[d * BLOCK_TOKENS + token] = narrow_pair(key[2 * d], key[2 * d + 1]);
    uint16_t* line = reinterpret_cast<uint16_t*>(values) + token / 2 * shape.wide_dim() * 2 + token % 2;
    for (int64_t d = 0; d < shape.dim; d++) line[2 * d] = narrow(value[d]);
}

// What a thread needs while it attends: kept between units, grown as needed.
struct Workspace {
    std::vector<uint32_t> queries, weights;
    std::vector<float> scores, out, largest, sum;
    std::vector<uint8_t> widened;
};

// An int8 block's keys or values as the pairs that the bfloat16 layout has.
inline void widen_block(const KvShape& shape, const uint8_t* block, uint8_t* out) {
    const int8_t* keys = reinterpret_cast<const int8_t*>(block);
    const float* scales = reinterpret_cast<const float*>(block + BLOCK_TOKENS * shape.dim);
    uint32_t* pairs = reinterpret_cast<uint32_t*>(out);
    for (int64_t t = 0; t < BLOCK_TOKENS; t++)
        for (int64_t d = 0; d < shape.dim / 2; d++)
            pairs[d * BLOCK_TOKENS + t] =
                narrow_pair(keys[t * shape.dim + 2 * d] * scales[t], keys[t * shape.dim + 2 * d + 1] * scales[t]);
    const int8_t* values = reinterpret_cast<const int8_t*>(block + shape.key_bytes());
    scales = reinterpret_cast<const float*>(block + shape.key_bytes() + BLOCK_TOKENS * shape.dim);
    uint32_t* lines = reinterpret_cast<uint32_t*>(out + shape.dim * BLOCK_TOKENS * 2);
    for (int64_t t = 0; t < BLOCK_TOKENS; t += 2)
        for (int64_t d = 0; d < shape.dim; d++)
            lines[t / 2 * shape.wide_dim() + d] =
                narrow_pair(values[t * shape.dim + d] * scales[t], values[(t + 1) * shape.dim + d] * scales[t + 1]);
}

// Scores of R rows against one block's 16 keys. queries: [R][dim / 2] pairs, scaled already.
template <int R>
__attribute__((noinline)) void score_block(const uint32_t* queries, const uint32_t* keys, int64_t pairs, float* scores) {
    __m512 sums[R];
    each<R>([&](auto r) __attribute__((always_inline)) { sums[r] = _mm512_setzero_ps(); });
    for (int64_t d = 0; d < pairs; d++) {
        const __m512i key = _mm512_loadu_si512(keys + d * BLOCK_TOKENS);
        each<R>([&](auto r) __attribute__((always_inline)) {
            sums[r] = dot_pairs(sums[r], key, _mm512_set1_epi32(queries[r * pairs + d]));
        });
    }
    each<R>([&](auto r) __attribute__((always_inline)) { _mm512_storeu_ps(scores + r * RUN_KEYS, sums[r]); });
}

// Add the weighted values of one block to C x 16 elements of R rows. weights: [R][RUN_KEYS / 2] pairs.
template <int R, int C>
__attribute__((noinline)) void weigh_block(const uint32_t* weights, const uint32_t* lines, int64_t wide_dim, float* out) {
    __m512 sums[R * C];
    each<R * C>([&](auto i) __attribute__((always_inline)) {
        sums[i] = _mm512_loadu_ps(out + i / C * wide_dim + 16 * (i % C));
    });
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
    for (int64_t b = 0; b < count; b++)
        score_block<R>(work.queries.data() + row * pairs, reinterpret_cast<const uint32_t*>(blocks[b]), pairs,
                       work.scores.data() + row * RUN_KEYS + b * BLOCK_TOKENS);
}

template <int R>
void weigh_run(const Attention& a, Workspace& work, int64_t row, const uint8_t* const* blocks, int64_t count) {
    const int64_t wide = a.shape.wide_dim(), offset = a.shape.dim * BLOCK_TOKENS * 2;
    const uint32_t* weights = work.weights.data() + row * (RUN_KEYS / 2);
    float* out = work.out.data() + row * wide;
    for (int64_t b = 0; b < count; b++, weights += BLOCK_TOKENS / 2) {
        const uint32_t* lines = reinterpret_cast<const uint32_t*>(blocks[b] + offset);
        int64_t first = 0;
        for (; first + 64 <= wide; first += 64) weigh_block<R, 4>(weights, lines + first, wide, out + first);
        for (; first < wide; first += 16) weigh_block<R, 1>(weights, lines + first, wide, out + first);
    }
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
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i from = _mm512_set1_epi32(static_cast<int>(begin)), to = _mm512_set1_epi32(static_cast<int>(end));
    __m512 most = nothing;
    for (int64_t k = 0; k < count * BLOCK_TOKENS; k += 16) {
        const __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(k)));
        const __mmask16 seen = _mm512_cmpge_epi32_mask(key, from) & _mm512_cmplt_epi32_mask(key, to);
        __m512 score = _mm512_loadu_ps(scores + k);
        if (a.softcap > 0) {  // scores are in units of log2
            const __m512 cap = _mm512_set1_ps(a.softcap * LOG2_E);
            score = _mm512_mul_ps(tanh(_mm512_div_ps(score, cap)), cap);
        }
        score = _mm512_mask_blend_ps(seen, nothing, score);
        _mm512_storeu_ps(scores + k, score);
        most = _mm512_max_ps(most, score);
    }
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
    for (int64_t k = 0; k < count * BLOCK_TOKENS; k += 16) {
        const __m512 weight = exp2(_mm512_sub_ps(_mm512_loadu_ps(scores + k), top));
        // Round to bfloat16 as `narrow` does, and add up what will be multiplied.
        __m512i bits = _mm512_castps_si512(weight);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        bits = _mm512_srli_epi32(bits, 16);
        total = _mm512_add_ps(total, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
        _mm256_storeu_si256((__m256i*)(halves + k), _mm512_cvtepi32_epi16(bits));
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
        const float factor = a.scale * LOG2_E;
        for (int64_t d = 0; d < pairs; d++)
            work.queries[r * pairs + d] = narrow_pair(query[2 * d] * factor, query[2 * d + 1] * factor);
    }
    const int64_t last_position = unit.first_position + unit.count - 1;
    const int64_t first_seen = a.window ? std::max<int64_t>(0, unit.first_position - a.window + 1) : 0;
    for (int64_t key = first_seen / RUN_KEYS * RUN_KEYS; key <= last_position; key += RUN_KEYS) {
        const int64_t count = std::min(RUN_BLOCKS, (last_position - key) / BLOCK_TOKENS + 1);
        const uint8_t* blocks[RUN_BLOCKS];
        // Blocks before the window may have been given away; their keys are masked, so any block stands in for them.
        for (int64_t b = 0; b < count; b++)
            blocks[b] = pool + unit.table[key / BLOCK_TOKENS + b] * a.shape.block_bytes() + head * a.shape.head_bytes();
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
        for (int64_t d = 0; d < dim; d++) target[d] = work.out[r * wide + d] * inverse;
    }
}

}  // namespace farthing

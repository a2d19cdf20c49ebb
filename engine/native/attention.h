// Paged causal attention over KV blocks that are read where they lie (Kwon et al., 2023), with an online softmax over
// runs of keys (Dao et al., 2022). With int8 blocks queries are rounded to int8 and weights to eight bits too, and
// queries and keys come `spread`.
//
// A row's result depends on that row alone, bit for bit: runs start at multiples of RUN_KEYS, and a run that a row
// does not see leaves its sums as they are.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kv_block.h"

namespace farthing {

constexpr int64_t RUN_BLOCKS = 8;
constexpr int64_t RUN_KEYS = RUN_BLOCKS * BLOCK_TOKENS;
constexpr int64_t UNIT_ROWS = 24;  // query rows (positions x heads that share a key head) of one unit of work
constexpr int SUB_ROWS = 6;        // rows of one register tile

// What a thread needs while it attends: kept between units, grown as needed. By row of a unit.
struct Workspace {
    std::vector<uint32_t> queries;  // [dim / 2] pairs or [dim / 4] fours, scaled
    std::vector<uint32_t> weights;  // [RUN_KEYS / 2] pairs or [RUN_KEYS / 4] fours
    std::vector<float> scores, out;  // [RUN_KEYS], [wide_dim]
    std::vector<float> largest, sum, query_steps, weight_steps;
    std::vector<int32_t> query_sums;
};

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

// The same two in int8. steps and sums: of the queries' rows.
template <int R, int B>
__attribute__((noinline)) void score_blocks_int8(const uint32_t* queries, const float* steps, const int32_t* totals,
                                                 const uint8_t* const* blocks, int64_t quads, float* scores) {
    __m512i dots[R * B];
    each<R * B>([&](auto i) __attribute__((always_inline)) { dots[i] = _mm512_set1_epi32(-128 * totals[i / B]); });
    const uint8_t* keys[B];
    each<B>([&](auto b) __attribute__((always_inline)) { keys[b] = blocks[b]; });
    for (int64_t q = 0; q < quads; q++) {
        __m512i key[B];
        each<B>([&](auto b) __attribute__((always_inline)) { key[b] = _mm512_loadu_si512(keys[b] + q * 64); });
        each<R>([&](auto r) __attribute__((always_inline)) {
            const __m512i query = _mm512_set1_epi32(queries[r * quads + q]);
            each<B>([&](auto b) __attribute__((always_inline)) { dots[r * B + b] = dot(dots[r * B + b], key[b], query); });
        });
    }
    each<R * B>([&](auto i) __attribute__((always_inline)) {
        const __m512 step = _mm512_mul_ps(_mm512_loadu_ps(keys[i % B] + quads * 64), _mm512_set1_ps(steps[i / B]));
        _mm512_storeu_ps(scores + i / B * RUN_KEYS + i % B * BLOCK_TOKENS, _mm512_mul_ps(_mm512_cvtepi32_ps(dots[i]), step));
    });
}

template <int R, int C>
__attribute__((noinline)) void weigh_blocks_int8(const uint32_t* weights, const float* steps, const uint8_t* const* blocks,
                                                 int64_t count, int64_t offset, int64_t wide_dim, float* out) {
    __m512i dots[R * C];
    each<R * C>([&](auto i) __attribute__((always_inline)) { dots[i] = _mm512_setzero_si512(); });
    for (int64_t b = 0; b < count; b++, weights += BLOCK_TOKENS / 4) {
        const uint8_t* lines = blocks[b] + offset;
        for (int64_t t = 0; t < BLOCK_TOKENS / 4; t++, lines += 4 * wide_dim) {
            __m512i value[C];
            each<C>([&](auto c) __attribute__((always_inline)) { value[c] = _mm512_loadu_si512(lines + 64 * c); });
            each<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i weight = _mm512_set1_epi32(weights[r * (RUN_KEYS / 2) + t]);
                each<C>([&](auto c) __attribute__((always_inline)) {
                    dots[r * C + c] = dot(dots[r * C + c], weight, value[c]);
                });
            });
        }
    }
    each<R * C>([&](auto i) __attribute__((always_inline)) {
        float* at = out + i / C * wide_dim + 16 * (i % C);
        _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), _mm512_set1_ps(steps[i / C]), _mm512_loadu_ps(at)));
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
    float* scores = work.scores.data() + row * RUN_KEYS;
    int64_t b = 0;
    if (a.shape.int8) {
        const uint32_t* queries = work.queries.data() + row * a.shape.quads();
        const float* steps = work.query_steps.data() + row;
        const int32_t* totals = work.query_sums.data() + row;
        for (; b + 2 <= count; b += 2)
            score_blocks_int8<R, 2>(queries, steps, totals, blocks + b, a.shape.quads(), scores + b * BLOCK_TOKENS);
        if (b < count)
            score_blocks_int8<R, 1>(queries, steps, totals, blocks + b, a.shape.quads(), scores + b * BLOCK_TOKENS);
        return;
    }
    const int64_t pairs = a.shape.dim / 2;
    const uint32_t* queries = work.queries.data() + row * pairs;
    for (; b + 2 <= count; b += 2) score_blocks<R, 2>(queries, blocks + b, pairs, scores + b * BLOCK_TOKENS);
    if (b < count) score_blocks<R, 1>(queries, blocks + b, pairs, scores + b * BLOCK_TOKENS);
}

template <int R>
void weigh_run(const Attention& a, Workspace& work, int64_t row, const uint8_t* const* blocks, int64_t count) {
    const int64_t wide = a.shape.wide_dim(), offset = a.shape.key_bytes();
    const uint32_t* weights = work.weights.data() + row * (RUN_KEYS / 2);
    float* out = work.out.data() + row * wide;
    int64_t first = 0;
    if (a.shape.int8) {
        const float* steps = work.weight_steps.data() + row;
        for (; first + 64 <= wide; first += 64)
            weigh_blocks_int8<R, 4>(weights, steps, blocks, count, offset + 4 * first, wide, out + first);
        for (; first < wide; first += 16)
            weigh_blocks_int8<R, 1>(weights, steps, blocks, count, offset + 4 * first, wide, out + first);
        return;
    }
    for (; first + 64 <= wide; first += 64) weigh_blocks<R, 4>(weights, blocks, count, offset + 4 * first, wide, out + first);
    for (; first < wide; first += 16) weigh_blocks<R, 1>(weights, blocks, count, offset + 4 * first, wide, out + first);
}

// One row's weights of a run of N blocks, times their values' scales, to eight bits.
template <int N>
inline void round_weights(const Attention& a, __m512* weights, const uint8_t* const* blocks, uint32_t* out, float& size) {
    const int64_t offset = a.shape.key_bytes() + a.shape.wide_dim() * BLOCK_TOKENS;
    __m512 most = _mm512_setzero_ps();
    each<N>([&](auto b) __attribute__((always_inline)) {
        weights[b] = _mm512_mul_ps(weights[b], _mm512_loadu_ps(blocks[b] + offset));
        most = _mm512_max_ps(most, weights[b]);
    });
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 steps = _mm512_set1_ps(largest > 0 ? 255 / largest : 0);
    each<N>([&](auto b) __attribute__((always_inline)) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(weights[b], steps));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + b, _mm512_cvtusepi32_epi8(rounded));
    });
    size = largest / 255;
}

// Scores of one row's run of N blocks to weights: mask, soft-cap, and the online softmax's bookkeeping. Keys are
// first_key.. . The run stays in registers.
template <int N>
void soften_row(const Attention& a, Workspace& work, int64_t row, int64_t position, int64_t first_key,
                const uint8_t* const* blocks) {
    constexpr int64_t KEYS = N * BLOCK_TOKENS;
    const float* scores = work.scores.data() + row * RUN_KEYS;
    const int64_t begin = a.window ? std::max<int64_t>(0, position - a.window + 1 - first_key) : 0;
    const int64_t end = std::min(KEYS, position + 1 - first_key);
    uint32_t* weights = work.weights.data() + row * (RUN_KEYS / 2);
    if (end <= begin) {
        std::memset(weights, 0, KEYS / 2 * sizeof *weights);
        return;
    }
    __m512 run[N];
    each<N>([&](auto b) __attribute__((always_inline)) { run[b] = _mm512_loadu_ps(scores + b * BLOCK_TOKENS); });
    if (a.softcap > 0) {  // scores are in units of log2
        const __m512 cap = _mm512_set1_ps(a.softcap * LOG2_E);
        for (__m512& part : run) part = _mm512_mul_ps(tanh(_mm512_div_ps(part, cap)), cap);
    }
    if (begin > 0 || end < KEYS)
        each<N>([&](auto b) __attribute__((always_inline)) {
            const auto below = [&](int64_t key) { return first_lanes(std::max<int64_t>(0, key - b * BLOCK_TOKENS)); };
            run[b] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), below(end) & ~below(begin), run[b]);
        });
    __m512 most = run[0];
    each<N>([&](auto b) __attribute__((always_inline)) { most = _mm512_max_ps(most, run[b]); });
    const float before = work.largest[row], largest = std::max(before, _mm512_reduce_max_ps(most));
    if (largest > before && before > -INFINITY) {
        const float shrink = std::exp2(before - largest);
        work.sum[row] *= shrink;
        float* out = work.out.data() + row * a.shape.wide_dim();
        for (int64_t d = 0; d < a.shape.wide_dim(); d += 16)
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), _mm512_set1_ps(shrink)));
    }
    work.largest[row] = largest;
    const __m512 top = _mm512_set1_ps(largest);
    __m512 total = _mm512_setzero_ps();
    each<N>([&](auto b) __attribute__((always_inline)) {
        run[b] = exp2_short(_mm512_sub_ps(run[b], top));
        total = _mm512_add_ps(total, run[b]);
    });
    work.sum[row] += _mm512_reduce_add_ps(total);
    if (a.shape.int8) return round_weights<N>(a, run, blocks, weights, work.weight_steps[row]);
    each<N>([&](auto b) __attribute__((always_inline)) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights) + b, narrow_weight(run[b]));
    });
}

inline void soften(const Attention& a, Workspace& work, int64_t row, int64_t position, int64_t first_key,
                   const uint8_t* const* blocks, int64_t count) {
    static_assert(RUN_BLOCKS == 8);
    switch (count) {
        case 8: return soften_row<8>(a, work, row, position, first_key, blocks);
        case 7: return soften_row<7>(a, work, row, position, first_key, blocks);
        case 6: return soften_row<6>(a, work, row, position, first_key, blocks);
        case 5: return soften_row<5>(a, work, row, position, first_key, blocks);
        case 4: return soften_row<4>(a, work, row, position, first_key, blocks);
        case 3: return soften_row<3>(a, work, row, position, first_key, blocks);
        case 2: return soften_row<2>(a, work, row, position, first_key, blocks);
        case 1: return soften_row<1>(a, work, row, position, first_key, blocks);
    }
}

// One unit's rows for one key head. queries, out: row 0 of the step, at that key head's first query head.
inline void attend(const Attention& a, const Unit& unit, int64_t head, const float* queries, const uint8_t* pool,
                   Workspace& work, float* out) {
    const int64_t dim = a.shape.dim, pairs = dim / 2, wide = a.shape.wide_dim(), rows = unit.count * a.group;
    work.queries.resize(rows * std::max(pairs, a.shape.quads()) + 16);
    work.weights.resize(rows * RUN_KEYS / 2);
    work.scores.resize(rows * RUN_KEYS);
    work.out.assign(rows * wide, 0.0f);
    work.largest.assign(rows, -INFINITY);
    work.sum.assign(rows, 0.0f);
    work.query_steps.resize(rows);
    work.query_sums.resize(rows);
    work.weight_steps.assign(rows, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
        const float* query = queries + (unit.first_row + r / a.group) * a.query_stride + r % a.group * dim;
        if (a.shape.int8) {
            int8_t rounded[LARGEST_DIM];
            work.query_steps[r] = quantise_head(query, dim, a.scale * LOG2_E, rounded);
            work.query_sums[r] = std::accumulate(rounded, rounded + dim, 0);
            std::memcpy(work.queries.data() + r * a.shape.quads(), rounded, a.shape.quads() * 4);
            continue;
        }
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
        int64_t row = 0;
        for (; row + SUB_ROWS <= rows; row += SUB_ROWS) score_run<SUB_ROWS>(a, work, row, blocks, count);
        switch (rows - row) {
            case 5: score_run<5>(a, work, row, blocks, count); break;
            case 4: score_run<4>(a, work, row, blocks, count); break;
            case 3: score_run<3>(a, work, row, blocks, count); break;
            case 2: score_run<2>(a, work, row, blocks, count); break;
            case 1: score_run<1>(a, work, row, blocks, count); break;
        }
        for (int64_t r = 0; r < rows; r++)
            soften(a, work, r, unit.first_position + r / a.group, key, blocks, count);
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
